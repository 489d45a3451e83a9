// Attention of few queries whose heads have more than 256 values: latent attention, whose 16 to 128
// heads of queries share one stored head that is keys and values, and other wide heads.
//
// A block works on 16 query rows that share a head of keys (8 in float32). It widens a tile of keys
// into shared memory and multiplies it by them, each warp for keys of its own; turns scores into
// weights, several threads a row; and adds the weighted values, each warp for values of its own
// of each row's sum, which therefore fit in registers. Values that are the keys are in place
// already, and so are read once. Queries of 16 bits are multiplied on tensor cores, with keys,
// values and weights rounded to their type; those of float32 by plain arithmetic. Sums are float32.
// Splits of the keys, and their merge, are attention.cu's.
#include <algorithm>
#include <atomic>

#include "attention_wide.cuh"
#include "floats.cuh"
#include "tile_fragment.cuh"

namespace exkv {
namespace {

constexpr int kDim = static_cast<int>(kWideDim);
constexpr int kThreads = kBlockKeys;
constexpr int kWarps = kThreads / kLanes;
constexpr int kPiece = 16;  // values that a product on tensor cores makes a warp's sums of
constexpr int kBlocks = static_cast<int>(kWideBlocks);

template <typename T>
struct Shape {
  static constexpr bool kNarrow = sizeof(T) == 2;  // tensor cores
  static constexpr int kRows = kNarrow ? 16 : 8;
  static constexpr int kKeys = kNarrow ? 32 : 16;
  // From a row in shared memory to the next: eight rows begin in eight different banks of 16 bytes.
  static constexpr int kPad = 16 / static_cast<int>(sizeof(T));
  static constexpr int kStep = kDim + kPad, kWeightStep = kKeys + kPad, kScoreStep = kKeys + 4;
  static constexpr int kBytes =
      ((kRows + kKeys) * kStep + kRows * kWeightStep) * static_cast<int>(sizeof(T)) +
      kRows * ((kScoreStep + 1) * static_cast<int>(sizeof(float)) +
               static_cast<int>(sizeof(StateTail) + sizeof(Range)));
  static_assert(kBytes <= 64 << 10, "what a block has on compute capability 7.5");
  static_assert(kNarrow ? kKeys == 8 * kWarps : kRows * kKeys == kThreads, "who has which scores");
};

// A block's shared memory.
template <typename T>
struct Space {
  T* q;              // (rows, D)
  T* tile;           // (keys, D), of keys or of values
  T* weights;        // (rows, keys)
  float* scores;     // (rows, keys)
  float* fades;      // (rows), of earlier tiles' weights
  StateTail* tails;  // (rows)
  Range* seen;       // (rows)
};

template <typename T>
__device__ Space<T> FindSpace(unsigned char* shared) {
  using S = Shape<T>;
  Space<T> space;
  space.q = reinterpret_cast<T*>(shared);
  space.tile = space.q + S::kRows * S::kStep;
  space.weights = space.tile + S::kKeys * S::kStep;
  space.scores = reinterpret_cast<float*>(space.weights + S::kRows * S::kWeightStep);
  space.tails = reinterpret_cast<StateTail*>(space.scores + S::kRows * S::kScoreStep);
  space.seen = reinterpret_cast<Range*>(space.tails + S::kRows);
  space.fades = reinterpret_cast<float*>(space.seen + S::kRows);
  return space;
}

// Where a block works.
struct Place {
  int row;   // of the batch
  int head;  // of keys
  int first_row;
};

// Values of a head that are in use, rounded up to those that scores are summed by; beyond the head
// they are zeros.
__device__ __forceinline__ int UsedDim(int dim) { return (dim + 31) / 32 * 32; }

// The block's queries into shared memory, zeros where there are none.
template <typename T>
__device__ void LoadQueries(const DecodeCall& p, const Place& place, const Space<T>& space) {
  using S = Shape<T>;
  const int spans = UsedDim(p.dim) / kFragment, group = p.heads / p.kv_heads;
  for (int i = static_cast<int>(threadIdx.x); i < S::kRows * spans; i += kThreads) {
    const int r = i / spans, at = place.first_row + r;
    const Span span = SpanOf(i % spans, p.dim);
    const Cursor cursor = FindCursor(p.q, place.row, place.head * group + at % group, span);
    const auto raw = Load<kKindOf<T>>(p.q, cursor, Spot{0, at / group}, at < p.rows);
    float x[kFragment];
    Widen<kKindOf<T>>(raw, Channels{}, x);
    PutFragment<T>(x, space.q + r * S::kStep + span.first);
  }
}

// Where a key of the block's row lies; only for keys that are read, whose pages are known.
__device__ __forceinline__ Spot SpotOf(const DecodeCall& p, int row, int key) {
  if (p.block_table == nullptr) return {0, key};
  const int entry = key / p.page;
  return {PageAt(p, p.block_table + row * p.table_row + entry), key - entry * p.page};
}

// Keys or values [first, first + kKeys) of the block's head as T, zeros where they aren't in
// `keys`. A thread widens the same values of several keys, whose channels' scales it then has.
template <Kind kKind, typename T>
__device__ void WidenTile(const DecodeCall& p, const Store& store, const Place& place, int first,
                          const Range& keys, T* tile) {
  using S = Shape<T>;
  constexpr int kDeep = Raw<kKind>::kBytes > 16 ? 2 : 4;  // loads under way
  constexpr int kStride = S::kKeys / kDeep;
  const int spans = UsedDim(p.dim) / kFragment;
  const int row = p.block_table == nullptr ? place.row : 0;
  for (int i = static_cast<int>(threadIdx.x); i < kStride * spans; i += kThreads) {
    const Span span = SpanOf(i % spans, p.dim);
    const Cursor cursor = FindCursor(store, row, place.head, span);
    Channels channels = {};
    if constexpr (IsByChannel(kKind)) {
      channels = LoadChannels<kKind>(store, cursor, SpotOf(p, place.row, max(first, keys.begin)));
    }
    Raw<kKind> raw[kDeep];
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      const int key = first + i / spans + j * kStride;
      const bool read = key >= keys.begin && key < keys.end;
      raw[j] = Load<kKind>(store, cursor, read ? SpotOf(p, place.row, key) : Spot{0, 0}, read);
    }
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      float x[kFragment];
      Widen<kKind>(raw[j], channels, x);
      PutFragment<T>(x, tile + (i / spans + j * kStride) * S::kStep + span.first);
    }
  }
}

template <typename T>
__device__ void WidenStore(const DecodeCall& p, const Store& store, const Place& place, int first,
                           const Range& keys, T* tile) {
  switch (store.kind) {
    case Kind::kFloat32:
      return WidenTile<Kind::kFloat32>(p, store, place, first, keys, tile);
    case Kind::kFloat16:
      return WidenTile<Kind::kFloat16>(p, store, place, first, keys, tile);
    case Kind::kBFloat16:
      return WidenTile<Kind::kBFloat16>(p, store, place, first, keys, tile);
    case Kind::kInt8:
      return WidenTile<Kind::kInt8>(p, store, place, first, keys, tile);
    case Kind::kInt4:
      return WidenTile<Kind::kInt4>(p, store, place, first, keys, tile);
    case Kind::kInt2:
      return WidenTile<Kind::kInt2>(p, store, place, first, keys, tile);
    case Kind::kInt4Channel:
      return WidenTile<Kind::kInt4Channel>(p, store, place, first, keys, tile);
    case Kind::kInt2Channel:
      return WidenTile<Kind::kInt2Channel>(p, store, place, first, keys, tile);
  }
}

// Products of queries and keys into shared memory: a warp has all rows of eight keys.
template <typename T>
__device__ __forceinline__ void Score(const Space<T>& space, int dim) {
  using S = Shape<T>;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const T* q = space.q + lane % 16 * S::kStep + lane / 16 * 8;
  const T* keys = space.tile + (warp * 8 + lane % 8) * S::kStep + lane / 8 * 8;
  float sums[2][4] = {};
  for (int d = 0; d < UsedDim(dim); d += 32) {
    uint32_t low[4], high[4], b[4];
    LoadMatrices(q + d, low);
    LoadMatrices(q + d + 16, high);
    LoadMatrices(keys + d, b);
    Multiply<T>(sums[0], low, b[0], b[1]);
    Multiply<T>(sums[1], high, b[2], b[3]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int r = LaneRow() + c / 2 * 8, key = warp * 8 + LaneColumn() + c % 2;
    space.scores[r * S::kScoreStep + key] = sums[0][c] + sums[1][c];
  }
}

// The same in float32: a thread has one score.
template <>
__device__ __forceinline__ void Score(const Space<float>& space, int dim) {
  using S = Shape<float>;
  const int r = static_cast<int>(threadIdx.x) / S::kKeys;
  const int key = static_cast<int>(threadIdx.x) % S::kKeys;
  float sums[4] = {};
  for (int d = 0; d < UsedDim(dim); d += 4) {
    const FloatFour a = FourAt(space.q + r * S::kStep + d);
    const FloatFour b = FourAt(space.tile + key * S::kStep + d);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(a.at[i], b.at[i], sums[i]);
  }
  space.scores[r * S::kScoreStep + key] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Turns the tile's scores into weights (online softmax: Milakov and Gimelshein, 2018). Neighbouring
// threads share a row; each knows its peak, and the sum of its own weights.
template <typename T>
__device__ __forceinline__ void Weigh(const DecodeCall& p, int first, const Range& keys,
                                      const Space<T>& space, StateTail* tail) {
  using S = Shape<T>;
  constexpr int kSharers = kThreads / S::kRows, kOwn = S::kKeys / kSharers;
  const int r = static_cast<int>(threadIdx.x) / kSharers;
  const int own = static_cast<int>(threadIdx.x) % kSharers;
  const Range seen = {max(space.seen[r].begin, keys.begin), min(space.seen[r].end, keys.end)};
  float scores[kOwn], peak = tail->peak;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = own + i * kSharers, key = first + at;
    float score = space.scores[r * S::kScoreStep + at] * p.scale;
    if (p.softcap > 0) score = p.softcap * tanhf(__fdiv_rn(score, p.softcap));
    scores[i] = key >= seen.begin && key < seen.end ? score : -INFINITY;
    // fmaxf passes NaN by; the exponential does not.
    peak = fmaxf(peak, scores[i]);
  }
  for (int step = 1; step < kSharers; step *= 2) {
    peak = fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, step));
  }
  const float fade = expf(tail->peak - Base(peak));
  *tail = {peak, tail->total * fade};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float weight = expf(scores[i] - Base(peak));
    tail->total += weight;
    space.weights[r * S::kWeightStep + own + i * kSharers] = FromFloat<T>(weight);
  }
  if (own == 0) space.fades[r] = fade;
}

// The sums over all threads that share a row.
template <typename T>
__device__ void PutTails(const StateTail& tail, const Space<T>& space) {
  constexpr int kSharers = kThreads / Shape<T>::kRows;
  float total = tail.total;
  for (int step = 1; step < kSharers; step *= 2) {
    total += __shfl_xor_sync(kFullWarp, total, step);
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % kSharers == 0) space.tails[thread / kSharers] = {tail.peak, total};
}

// A thread's share of the rows' sums: its warp has every fourth piece of them.
template <typename T>
struct Sums {
  float at[kDim / kPiece / kWarps][2][4];

  static __device__ __forceinline__ int First(int piece) {
    return (piece * kWarps + static_cast<int>(threadIdx.x) / kLanes) * kPiece;
  }

  // Weighs what was added before anew, and adds a tile of weighted values.
  __device__ __forceinline__ void Add(const Space<T>& space, int dim) {
    using S = Shape<T>;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const float fades[2] = {space.fades[LaneRow()], space.fades[LaneRow() + 8]};
#pragma unroll
    for (auto& piece : at) {
#pragma unroll
      for (int c = 0; c < 8; ++c) piece[c / 4][c % 4] *= fades[c % 4 / 2];
    }
#pragma unroll
    for (int n = 0; n < S::kKeys; n += 16) {
      uint32_t a[4];
      LoadMatrices(space.weights + lane % 16 * S::kWeightStep + lane / 16 * 8 + n, a);
      const T* values = space.tile + (n + lane % 16) * S::kStep + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < kDim / kPiece / kWarps; ++i) {
        if (First(i) >= dim) break;
        uint32_t b[4];
        LoadTransposed(values + First(i), b);
        Multiply<T>(at[i][0], a, b[0], b[1]);
        Multiply<T>(at[i][1], a, b[2], b[3]);
      }
    }
  }

  // put(r, d, sum) for each of them.
  template <typename Put>
  __device__ __forceinline__ void ForEach(int dim, const Put& put) const {
#pragma unroll
    for (int i = 0; i < kDim / kPiece / kWarps; ++i) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int d = First(i) + c / 4 * 8 + LaneColumn() + c % 2;
        if (d < dim) put(LaneRow() + c % 4 / 2 * 8, d, at[i][c / 4][c % 4]);
      }
    }
  }
};

// The same in float32: a thread has every 128th value of each row's sum.
template <>
struct Sums<float> {
  using S = Shape<float>;
  static constexpr int kOwn = (kDim + kThreads - 1) / kThreads;
  float at[S::kRows][kOwn];

  static __device__ __forceinline__ int ValueAt(int i) {
    return i * kThreads + static_cast<int>(threadIdx.x);
  }

  __device__ __forceinline__ void Add(const Space<float>& space, int dim) {
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) at[r][i] *= space.fades[r];
    }
    for (int key = 0; key < S::kKeys; ++key) {
      float x[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        x[i] = ValueAt(i) < dim ? space.tile[key * S::kStep + ValueAt(i)] : 0;
      }
#pragma unroll
      for (int r = 0; r < S::kRows; ++r) {
        const float weight = space.weights[r * S::kWeightStep + key];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) at[r][i] = fmaf(weight, x[i], at[r][i]);
      }
    }
  }

  template <typename Put>
  __device__ __forceinline__ void ForEach(int dim, const Put& put) const {
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (ValueAt(i) < dim) put(r, ValueAt(i), at[r][i]);
      }
    }
  }
};

// Results, or a split's state.
template <typename T>
__device__ void Write(const DecodeCall& p, const Place& place, int split, const Space<T>& space,
                      const Sums<T>& sums) {
  const int64_t head = static_cast<int64_t>(place.row) * p.kv_heads + place.head;
  const auto state = [&](int r) {
    return (head * p.rows + place.first_row + r) * p.splits + split;
  };
  const auto out_row = [&](int r) { return OutRow(p, place.row, place.head, place.first_row + r); };
  sums.ForEach(p.dim, [&](int r, int d, float sum) {
    if (place.first_row + r >= p.rows) return;
    if (p.splits == 1) {
      WriteValue(p, out_row(r), d, sum, space.tails[r].total);
    } else {
      p.state[state(r) * p.dim + d] = sum;
    }
  });
  const int r = static_cast<int>(threadIdx.x);
  if (r >= Shape<T>::kRows || place.first_row + r >= p.rows) return;
  if (p.splits == 1) {
    WriteLse(p, out_row(r), space.tails[r]);
  } else {
    Tails(p, int64_t{gridDim.z} * p.kv_heads * p.rows * p.splits)[state(r)] = space.tails[r];
  }
}

// Grid: (row_blocks * splits, H_kv, B). `one_store`: the values are the keys.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) WideKernel(DecodeCall p, bool one_store) {
  using S = Shape<T>;
  EXKV_DYNAMIC_SHARED(unsigned char, shared);
  const Space<T> space = FindSpace<T>(shared);
  const int split = static_cast<int>(blockIdx.x) / p.row_blocks;
  const Place place = {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y),
                       static_cast<int>(blockIdx.x) % p.row_blocks * S::kRows};
  LoadQueries<T>(p, place, space);
  FindSeen<S::kRows>(p, place.row, place.first_row, space.seen);
  const Range keys = BlockKeys(p, place.row, place.first_row, S::kRows, split);
  Sums<T> sums = {};
  StateTail tail = {-INFINITY, 0};
  for (int first = keys.begin / S::kKeys * S::kKeys; first < keys.end; first += S::kKeys) {
    WidenStore<T>(p, p.k, place, first, keys, space.tile);
    __syncthreads();
    Score(space, p.dim);
    __syncthreads();
    Weigh<T>(p, first, keys, space, &tail);
    if (!one_store) WidenStore<T>(p, p.v, place, first, keys, space.tile);
    __syncthreads();
    sums.Add(space, p.dim);
    __syncthreads();  // the tile and the weights are read
  }
  PutTails<T>(tail, space);
  __syncthreads();
  Write<T>(p, place, split, space, sums);
}

// The host's side ------------------------------------------------------------------------------

bool IsSame(const Plane& a, const Plane& b) {
  return a.data == b.data && a.row == b.row && a.token == b.token && a.head == b.head;
}

bool IsSame(const Store& a, const Store& b) {
  return a.kind == b.kind && IsSame(a.values, b.values) && IsSame(a.scale, b.scale) &&
         IsSame(a.offset, b.offset);
}

// Does something with T of the queries' type: function(T()). EXKV_HUNGRIEST_KERNELS: see
// prefill.cu.
template <typename Function>
auto ByType(FloatType type, const Function& function) {
  switch (type) {
    case FloatType::kFloat32:
      return function(float());
    case FloatType::kFloat16:
#ifndef EXKV_HUNGRIEST_KERNELS
      return function(__half());
#endif
    default:
      return function(__nv_bfloat16());
  }
}

// Asked for once.
template <typename T>
int BlocksHere() {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices];
  const auto ask = [] {
    AllowShared(WideKernel<T>, Shape<T>::kBytes);
    return BlocksAtOnce(WideKernel<T>, kThreads, Shape<T>::kBytes);
  };
  const int device = CurrentDevice();
  if (device < 0 || device >= kMostDevices) return ask();
  if (known[device] == 0) known[device] = ask();
  return known[device];
}

}  // namespace

WideBlocks WideBlocksFor(const AttentionParams& params) {
  return ByType(params.dtype, [](auto type) {
    using T = decltype(type);
    return WideBlocks{Shape<T>::kRows, std::min<int64_t>(BlocksHere<T>(), kWideBlocks)};
  });
}

void LaunchWide(const DecodeCall& p, const DecodePlan& plan, unsigned rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.row_blocks * plan.splits),
                  static_cast<unsigned>(p.kv_heads), rows);
  ByType(p.q_type, [&](auto type) {
    using T = decltype(type);
    AllowShared(WideKernel<T>, Shape<T>::kBytes);
    EXKV_LAUNCH(WideKernel<T>, grid, kThreads, Shape<T>::kBytes, stream, p, IsSame(p.k, p.v));
  });
}

}  // namespace exkv

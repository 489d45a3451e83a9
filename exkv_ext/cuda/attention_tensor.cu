// Attention of few queries on tensor cores, over keys and values of 16 or 8 bits: as attention.cu,
// whose arithmetic takes longer than reading 8-bit values does.
//
// A warp takes 16 keys at a time, as the 16 rows of a first factor (mma.cuh), and multiplies them
// by eight columns: four query rows, twice. So lane l has the scores of keys l / 4 and l / 4 + 8
// for columns 2 (l % 4) and the next. Each column's weights, transposed, are then the second factor
// of a product with the values. Weights have to be of 16 bits there: the first four columns have
// them rounded, the others what the rounding left, and both sums are added in the end, which leaves
// errors of 2^-17 and less. Values of 8 bits become 16-bit floats exactly, and scales, of 32
// values each, stay outside of the products: those of keys are multiplied to the scores' parts,
// those of values to the weights. Sums are float32.
//
// A lane loads values that lie together, so products run over a head's values in an order of their
// own, which is the same for both factors.
#include <algorithm>
#include <atomic>

#include "attention_tensor.cuh"
#include "mma.cuh"

namespace exkv {
namespace {

constexpr int kTileKeys = 16;  // of a product
constexpr int kSpan = 32;      // values that share a scale; a lane has eight of a key's
constexpr int kRows = kTensorRows;
constexpr int kMostTiles = 3;  // of a block: 12 warps, which leaves each thread 168 registers
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
static_assert(kSpan == static_cast<int>(kGroup), "values of a span share a scale");

// How a kernel is made: the queries' type, whether keys and values have 8 bits, and the most spans
// of a head, 2 or 4.
template <typename T, bool kEightBits, int kMostSpans>
struct Form {
  using Type = T;
  static constexpr bool kInt8 = kEightBits;
  static constexpr int kSpans = kMostSpans;
  static constexpr int kTiles = kSpans == 2 ? 2 : 1;  // of a warp's step
  static constexpr int kStep = kTiles * kTileKeys;
  static constexpr int kItem = kInt8 ? 1 : 2;                               // bytes of a value
  static constexpr int kKeyWords = 2 * kItem;                               // of eight values
  static constexpr int kValueWords = kItem;                                 // of four
  static constexpr int kScaleWords = kSpans / 2;                            // of a key's scales
  using Weight = typename std::conditional<kInt8, __nv_bfloat16, T>::type;  // times a scale
};

// Where a lane works in its warp's fragments: PTX's "groupID" and "threadID_in_group".
struct Lane {
  int group = static_cast<int>(threadIdx.x) % kLanes / 4;
  int place = static_cast<int>(threadIdx.x) % 4;
};

// The same tile of keys or of values as a lane loads it.
template <typename F>
struct Keys {  // l / 4 and l / 4 + 8
  uint32_t words[2][F::kSpans][F::kKeyWords];
  uint32_t scales[2][F::kScaleWords];
};
template <typename F>
struct Values {  // of keys 2 (l % 4), the next, and both + 8; scales as above
  uint32_t words[4][F::kSpans][F::kValueWords];
  uint32_t scales[2][F::kScaleWords];
};

// What a lane knows of its two columns.
template <typename F>
struct Columns {
  uint32_t q[F::kSpans][4];  // of column l / 4, as the second factor
  float out[F::kSpans][2][4];
  Range seen[2];
  float peak[2];  // times log2(e), alike in the lanes that share a column
  float total[2];
};

// A head's keys or values, and where a lane's begin.
struct Stream {
  const Plane* values;
  const unsigned char* first;
  const Plane* scales;
  const unsigned char* first_scale;
};

__device__ __forceinline__ Stream StreamOf(const Store& store, int row, int head, int offset) {
  return {&store.values, HeadOf(store.values, row, head) + offset, &store.scale,
          HeadOf(store.scale, row, head)};
}

template <int kWords>
__device__ __forceinline__ void LoadWords(const unsigned char* from, uint32_t (&to)[kWords]) {
  const auto chunk = *reinterpret_cast<const Chunk<4 * kWords>*>(from);
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = chunk.words[i];
}

// 16 keys of a warp, in one page.
struct Place {
  int first;
  int page;   // below 0 where there is none
  int token;  // in its page
};

__device__ __forceinline__ Place FindPlace(const DecodeCall& p, int row, const Range& keys,
                                           int first) {
  if (p.block_table == nullptr) return {first, 0, first};
  const int entry = first / p.page;
  const bool read = first + kTileKeys > keys.begin && first < keys.end;
  const int page = read ? PageAt(p, p.block_table + row * p.table_row + entry) : 0;
  return {first, page, first - entry * p.page};
}

__device__ __forceinline__ bool IsRead(const Range& keys, const Place& place, int key) {
  return place.first + key >= keys.begin && place.first + key < keys.end && place.page >= 0;
}

// A key's scales; NaN where there is no page, 0 where it is not read.
template <typename F>
__device__ __forceinline__ void LoadScales(const Stream& stream, const Place& place, int key,
                                           int spans, bool read, uint32_t (&to)[F::kScaleWords]) {
#pragma unroll
  for (uint32_t& word : to) word = place.page < 0 ? 0xffffffffu : 0;
  if (!read) return;
  const unsigned char* from =
      stream.first_scale + Steps(*stream.scales, place.page, place.token + key);
  if (spans == F::kSpans) return LoadWords(from, to);
#pragma unroll
  for (int span = 0; span < F::kSpans; ++span) {
    if (span < spans) to[span / 2] |= uint32_t{HalfAt(from + 2 * span)} << span % 2 * 16;
  }
}

template <typename F, int kMany, int kWords>
__device__ __forceinline__ void LoadKey(const Stream& stream, const Place& place, int key,
                                        int spans, bool read, uint32_t (&to)[kMany][kWords]) {
  const unsigned char* from = stream.first + Steps(*stream.values, place.page, place.token + key);
#pragma unroll
  for (int span = 0; span < kMany; ++span) {
    if (read && span < spans) {
      LoadWords(from + span * kSpan * F::kItem, to[span]);
    } else {
#pragma unroll
      for (uint32_t& word : to[span]) word = place.page < 0 ? 0xffffffffu : 0;
    }
  }
}

template <typename F>
__device__ __forceinline__ void LoadTile(const Stream& stream, const Range& keys,
                                         const Place& place, int spans, const Lane& lane,
                                         Keys<F>* tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = lane.group + 8 * i;
    const bool read = IsRead(keys, place, key);
    LoadKey<F>(stream, place, key, spans, read, tile->words[i]);
    if constexpr (F::kInt8) LoadScales<F>(stream, place, key, spans, read, tile->scales[i]);
  }
}

template <typename F>
__device__ __forceinline__ void LoadTile(const Stream& stream, const Range& keys,
                                         const Place& place, int spans, const Lane& lane,
                                         Values<F>* tile) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = 2 * lane.place + i % 2 + i / 2 * 8;
    LoadKey<F>(stream, place, key, spans, IsRead(keys, place, key), tile->words[i]);
  }
  if constexpr (F::kInt8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = lane.group + 8 * i;
      LoadScales<F>(stream, place, key, spans, IsRead(keys, place, key), tile->scales[i]);
    }
  }
}

// Of a key's span.
template <int kWords>
__device__ __forceinline__ float ScaleOf(const uint32_t (&scales)[kWords], int span) {
  return FloatOf<__half>(scales[span / 2], span % 2 == 1);
}

// Two neighbouring signed bytes of a word, the lower or the upper ones, as 16-bit floats.
template <typename T>
__device__ __forceinline__ uint32_t WidenBytes(uint32_t word, bool upper);
template <>
__device__ __forceinline__ uint32_t WidenBytes<__half>(uint32_t word, bool upper) {
  // 1024 + 128 + the byte: the lowest bits of 1024.
  const uint32_t shifted = __byte_perm(word ^ 0x80808080u, 0x64646464u, upper ? 0x4342 : 0x4140);
  return SubtractPairs<__half>(shifted, 0x64806480u);
}
template <>
__device__ __forceinline__ uint32_t WidenBytes<__nv_bfloat16>(uint32_t word, bool upper) {
  // 128 + the lowest seven bits, less 128 or, with the sign, 256.
  const uint32_t bytes = __byte_perm(word, 0, upper ? 0x4342 : 0x4140);
  return SubtractPairs<__nv_bfloat16>((bytes & 0x007f007fu) | 0x43004300u,
                                      (bytes & 0x00800080u) | 0x43004300u);
}

// A tile's scores, before they are scaled.
template <typename F>
__device__ __forceinline__ void Scores(const Keys<F>& keys, const Columns<F>& columns, int spans,
                                       float (&scores)[4]) {
  using T = typename F::Type;
  scores[0] = scores[1] = scores[2] = scores[3] = 0;
#pragma unroll
  for (int span = 0; span < F::kSpans; ++span) {
    if (span >= spans) break;
    const auto& q = columns.q[span];
    const auto &first = keys.words[0][span], &second = keys.words[1][span];
    if constexpr (F::kInt8) {
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a[4] = {WidenBytes<T>(first[i], false), WidenBytes<T>(second[i], false),
                               WidenBytes<T>(first[i], true), WidenBytes<T>(second[i], true)};
        Multiply<T>(part, a, q[2 * i], q[2 * i + 1]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[c] = fmaf(ScaleOf(keys.scales[c / 2], span), part[c], scores[c]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a[4] = {first[2 * i], second[2 * i], first[2 * i + 1], second[2 * i + 1]};
        Multiply<T>(scores, a, q[2 * i], q[2 * i + 1]);
      }
    }
  }
}

// The second factor of a product: weights of the tile's keys, or in the last columns what is left
// of them. `weights` lie as a product's sums do.
template <typename T>
__device__ __forceinline__ void WeightFragment(const float (&weights)[4], bool rest,
                                               uint32_t (&fragment)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = weights[2 * i], b = weights[2 * i + 1];
    const uint32_t rounded = PackPair<T>(a, b);
    const uint32_t left =
        PackPair<T>(a - FloatOf<T>(rounded, false), b - FloatOf<T>(rounded, true));
    fragment[i] = Transposed(rest ? left : rounded);
  }
}

// Adds four values of each of the lane's keys: two of the products' rows, two times.
template <typename F>
__device__ __forceinline__ void AddSpan(const Values<F>& values, int span,
                                        const uint32_t (&weights)[2], Columns<F>* columns) {
  using T = typename F::Weight;
  uint32_t w[4][F::kValueWords];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < F::kValueWords; ++j) w[i][j] = values.words[i][span][j];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t a[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (F::kInt8) {
        const uint32_t pairs =
            __byte_perm(w[2 * half][0], w[2 * half + 1][0], i == 0 ? 0x5140 : 0x7362);
        a[2 * half] = WidenBytes<T>(pairs, false);
        a[2 * half + 1] = WidenBytes<T>(pairs, true);
      } else {
        a[2 * half] = __byte_perm(w[2 * half][i], w[2 * half + 1][i], 0x5410);
        a[2 * half + 1] = __byte_perm(w[2 * half][i], w[2 * half + 1][i], 0x7632);
      }
    }
    Multiply<T>(columns->out[span][i], a, weights[0], weights[1]);
  }
}

template <typename F>
__device__ __forceinline__ void AddValues(const Values<F>& values, const float (&weights)[4],
                                          int spans, const Lane& lane, Columns<F>* columns) {
  using T = typename F::Weight;
  uint32_t fragment[2];
  if constexpr (!F::kInt8) WeightFragment<T>(weights, lane.place >= 2, fragment);
#pragma unroll
  for (int span = 0; span < F::kSpans; ++span) {
    if (span >= spans) break;
    if constexpr (F::kInt8) {
      float scaled[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) scaled[c] = weights[c] * ScaleOf(values.scales[c / 2], span);
      WeightFragment<T>(scaled, lane.place >= 2, fragment);
    }
    AddSpan<F>(values, span, fragment, columns);
  }
}

// Turns the step's scores into weights (online softmax: Milakov and Gimelshein, 2018).
template <typename F>
__device__ __forceinline__ void Weigh(const DecodeCall& p, int first, const Range& keys,
                                      const Lane& lane, float (&scores)[F::kTiles][4],
                                      Columns<F>* columns) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const Range seen = columns->seen[c];
    const int begin = max(seen.begin, keys.begin), end = min(seen.end, keys.end);
    float peak = columns->peak[c];
#pragma unroll
    for (int i = 0; i < 2 * F::kTiles; ++i) {
      const int key = first + lane.group + 8 * i;
      float& score = scores[i / 2][i % 2 * 2 + c];
      score *= p.scale;
      if (p.softcap > 0) score = p.softcap * tanhf(__fdiv_rn(score, p.softcap));
      score = key >= begin && key < end ? score * kLog2E : -INFINITY;
      peak = fmaxf(peak, score);  // which passes NaN by; the exponential does not
    }
#pragma unroll
    for (int step = 4; step < kLanes; step *= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, step));
    }
    const float base = Base(peak), fade = exp2f(columns->peak[c] - base);
    columns->peak[c] = peak;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2 * F::kTiles; ++i) {
      float& score = scores[i / 2][i % 2 * 2 + c];
      score = exp2f(score - base);
      total += score;
    }
    columns->total[c] = fmaf(columns->total[c], fade, total);
    if (fade == 1) continue;
#pragma unroll
    for (auto& span : columns->out) {
      span[0][c] *= fade;
      span[0][2 + c] *= fade;
      span[1][c] *= fade;
      span[1][2 + c] *= fade;
    }
  }
}

// The tile's queries; zeros where there is no row.
template <typename F>
__device__ void LoadQueries(const DecodeCall& p, int row, int head, int first_row, int spans,
                            const Lane& lane, Columns<F>* columns) {
  const int group = p.heads / p.kv_heads, at = first_row + lane.group % kRows;
  const bool there = at < p.rows;
  const int64_t from = row * p.queries.row + at / group * p.queries.token +
                       (int64_t{head} * group + at % group) * p.queries.head + lane.place * 8;
  const auto* q = static_cast<const uint16_t*>(p.queries.data) + (there ? from : 0);
#pragma unroll
  for (int span = 0; span < F::kSpans; ++span) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool here = there && span < spans;
      const uint16_t* pair = q + span * kSpan + 2 * i;
      columns->q[span][i] = here ? uint32_t{pair[0]} | uint32_t{pair[1]} << 16 : 0;
    }
  }
}

// What a tile's warps have found, in shared memory: values (warps, rows, D), and tails (warps,
// rows) before them.
struct Tile {
  StateTail* tails;
  float* values;
};

__host__ __device__ constexpr int TileBytes(int dim) {
  return static_cast<int>(kDecodeWarps) * kRows *
         static_cast<int>(sizeof(StateTail) + dim * sizeof(float));
}

__device__ __forceinline__ Tile FindTile(unsigned char* shared, int dim, int tile) {
  Tile found;
  found.tails = reinterpret_cast<StateTail*>(shared + tile * TileBytes(dim));
  found.values = reinterpret_cast<float*>(found.tails + kDecodeWarps * kRows);
  return found;
}

template <typename F>
__device__ void PutColumns(int dim, int spans, const Lane& lane, int warp, Columns<F>* columns,
                           const Tile& tile) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float& total = columns->total[c];
#pragma unroll
    for (int step = 4; step < kLanes; step *= 2) total += __shfl_xor_sync(kFullWarp, total, step);
    const int r = 2 * lane.place + c;
    if (lane.group == 0 && r < kRows) {
      tile.tails[warp * kRows + r] = {columns->peak[c] * kLn2, total};
    }
  }
#pragma unroll
  for (int span = 0; span < F::kSpans; ++span) {
    if (span >= spans) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = columns->out[span][i / 4][i % 4];
      sum += __shfl_xor_sync(kFullWarp, sum, 2);  // what the rounding of weights left
      const int r = 2 * lane.place + i % 2,
                d = span * kSpan + lane.group * 4 + i / 4 * 2 + i / 2 % 2;
      if (r < kRows) tile.values[(warp * kRows + r) * dim + d] = sum;
    }
  }
}

// Grid: (row_blocks * splits, H_kv, B); block: (4 warps, tiles).
template <typename F>
__global__ void __launch_bounds__(kBlockKeys* kMostTiles, 1) TensorDecodeKernel(DecodeCall p) {
  EXKV_DYNAMIC_SHARED(unsigned char, shared);
  const int tiles = static_cast<int>(blockDim.y), spans = p.dim / kSpan;
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x) / p.row_blocks;
  const int block_row = static_cast<int>(blockIdx.x) % p.row_blocks * tiles * kRows;
  const int first_row = block_row + static_cast<int>(threadIdx.y) * kRows;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const Lane lane;
  Columns<F> columns = {};
  const int group = p.heads / p.kv_heads;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int at = first_row + (2 * lane.place + c) % kRows;
    columns.seen[c] = at < p.rows ? VisibleTo(p, row, at / group) : Range{0, 0};
    columns.peak[c] = -INFINITY;
  }
  LoadQueries<F>(p, row, head, first_row, spans, lane, &columns);
  const int store_row = p.block_table == nullptr ? row : 0;
  const Stream keys = StreamOf(p.k, store_row, head, lane.place * 8 * F::kItem);
  const Stream values = StreamOf(p.v, store_row, head, lane.group * 4 * F::kItem);
  const Range range = BlockKeys(p, row, block_row, tiles * kRows, split);
  constexpr int kStride = static_cast<int>(kDecodeWarps) * F::kStep;
  // While a step's scores are computed its values are under way, and meanwhile the next one's keys.
  Keys<F> k[F::kTiles];
  Values<F> v[F::kTiles];
  const auto load = [&](const Stream& stream, int at, auto& tiles_of) {
    if (at >= range.end) return;
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) {
      const Place place = FindPlace(p, row, range, at + i * kTileKeys);
      LoadTile<F>(stream, range, place, spans, lane, &tiles_of[i]);
    }
  };
  int first = range.begin / kLanes * kLanes + warp * F::kStep;
  load(keys, first, k);
  load(values, first, v);
  for (; first < range.end; first += kStride) {
    float scores[F::kTiles][4];
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) Scores<F>(k[i], columns, spans, scores[i]);
    load(keys, first + kStride, k);
    Weigh<F>(p, first, range, lane, scores, &columns);
#pragma unroll
    for (int i = 0; i < F::kTiles; ++i) AddValues<F>(v[i], scores[i], spans, lane, &columns);
    load(values, first + kStride, v);
  }
  const Tile tile = FindTile(shared, p.dim, static_cast<int>(threadIdx.y));
  PutColumns<F>(p.dim, spans, lane, warp, &columns, tile);
  __syncthreads();
  WriteTile<kRows>(p, row, head, first_row, split, tile.tails,
                   [&](int r, int d, const StateTail& all) {
                     float sum = 0;
#pragma unroll
                     for (int i = 0; i < kDecodeWarps; ++i) {
                       const float fade = expf(tile.tails[i * kRows + r].peak - Base(all.peak));
                       sum = fmaf(tile.values[(i * kRows + r) * p.dim + d], fade, sum);
                     }
                     return sum;
                   });
}

// The host's side ------------------------------------------------------------------------------

using TensorKernel = void (*)(DecodeCall);

// Where a kernel stands among all of them.
int VariantOf(FloatType type, bool int8, int64_t dim) {
  return (type == FloatType::kFloat16 ? 4 : 0) + (int8 ? 2 : 0) + (dim > 2 * kSpan ? 1 : 0);
}

template <typename T>
TensorKernel KernelFor(bool int8, int64_t dim) {
  if (dim > 2 * kSpan) {
    return int8 ? TensorDecodeKernel<Form<T, true, 4>> : TensorDecodeKernel<Form<T, false, 4>>;
  }
  return int8 ? TensorDecodeKernel<Form<T, true, 2>> : TensorDecodeKernel<Form<T, false, 2>>;
}

TensorKernel KernelFor(FloatType type, bool int8, int64_t dim) {
  return type == FloatType::kFloat16 ? KernelFor<__half>(int8, dim)
                                     : KernelFor<__nv_bfloat16>(int8, dim);
}

// Whether a lane's scales of a key can be loaded at once.
bool ScalesAligned(const Plane& plane, int64_t dim) {
  const int64_t spans = dim > 2 * kSpan ? 4 : 2, bytes = spans * 2;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(plane.data));
  return dim % (spans * kSpan) != 0 ||
         (address | plane.row | plane.token | plane.head) % bytes == 0;
}

}  // namespace

bool FitsTensorCores(const AttentionParams& params) {
  if (params.dtype == FloatType::kFloat32 || params.dim % kSpan != 0 || params.dim > kTensorDim) {
    return false;
  }
  const AttentionCall p = CallOf(params);
  const Kind own = KindOf(KvFormat::kFloat, params.dtype);
  if (p.k.kind != p.v.kind || (p.k.kind != own && p.k.kind != Kind::kInt8)) return false;
  if (!p.k.aligned || !p.v.aligned || !HasTensorCores()) return false;
  return p.k.kind != Kind::kInt8 ||
         (ScalesAligned(p.k.scale, p.dim) && ScalesAligned(p.v.scale, p.dim));
}

int64_t TensorBlocks(const AttentionParams& params, int64_t tiles) {
  constexpr int kMostDevices = 64, kVariants = 8;
  static std::atomic<int> known[kMostDevices][kVariants][kMostTiles];
  const bool int8 = CallOf(params).k.kind == Kind::kInt8;
  const auto ask = [&] {
    return BlocksAtOnce(KernelFor(params.dtype, int8, params.dim),
                        static_cast<int>(tiles) * kBlockKeys,
                        static_cast<size_t>(tiles) * TileBytes(kTensorDim));
  };
  const int device = CurrentDevice();
  if (device < 0 || device >= kMostDevices) return ask();
  auto& blocks = known[device][VariantOf(params.dtype, int8, params.dim)][tiles - 1];
  if (blocks == 0) blocks = ask();
  return blocks;
}

void LaunchOnTensorCores(const DecodeCall& p, const DecodePlan& plan, unsigned rows,
                         cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(plan.tiles);
  const dim3 grid(static_cast<unsigned>(plan.row_blocks * plan.splits),
                  static_cast<unsigned>(p.kv_heads), rows);
  const auto kernel = KernelFor(p.q_type, p.k.kind == Kind::kInt8, p.dim);
  EXKV_LAUNCH(kernel, grid, dim3(kBlockKeys, tiles), tiles * TileBytes(p.dim), stream, p);
}

}  // namespace exkv

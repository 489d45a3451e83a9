// Attention of many queries over keys and values in any format: FlashAttention-2's loop (Dao, 2023)
// with a tile of keys, then of values, widened into shared memory by the block that needs it.
//
// A block works on 64 rows of queries that share a head of keys, so that a tile is widened once for
// all of a group's heads. A warp has 16 rows, in the fragments of mma.cuh: a lane holds two
// neighbouring keys' scores, or two features' sums, of rows l / 4 and l / 4 + 8 in every eight.
// Queries of 16 bits are multiplied on tensor cores, with keys, values and weights rounded to their
// type; those of float32 by plain arithmetic, in the same fragments. Sums are float32.
#include "attention_call.cuh"
#include "floats.cuh"
#include "prefill.cuh"
#include "tile_fragment.cuh"

namespace exkv {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kWarpRows = 16;
constexpr int kPiece = 8;  // keys or features that the lanes of four have two each of

// Blocks of a multiprocessor, for which there are registers; without a number, a compiler may aim
// at more of them, and spill. Products without tensor cores take more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kSmallBlocks = 2;
#else
constexpr int kSmallBlocks = 3;
#endif

// How a block of this kernel is made. kDim: the head dimension, rounded up. Looking keys up in a
// table takes registers, too.
template <typename T, int kDimension, bool kInPages>
struct Shape {
  using Type = T;
  static constexpr int kDim = kDimension;
  static constexpr bool kPaged = kInPages;
  static constexpr bool kNarrow = sizeof(T) == 2;  // tensor cores
  static constexpr int kWarps = !kNarrow && kDim > 128 ? 1 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kBlocks = kDim <= 128 && !kPaged ? kSmallBlocks : 2;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kNarrow && kDim <= 128 ? 64 : 32;
  // From a row in shared memory to the next: eight rows begin in eight different banks of 16 bytes.
  static constexpr int kStep = kDim + 16 / static_cast<int>(sizeof(T));
  static constexpr int kWeightStep = kKeys + 4;
  static constexpr int kWeights = kNarrow ? 0 : kRows * kWeightStep;
  static constexpr int kBytes = (kRows + kKeys) * kStep * static_cast<int>(sizeof(T)) +
                                kWeights * static_cast<int>(sizeof(float)) +
                                kRows * static_cast<int>(sizeof(Range));
  static_assert(kKeys % kGroup == 0, "a tile is whole groups of tokens");
  static_assert(kBytes <= 64 << 10, "what a block has on compute capability 7.5");
};

// A block's shared memory.
template <typename S>
struct Space {
  typename S::Type* q;     // (rows, D)
  typename S::Type* tile;  // (keys, D), of keys or of values
  float* weights;          // (rows, keys), where they aren't multiplied out of registers
  Range* seen;             // (rows)
};

template <typename S>
__device__ Space<S> FindSpace(unsigned char* shared) {
  Space<S> space;
  space.q = reinterpret_cast<typename S::Type*>(shared);
  space.tile = space.q + S::kRows * S::kStep;
  space.weights = reinterpret_cast<float*>(space.tile + S::kKeys * S::kStep);
  space.seen = reinterpret_cast<Range*>(space.weights + S::kWeights);
  return space;
}

// Where a block works.
struct Place {
  int row;   // of the batch
  int head;  // of keys
  int first_row;
};

// Values of a head that are in use, rounded up to what one product takes.
__device__ __forceinline__ int UsedDim(int dim) { return (dim + 15) / 16 * 16; }

// The block's queries into shared memory, zeros where there are none; and what each of them sees.
template <typename S>
__device__ void LoadQueries(const AttentionCall& p, const Place& place, const Space<S>& space) {
  using T = typename S::Type;
  constexpr int kSpans = S::kDim / kFragment;
  const int group = p.heads / p.kv_heads;
  for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kSpans; i += S::kThreads) {
    const int r = i / kSpans, at = place.first_row + r;
    const Span span = SpanOf(i % kSpans, p.dim);
    const Cursor cursor = FindCursor(p.q, place.row, place.head * group + at % group, span);
    const auto raw = Load<kKindOf<T>>(p.q, cursor, Spot{0, at / group}, at < p.rows);
    float x[kFragment];
    Widen<kKindOf<T>>(raw, Channels{}, x);
    PutFragment<T>(x, space.q + r * S::kStep + span.first);
  }
  const int r = static_cast<int>(threadIdx.x), at = place.first_row + r;
  if (r >= S::kRows) return;
  space.seen[r] = at < p.rows ? VisibleTo(p, place.row, at / group) : Range{0, 0};
}

// What the block's rows see between them.
template <typename S>
__device__ Range BlockKeys(const Range* seen) {
  Range all = {0x7fffffff, 0};
  for (int r = 0; r < S::kRows; ++r) {
    const Range keys = seen[r];
    if (keys.begin == keys.end) continue;
    all = {min(all.begin, keys.begin), max(all.end, keys.end)};
  }
  return all.begin < all.end ? all : Range{0, 0};
}

// Where a key of the block's row lies; only for keys that are read, whose pages are known.
template <bool kPaged>
__device__ __forceinline__ Spot SpotOf(const AttentionCall& p, int row, int key) {
  if constexpr (!kPaged) return {0, key};
  const int entry = key / p.page;
  return {PageAt(p, p.block_table + row * p.table_row + entry), key - entry * p.page};
}

// Keys or values [first, first + kKeys) of the block's head as T, zeros where they aren't in
// `keys`.
template <Kind kKind, typename S>
__device__ void WidenTile(const AttentionCall& p, const Store& store, const Place& place, int first,
                          const Range& keys, typename S::Type* tile) {
  constexpr int kSpans = S::kDim / kFragment, kStride = S::kThreads / kSpans;
  constexpr int kTokens = static_cast<int>(kGroup) / kStride;  // of a group, a thread's
  constexpr int kMost = Raw<kKind>::kBytes > 16 ? 2 : 4;
  constexpr int kDeep = kTokens < kMost ? kTokens : kMost;  // loads under way
  const Span span = SpanOf(static_cast<int>(threadIdx.x) % kSpans, p.dim);
  if (span.first >= UsedDim(p.dim)) return;
  const int row = S::kPaged ? 0 : place.row;
  const Cursor cursor = FindCursor(store, row, place.head, span);
  for (int group = first; group < first + S::kKeys; group += static_cast<int>(kGroup)) {
    Channels channels = {};
    if (IsByChannel(kKind) && group < keys.end && group + static_cast<int>(kGroup) > keys.begin) {
      channels = LoadChannels<kKind>(store, cursor, SpotOf<S::kPaged>(p, place.row, group));
    }
    int key = group + static_cast<int>(threadIdx.x) / kSpans;
    for (int i = 0; i < kTokens; i += kDeep) {
      Raw<kKind> raw[kDeep];
#pragma unroll
      for (int j = 0; j < kDeep; ++j) {
        const int at = key + j * kStride;
        const bool read = at >= keys.begin && at < keys.end;
        raw[j] = Load<kKind>(store, cursor, read ? SpotOf<S::kPaged>(p, place.row, at) : Spot{0, 0},
                             read);
      }
#pragma unroll
      for (int j = 0; j < kDeep; ++j, key += kStride) {
        float x[kFragment];
        Widen<kKind>(raw[j], channels, x);
        PutFragment(x, tile + (key - first) * S::kStep + span.first);
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void WidenStore(const AttentionCall& p, const Store& store,
                                           const Place& place, int first, const Range& keys,
                                           typename S::Type* tile) {
  switch (store.kind) {
    case Kind::kFloat32:
      return WidenTile<Kind::kFloat32, S>(p, store, place, first, keys, tile);
    case Kind::kFloat16:
      return WidenTile<Kind::kFloat16, S>(p, store, place, first, keys, tile);
    case Kind::kBFloat16:
      return WidenTile<Kind::kBFloat16, S>(p, store, place, first, keys, tile);
    case Kind::kInt8:
      return WidenTile<Kind::kInt8, S>(p, store, place, first, keys, tile);
    case Kind::kInt4:
      return WidenTile<Kind::kInt4, S>(p, store, place, first, keys, tile);
    case Kind::kInt2:
      return WidenTile<Kind::kInt2, S>(p, store, place, first, keys, tile);
    case Kind::kInt4Channel:
      return WidenTile<Kind::kInt4Channel, S>(p, store, place, first, keys, tile);
    case Kind::kInt2Channel:
      return WidenTile<Kind::kInt2Channel, S>(p, store, place, first, keys, tile);
  }
}

// A lane's share of its warp's rows: of each two, the first value is of row l / 4, and the second
// of row l / 4 + 8.
template <typename S>
struct Rows {
  float scores[S::kKeys / kPiece][4];  // then the weights
  float out[S::kDim / kPiece][4];
  float peak[2];   // alike in the four lanes of a row
  float total[2];  // of this lane's keys
};

// Products of queries and keys on tensor cores.
template <typename S>
__device__ __forceinline__ void NarrowScores(const Space<S>& space, int warp_row, int dim,
                                             Rows<S>* rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto* q = space.q + (warp_row + lane % 16) * S::kStep + lane / 16 * 8;
  const auto* keys = space.tile + (lane / 16 * 8 + lane % 8) * S::kStep + lane / 8 % 2 * 8;
#pragma unroll
  for (int d = 0; d < S::kDim; d += 16) {
    if (d >= dim) break;
    uint32_t a[4];
    LoadMatrices(q + d, a);
#pragma unroll
    for (int n = 0; n < S::kKeys; n += 16) {
      uint32_t b[4];
      LoadMatrices(keys + n * S::kStep + d, b);
      Multiply<typename S::Type>(rows->scores[n / 8], a, b[0], b[1]);
      Multiply<typename S::Type>(rows->scores[n / 8 + 1], a, b[2], b[3]);
    }
  }
}

// The same of weights and values: the weights' fragments become those of a first factor.
template <typename S>
__device__ __forceinline__ void NarrowValues(const Space<S>& space, int dim, Rows<S>* rows) {
  using T = typename S::Type;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* values = space.tile + lane % 16 * S::kStep + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < S::kKeys; n += 16) {
    const float (&low)[4] = rows->scores[n / 8], (&high)[4] = rows->scores[n / 8 + 1];
    const uint32_t a[4] = {PackPair<T>(low[0], low[1]), PackPair<T>(low[2], low[3]),
                           PackPair<T>(high[0], high[1]), PackPair<T>(high[2], high[3])};
#pragma unroll
    for (int d = 0; d < S::kDim; d += 16) {
      if (d >= dim) break;
      uint32_t b[4];
      LoadTransposed(values + n * S::kStep + d, b);
      Multiply<T>(rows->out[d / 8], a, b[0], b[1]);
      Multiply<T>(rows->out[d / 8 + 1], a, b[2], b[3]);
    }
  }
}

struct alignas(8) FloatPair {
  float at[2];
};

// Products of queries and keys in float32.
template <typename S>
__device__ __forceinline__ void WideScores(const Space<S>& space, int warp_row, int dim,
                                           Rows<S>* rows) {
  const float* q = space.q + (warp_row + LaneRow()) * S::kStep;
  const float* keys = space.tile + LaneColumn() * S::kStep;
  for (int d = 0; d < UsedDim(dim); d += 4) {
    const FloatFour first = FourAt(q + d), second = FourAt(q + 8 * S::kStep + d);
#pragma unroll
    for (int n = 0; n < S::kKeys / kPiece; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const FloatFour key = FourAt(keys + (n * kPiece + c) * S::kStep + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rows->scores[n][c] = fmaf(first.at[i], key.at[i], rows->scores[n][c]);
          rows->scores[n][2 + c] = fmaf(second.at[i], key.at[i], rows->scores[n][2 + c]);
        }
      }
    }
  }
}

// The same of weights and values. A lane needs all weights of its rows: shared memory has them.
template <typename S>
__device__ __forceinline__ void WideValues(const Space<S>& space, int warp_row, int dim,
                                           Rows<S>* rows) {
  float* weights = space.weights + (warp_row + LaneRow()) * S::kWeightStep;
  float* below = weights + 8 * S::kWeightStep;
#pragma unroll
  for (int n = 0; n < S::kKeys / kPiece; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      weights[n * kPiece + LaneColumn() + c] = rows->scores[n][c];
      below[n * kPiece + LaneColumn() + c] = rows->scores[n][2 + c];
    }
  }
  __syncwarp();
  const float* values = space.tile + LaneColumn();
  for (int key = 0; key < S::kKeys; ++key) {
    const float first = weights[key], second = below[key];
#pragma unroll
    for (int n = 0; n < S::kDim / kPiece; ++n) {
      if (n * kPiece >= dim) break;
      const auto pair = *reinterpret_cast<const FloatPair*>(values + key * S::kStep + n * kPiece);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        rows->out[n][c] = fmaf(first, pair.at[c], rows->out[n][c]);
        rows->out[n][2 + c] = fmaf(second, pair.at[c], rows->out[n][2 + c]);
      }
    }
  }
}

// Over the four lanes that share a row.
__device__ __forceinline__ float RowMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float RowSum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// What a lane's two rows see: kept in registers, or read from shared memory for each tile,
// whichever a compiler for the architecture finds registers for without a spill.
struct LaneSeen {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  const Range* shared;
  __device__ __forceinline__ explicit LaneSeen(const Range* seen) : shared(seen) {}
  __device__ __forceinline__ Range Of(int r) const { return shared[8 * r]; }
#else
  Range kept[2];
  __device__ __forceinline__ explicit LaneSeen(const Range* seen) : kept{seen[0], seen[8]} {}
  __device__ __forceinline__ Range Of(int r) const { return kept[r]; }
#endif
};

// Scales, caps and masks the tile's scores.
template <typename S>
__device__ __forceinline__ void FinishScores(const AttentionCall& p, int first,
                                             const LaneSeen& seen_by, Rows<S>* rows) {
  const Range seen[2] = {seen_by.Of(0), seen_by.Of(1)};
#pragma unroll
  for (int n = 0; n < S::kKeys / kPiece; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int key = first + n * kPiece + LaneColumn() + c % 2;
      float score = rows->scores[n][c] * p.scale;
      if (p.softcap > 0) score = p.softcap * tanhf(__fdiv_rn(score, p.softcap));
      rows->scores[n][c] = key >= seen[c / 2].begin && key < seen[c / 2].end ? score : -INFINITY;
    }
  }
}

// Turns the tile's scores into weights (online softmax: Milakov and Gimelshein, 2018).
template <typename S>
__device__ __forceinline__ void Weigh(Rows<S>* rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float peak = rows->peak[r];
#pragma unroll
    for (int n = 0; n < S::kKeys / kPiece; ++n) {
      // fmaxf passes NaN by; the exponential does not.
      peak = fmaxf(peak, fmaxf(rows->scores[n][2 * r], rows->scores[n][2 * r + 1]));
    }
    peak = RowMax(peak);
    const float base = Base(peak), fade = expf(rows->peak[r] - base);
    rows->peak[r] = peak;
    rows->total[r] *= fade;
#pragma unroll
    for (int n = 0; n < S::kKeys / kPiece; ++n) {
#pragma unroll
      for (int c = 2 * r; c < 2 * r + 2; ++c) {
        rows->scores[n][c] = expf(rows->scores[n][c] - base);
        rows->total[r] += rows->scores[n][c];
      }
    }
#pragma unroll
    for (int n = 0; n < S::kDim / kPiece; ++n) {
#pragma unroll
      for (int c = 2 * r; c < 2 * r + 2; ++c) rows->out[n][c] *= fade;
    }
  }
}

template <typename S>
__device__ void WriteRows(const AttentionCall& p, const Place& place, int warp_row,
                          const Rows<S>& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = RowSum(rows.total[r]);
    const int at = place.first_row + warp_row + LaneRow() + 8 * r;
    if (at >= p.rows) continue;
    const int64_t out_row = OutRow(p, place.row, place.head, at);
#pragma unroll
    for (int n = 0; n < S::kDim / kPiece; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int d = n * kPiece + LaneColumn() + c;
        if (d >= p.dim) break;
        const float value = total == 0 ? 0 : __fdiv_rn(rows.out[n][2 * r + c], total);
        SetFloat(p.out, p.out_type, out_row * p.dim + d, value);
      }
    }
    if (p.lse == nullptr || LaneColumn() > 0) continue;
    p.lse[out_row] = total == 0 ? -INFINITY : rows.peak[r] + logf(total);
  }
}

// Grid: (tiles of rows, H_kv, B).
template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) PrefillKernel(AttentionCall p) {
  EXKV_DYNAMIC_SHARED(unsigned char, shared);
  const Space<S> space = FindSpace<S>(shared);
  // Later rows see more keys: they begin first.
  const Place place = {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y),
                       static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows};
  LoadQueries<S>(p, place, space);
  __syncthreads();
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  const Range keys = BlockKeys<S>(space.seen);
  const LaneSeen seen(space.seen + warp_row + LaneRow());
  Rows<S> rows = {};
  rows.peak[0] = rows.peak[1] = -INFINITY;
  for (int first = keys.begin / S::kKeys * S::kKeys; first < keys.end; first += S::kKeys) {
    // Keys, then values: one piece of code widens either.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      WidenStore<S>(p, pass == 0 ? p.k : p.v, place, first, keys, space.tile);
      __syncthreads();
      if (pass == 0) {
#pragma unroll
        for (auto& scores : rows.scores) scores[0] = scores[1] = scores[2] = scores[3] = 0;
        if constexpr (S::kNarrow) {
          NarrowScores<S>(space, warp_row, p.dim, &rows);
        } else {
          WideScores<S>(space, warp_row, p.dim, &rows);
        }
        FinishScores<S>(p, first, seen, &rows);
        Weigh<S>(&rows);
      } else if constexpr (S::kNarrow) {
        NarrowValues<S>(space, p.dim, &rows);
      } else {
        WideValues<S>(space, warp_row, p.dim, &rows);
      }
      __syncthreads();  // the tile is read
    }
  }
  WriteRows<S>(p, place, warp_row, rows);
}

// The host's side ------------------------------------------------------------------------------

template <typename S>
void Launch(const AttentionCall& p, unsigned rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.rows + S::kRows - 1) / S::kRows),
                  static_cast<unsigned>(p.kv_heads), rows);
  AllowShared(PrefillKernel<S>, S::kBytes);
  EXKV_LAUNCH(PrefillKernel<S>, grid, S::kThreads, S::kBytes, stream, p);
}

// EXKV_HUNGRIEST_KERNELS is set where a compilation only looks for spills: of kernels of the same
// code it keeps those that take most registers among as many blocks.
template <typename T, bool kPaged>
void LaunchIn(const AttentionCall& p, unsigned rows, cudaStream_t stream) {
#ifdef EXKV_HUNGRIEST_KERNELS
  if constexpr (!kPaged) Launch<Shape<T, 128, kPaged>>(p, rows, stream);
#else
  if (p.dim <= 64) return Launch<Shape<T, 64, kPaged>>(p, rows, stream);
  if (p.dim <= 128) return Launch<Shape<T, 128, kPaged>>(p, rows, stream);
#endif
  Launch<Shape<T, 256, kPaged>>(p, rows, stream);
}

template <typename T>
void LaunchAs(const AttentionCall& p, unsigned rows, cudaStream_t stream) {
  if (p.block_table != nullptr) return LaunchIn<T, true>(p, rows, stream);
  LaunchIn<T, false>(p, rows, stream);
}

}  // namespace

bool PrefillTakes(const DecodeShape& s) {
  constexpr int64_t kMostBlocks = 65535, kMostKeys = int64_t{1} << 30;
  return s.dim <= kDecodeDim && s.rows <= kMostBlocks && s.kv_heads <= kMostBlocks &&
         s.kv_len < kMostKeys && s.rows * s.queries * (s.heads / s.kv_heads) < kPrefillRows;
}

void LaunchPrefill(const AttentionParams& params, cudaStream_t stream) {
  const AttentionCall p = CallOf(params);
  const auto rows = static_cast<unsigned>(params.rows);
  switch (params.dtype) {
    case FloatType::kFloat32:
      return LaunchAs<float>(p, rows, stream);
    case FloatType::kFloat16:
#ifndef EXKV_HUNGRIEST_KERNELS
      return LaunchAs<__half>(p, rows, stream);
#endif
    case FloatType::kBFloat16:
      return LaunchAs<__nv_bfloat16>(p, rows, stream);
  }
}

}  // namespace exkv

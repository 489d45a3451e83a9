// Attention of few queries over many keys: flash-decoding (Dao et al., 2023). A row's keys are
// split over blocks, and a second kernel merges what these have found, where there are several.
//
// A warp takes 32 keys at a time for up to four query rows: the lanes of a group load neighbouring
// values of one key, several keys deep, and leave each lane with the scores of one key, so that
// every exponential is taken once. Rows that share a head of keys are in one block, whose warps
// read the same keys at about the same time. All arithmetic is float32.
#include <algorithm>
#include <atomic>

#include "attention_tensor.cuh"
#include "attention_wide.cuh"

namespace exkv {
namespace {

constexpr int kBatch = 4;      // keys whose scores are summed together
constexpr int kMostTiles = 3;  // of a block: 12 warps, which leaves each thread 168 registers
constexpr int kMostTilesInPages = 2;  // whose threads need some more
constexpr int kMergeThreads = 128;
// Blocks of one tile leave registers for several.
template <int kRows, bool kPaged>
constexpr int kMostTilesOf = kRows != 4 ? 1
                             : kPaged   ? kMostTilesInPages
                                        : kMostTiles;
template <int kRows>
constexpr int kBlocksOf = kRows == 4 ? 1 : 4;
static_assert(kLanes == kGroup, "a step's keys share their channels' scales");

// Where a lane works in a head: `lanes` neighbours share a key, and have its values between them.
struct Lane {
  int lanes;  // 4 to 32, a power of two
  int place;  // among these
  int group;  // of the warp's 32 / lanes groups
  Span values;
};

__device__ Lane FindLane(int dim) {
  int lanes = 4;
  while (lanes * kFragment < dim) lanes *= 2;
  const int in_warp = static_cast<int>(threadIdx.x) % kLanes;
  Lane lane;
  lane.lanes = lanes;
  lane.place = in_warp % lanes;
  lane.group = in_warp / lanes;
  lane.values.first = lane.place * kFragment;
  lane.values.count = max(0, min(kFragment, dim - lane.values.first));
  return lane;
}

// One lane's part of what its warp knows about its rows of queries.
template <int kRows>
struct Rows {
  float q[kRows][kFragment];  // scaled
  float out[kRows][kFragment];
  float weight[kRows];  // of the step's key that is this lane's: first its score
  float peak[kRows];    // alike in all lanes
  float total[kRows];   // of this lane's keys
};

// 32 keys of a warp.
template <bool kPaged>
struct Step {
  int first;   // a multiple of 32
  Range keys;  // the block's
};

template <>
struct Step<true> {
  int first;
  Range keys;
  int page;   // tokens of one
  int token;  // the first key's, in its page
  int low;    // page of the first 16 keys, and of the others
  int high;
};
static_assert(kLanes == 2 * kPageStep, "a step's keys lie in two pages at most");

constexpr int kRun = static_cast<int>(kPageStep);

// The page of 16 keys; none where no key of them is read.
__device__ __forceinline__ int PageOf(const AttentionCall& p, const int32_t* entry,
                                      const Range& keys, int first) {
  return first + kRun > keys.begin && first < keys.end ? PageAt(p, entry) : 0;
}

__device__ __forceinline__ void FindSpots(const DecodeCall&, int, Step<false>*) {}

__device__ __forceinline__ void FindSpots(const DecodeCall& p, int row, Step<true>* step) {
  const int entry = step->first / p.page;
  const int32_t* pages = p.block_table + row * p.table_row + entry;
  step->page = p.page;
  step->token = step->first - entry * p.page;
  const bool next = step->token + kRun == p.page;
  step->low = PageOf(p, pages, step->keys, step->first);
  step->high = PageOf(p, next ? pages + 1 : pages, step->keys, step->first + kRun);
}

__device__ __forceinline__ Spot SpotOf(const Step<false>&, int key) { return {0, key}; }

__device__ __forceinline__ Spot SpotOf(const Step<true>& step, int key) {
  const int place = key - step.first, token = step.token + place;
  return {place < kRun ? step.low : step.high, token < step.page ? token : token - step.page};
}

// Of the first of the step's keys that are read.
template <bool kPaged>
__device__ __forceinline__ Spot FirstSpot(const Step<kPaged>& step) {
  return SpotOf(step, max(step.first, step.keys.begin));
}

template <int kRows>
__device__ void LoadQueries(const DecodeCall& p, int row, int head, int first_row, const Lane& lane,
                            Rows<kRows>* rows) {
  const int group = p.heads / p.kv_heads;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int at = first_row + r;
    const int query = at / group;
    const bool there = at < p.rows;
    rows->peak[r] = -INFINITY;
    rows->total[r] = 0;
    rows->weight[r] = 0;
    const int64_t from = row * p.queries.row + query * p.queries.token +
                         (int64_t{head} * group + at % group) * p.queries.head + lane.values.first;
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const bool here = there && i < lane.values.count;
      rows->q[r][i] = here ? FloatAt(p.queries.data, p.q_type, from + i) * p.scale : 0;
      rows->out[r][i] = 0;
    }
  }
}

// Keys that a lane has under way: registers are scarce.
template <Kind kKind>
constexpr int kDepth = Raw<kKind>::kBytes > 16 ? 2 : 4;

// The fragments of some keys of the lane's group, from the step's `index`th of the group on.
template <Kind kKind, bool kPaged>
__device__ __forceinline__ void LoadKeys(const Store& store, const Cursor& cursor,
                                         const Step<kPaged>& step, const Lane& lane, int index,
                                         Raw<kKind> (&raw)[kDepth<kKind>]) {
#pragma unroll
  for (int i = 0; i < kDepth<kKind>; ++i) {
    const int key = step.first + lane.group * lane.lanes + index + i;
    const bool read = key >= step.keys.begin && key < step.keys.end;
    raw[i] = Load<kKind>(store, cursor, SpotOf(step, key), read);
  }
}

// Sums four values over the lanes that share a key; each lane is left with the one of these that
// its place, modulo four, says. A reduction for each value would take twice to three times as many
// shuffles.
__device__ __forceinline__ float SumOfFour(const float (&x)[kBatch], const Lane& lane) {
  static_assert(kBatch == 4, "two bits of a lane's place choose a value");
  const bool upper = lane.place & 2, odd = lane.place & 1;
  float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
  a += __shfl_xor_sync(kFullWarp, upper ? x[0] : x[2], 2);
  b += __shfl_xor_sync(kFullWarp, upper ? x[1] : x[3], 2);
  float sum = odd ? b : a;
  sum += __shfl_xor_sync(kFullWarp, odd ? a : b, 1);
  for (int step = 4; step < lane.lanes; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  return sum;
}

template <Kind kKind, bool kPaged, int kRows>
__device__ void Scores(const Store& store, const Cursor& cursor, const Step<kPaged>& step,
                       const Lane& lane, Rows<kRows>* rows) {
  const Channels channels = LoadChannels<kKind>(store, cursor, FirstSpot(step));
  for (int index = 0; index < lane.lanes; index += kBatch) {
    float dots[kRows][kBatch] = {};
#pragma unroll
    for (int deep = 0; deep < kBatch; deep += kDepth<kKind>) {
      Raw<kKind> raw[kDepth<kKind>];
      LoadKeys<kKind>(store, cursor, step, lane, index + deep, raw);
#pragma unroll
      for (int i = 0; i < kDepth<kKind>; ++i) {
        float x[kFragment];
        Widen<kKind>(raw[i], channels, x);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float& dot = dots[r][deep + i];
#pragma unroll
          for (int j = 0; j < kFragment; ++j) dot = fmaf(rows->q[r][j], x[j], dot);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = SumOfFour(dots[r], lane);
      if (lane.place / kBatch == index / kBatch) rows->weight[r] = sum;
    }
  }
}

template <Kind kKind, bool kPaged, int kRows>
__device__ void AddValues(const Store& store, const Cursor& cursor, const Step<kPaged>& step,
                          const Lane& lane, Rows<kRows>* rows) {
  const Channels channels = LoadChannels<kKind>(store, cursor, FirstSpot(step));
  for (int index = 0; index < lane.lanes; index += kDepth<kKind>) {
    Raw<kKind> raw[kDepth<kKind>];
    LoadKeys<kKind>(store, cursor, step, lane, index, raw);
#pragma unroll
    for (int i = 0; i < kDepth<kKind>; ++i) {
      float x[kFragment];
      Widen<kKind>(raw[i], channels, x);
      const int source = lane.group * lane.lanes + index + i;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = __shfl_sync(kFullWarp, rows->weight[r], source);
#pragma unroll
        for (int j = 0; j < kFragment; ++j) {
          rows->out[r][j] = fmaf(weight, x[j], rows->out[r][j]);
        }
      }
    }
  }
}

// Runs Scores or AddValues for the way in which a store is kept: a macro, since a template can't
// be handed on without its arguments.
#define EXKV_BY_KIND(function, store, ...)                \
  switch ((store).kind) {                                 \
    case Kind::kFloat32:                                  \
      function<Kind::kFloat32>((store), __VA_ARGS__);     \
      break;                                              \
    case Kind::kFloat16:                                  \
      function<Kind::kFloat16>((store), __VA_ARGS__);     \
      break;                                              \
    case Kind::kBFloat16:                                 \
      function<Kind::kBFloat16>((store), __VA_ARGS__);    \
      break;                                              \
    case Kind::kInt8:                                     \
      function<Kind::kInt8>((store), __VA_ARGS__);        \
      break;                                              \
    case Kind::kInt4:                                     \
      function<Kind::kInt4>((store), __VA_ARGS__);        \
      break;                                              \
    case Kind::kInt2:                                     \
      function<Kind::kInt2>((store), __VA_ARGS__);        \
      break;                                              \
    case Kind::kInt4Channel:                              \
      function<Kind::kInt4Channel>((store), __VA_ARGS__); \
      break;                                              \
    case Kind::kInt2Channel:                              \
      function<Kind::kInt2Channel>((store), __VA_ARGS__); \
      break;                                              \
  }

// Turns the step's scores into weights (online softmax: Milakov and Gimelshein, 2018).
template <bool kPaged, int kRows>
__device__ void Weigh(const Step<kPaged>& step, const Range* seen_by, float softcap,
                      Rows<kRows>* rows) {
  const int key = step.first + static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Range range = seen_by[r];
    const bool seen =
        key >= max(range.begin, step.keys.begin) && key < min(range.end, step.keys.end);
    float score = rows->weight[r];
    if (softcap > 0) score = softcap * tanhf(__fdiv_rn(score, softcap));
    if (!seen) score = -INFINITY;
    // fmaxf passes NaN by; the exponential does not.
    const float peak = fmaxf(rows->peak[r], WarpMax(score));
    const float fade = expf(rows->peak[r] - Base(peak));
    rows->peak[r] = peak;
    rows->weight[r] = expf(score - Base(peak));
    rows->total[r] = fmaf(rows->total[r], fade, rows->weight[r]);
#pragma unroll
    for (int j = 0; j < kFragment; ++j) rows->out[r][j] *= fade;
  }
}

// Adds up what a warp's lanes have of the same values.
template <int kRows>
__device__ void Gather(const Lane& lane, Rows<kRows>* rows) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows->total[r] = WarpSum(rows->total[r]);
    for (int step = lane.lanes; step < kLanes; step *= 2) {
#pragma unroll
      for (int j = 0; j < kFragment; ++j) {
        rows->out[r][j] += __shfl_xor_sync(kFullWarp, rows->out[r][j], step);
      }
    }
  }
}

// Adds the warps of each tile, one after the other, so that the order is always the same.
template <int kRows>
__device__ void AddWarps(const Lane& lane, int dim, const Rows<kRows>& rows, float* values,
                         StateTail* tails) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (threadIdx.x % kLanes == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) tails[warp * kRows + r] = {rows.peak[r], rows.total[r]};
  }
  __syncthreads();
  for (int adding = 0; adding < kDecodeWarps; ++adding) {
    if (adding == warp && lane.group == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float fade = expf(rows.peak[r] - Base(TileTail<kRows>(tails, r).peak));
        float* row = values + r * dim + lane.values.first;
#pragma unroll
        for (int j = 0; j < kFragment; ++j) {
          if (j >= lane.values.count) break;
          row[j] = adding == 0 ? rows.out[r][j] * fade : fmaf(rows.out[r][j], fade, row[j]);
        }
      }
    }
    __syncthreads();
  }
}

// What the threads of a tile have in common, in shared memory.
struct Tile {
  float* values;     // (rows of the tile, D), once the keys are through
  StateTail* tails;  // (warps, rows of the tile)
  Range* seen;       // (rows of the tile)
};

template <int kRows>
__host__ __device__ constexpr int TileBytes(int dim) {
  const int tails = static_cast<int>(kDecodeWarps * sizeof(StateTail) + sizeof(Range));
  return kRows * (dim * static_cast<int>(sizeof(float)) + tails);
}

template <int kRows>
__device__ Tile FindTile(unsigned char* shared, int dim, int tile) {
  Tile found;
  unsigned char* first = shared + tile * TileBytes<kRows>(dim);
  found.tails = reinterpret_cast<StateTail*>(first);
  found.seen = reinterpret_cast<Range*>(found.tails + kDecodeWarps * kRows);
  found.values = reinterpret_cast<float*>(found.seen + kRows);
  return found;
}

// Grid: (row_blocks * splits, H_kv, B); block: (4 warps, tiles).
template <int kRows, bool kPaged>
__global__ void __launch_bounds__(kBlockKeys* kMostTilesOf<kRows, kPaged>, kBlocksOf<kRows>)
    DecodeKernel(DecodeCall p) {
  EXKV_DYNAMIC_SHARED(unsigned char, shared);
  const int tiles = static_cast<int>(blockDim.y);
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x) / p.row_blocks;
  const int block_row = static_cast<int>(blockIdx.x) % p.row_blocks * tiles * kRows;
  const int first_row = block_row + static_cast<int>(threadIdx.y) * kRows;
  const Tile tile = FindTile<kRows>(shared, p.dim, static_cast<int>(threadIdx.y));
  FindSeen<kRows>(p, row, first_row, tile.seen);
  __syncthreads();

  const Lane lane = FindLane(p.dim);
  Rows<kRows> rows;
  LoadQueries<kRows>(p, row, head, first_row, lane, &rows);
  const Cursor keys = FindCursor(p.k, kPaged ? 0 : row, head, lane.values);
  const Cursor values = FindCursor(p.v, kPaged ? 0 : row, head, lane.values);
  Step<kPaged> step = {};
  step.keys = BlockKeys(p, row, block_row, tiles * kRows, split);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  step.first = step.keys.begin / kLanes * kLanes + warp * kLanes;
  for (; step.first < step.keys.end; step.first += kBlockKeys) {
    FindSpots(p, row, &step);
    EXKV_BY_KIND(Scores, p.k, keys, step, lane, &rows);
    Weigh(step, tile.seen, p.softcap, &rows);
    EXKV_BY_KIND(AddValues, p.v, values, step, lane, &rows);
  }
  Gather<kRows>(lane, &rows);
  AddWarps<kRows>(lane, p.dim, rows, tile.values, tile.tails);
  WriteTile<kRows>(p, row, head, first_row, split, tile.tails,
                   [&](int r, int d, const StateTail&) { return tile.values[r * p.dim + d]; });
}

// One block for each row of queries of each head of keys: grid (rows, H_kv, B).
__global__ void MergeKernel(DecodeCall p) {
  EXKV_DYNAMIC_SHARED(StateTail, tails);  // (splits), then the weight of each
  const int row = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int at = static_cast<int>(blockIdx.x);
  const int64_t states = int64_t{gridDim.z} * p.kv_heads * p.rows * p.splits;
  const int64_t first = ((static_cast<int64_t>(row) * p.kv_heads + head) * p.rows + at) * p.splits;
  for (int i = static_cast<int>(threadIdx.x); i < p.splits; i += kMergeThreads) {
    tails[i] = Tails(p, states)[first + i];
  }
  __syncthreads();
  StateTail all = {-INFINITY, 0};
  for (int split = 0; split < p.splits; ++split) all.peak = fmaxf(all.peak, tails[split].peak);
  float* fades = reinterpret_cast<float*>(tails + p.splits);
  for (int i = static_cast<int>(threadIdx.x); i < p.splits; i += kMergeThreads) {
    fades[i] = expf(tails[i].peak - Base(all.peak));
  }
  __syncthreads();
  for (int split = 0; split < p.splits; ++split) {
    all.total = fmaf(tails[split].total, fades[split], all.total);
  }
  const int64_t out_row = OutRow(p, row, head, at);
  for (int d = static_cast<int>(threadIdx.x); d < p.dim; d += kMergeThreads) {
    const float* values = p.state + first * p.dim + d;
    float sum = 0;
#pragma unroll 8
    for (int split = 0; split < p.splits; ++split) {
      sum = fmaf(values[int64_t{split} * p.dim], fades[split], sum);
    }
    WriteValue(p, out_row, d, sum, all.total);
  }
  if (threadIdx.x == 0) WriteLse(p, out_row, all);
}

// The host's side ------------------------------------------------------------------------------

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether the queries of several rows are joined in one.
bool Joined(const AttentionParams& p) {
  return p.part != nullptr && p.part->row_queries != p.length;
}

int64_t RowsOfHead(const AttentionParams& p) { return p.length * (p.heads / p.kv_heads); }

DecodeCall DecodeOf(const AttentionParams& params, const DecodePlan& plan, float* state) {
  DecodeCall p{};
  static_cast<AttentionCall&>(p) = CallOf(params);
  p.q_type = params.dtype;
  p.queries = params.q;
  p.row_blocks = static_cast<int>(plan.row_blocks);
  p.splits = static_cast<int>(plan.splits);
  p.state = state;
  return p;
}

// Of a kernel's variant: the rows of its tiles, and whether it reads pages.
template <int kRows>
auto KernelOf(bool paged) {
  return paged ? DecodeKernel<kRows, true> : DecodeKernel<kRows, false>;
}

int AskBlocksAtOnce(int64_t tile_rows, bool paged, int64_t tiles) {
  const int threads = static_cast<int>(tiles) * kBlockKeys;
  // Shared memory of the largest heads: less than what decides.
  const auto shared = [&](int tile) { return static_cast<size_t>(tiles) * tile; };
  switch (tile_rows) {
    case 1:
      return BlocksAtOnce(KernelOf<1>(paged), threads, shared(TileBytes<1>(kDecodeDim)));
    case 2:
      return BlocksAtOnce(KernelOf<2>(paged), threads, shared(TileBytes<2>(kDecodeDim)));
    default:
      return BlocksAtOnce(KernelOf<4>(paged), threads, shared(TileBytes<4>(kDecodeDim)));
  }
}

// Blocks that a multiprocessor of the current device takes at once, asked for once.
int64_t DecodeBlocks(int64_t tile_rows, bool paged, int64_t tiles) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices][3][2][kMostTiles];
  const int device = CurrentDevice();
  if (device < 0 || device >= kMostDevices) return AskBlocksAtOnce(tile_rows, paged, tiles);
  std::atomic<int>& blocks = known[device][tile_rows / 2][paged][tiles - 1];
  if (blocks == 0) blocks = AskBlocksAtOnce(tile_rows, paged, tiles);
  return blocks;
}

template <int kRows>
void Launch(const DecodeCall& p, const DecodePlan& plan, unsigned rows, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(plan.tiles), heads = static_cast<unsigned>(p.kv_heads);
  const auto shared = static_cast<size_t>(tiles) * TileBytes<kRows>(p.dim);
  const dim3 grid(static_cast<unsigned>(plan.row_blocks * plan.splits), heads, rows);
  const auto kernel = KernelOf<kRows>(p.block_table != nullptr);
  EXKV_LAUNCH(kernel, grid, dim3(kBlockKeys, tiles), shared, stream, p);
}

void LaunchTiles(const DecodeCall& p, const DecodePlan& plan, unsigned rows, cudaStream_t stream) {
  if (plan.wide) return LaunchWide(p, plan, rows, stream);
  if (plan.on_tensor_cores) return LaunchOnTensorCores(p, plan, rows, stream);
  switch (plan.tile_rows) {
    case 1:
      return Launch<1>(p, plan, rows, stream);
    case 2:
      return Launch<2>(p, plan, rows, stream);
    default:
      return Launch<4>(p, plan, rows, stream);
  }
}

// Heads that are no multiple of 8 values were read wrong by the prefill kernel, which loads as this
// one does (docs/cuda.md); no model has such wide ones.
bool TakesWide(const DecodeShape& s) {
  return s.dim <= kWideDim && s.dim % kFragment == 0 && s.queries <= kWideQueries;
}

// The plan but for the splits, and what follows from them.
DecodePlan BlocksFor(const AttentionParams& p) {
  DecodePlan plan{};
  const int64_t rows = RowsOfHead(p);
  plan.wide = p.dim > kDecodeDim;
  if (plan.wide) {
    const WideBlocks blocks = WideBlocksFor(p);
    plan.tile_rows = blocks.rows;
    plan.tiles = 1;
    plan.row_blocks = CeilDiv(rows, blocks.rows);
    plan.at_once = blocks.at_once;
    return plan;
  }
  plan.on_tensor_cores = FitsTensorCores(p);
  plan.tile_rows = plan.on_tensor_cores || rows > 2 ? kTensorRows : rows;
  const int64_t tiles = CeilDiv(rows, plan.tile_rows);
  const bool paged = p.part != nullptr && p.part->block_table != nullptr;
  plan.row_blocks = CeilDiv(tiles, paged ? kMostTilesInPages : kMostTiles);
  plan.tiles = CeilDiv(tiles, plan.row_blocks);
  const int64_t most_at_once = std::max<int64_t>(1, kWarpsWanted / (kDecodeWarps * plan.tiles));
  const int64_t room = plan.on_tensor_cores ? TensorBlocks(p, plan.tiles)
                                            : DecodeBlocks(plan.tile_rows, paged, plan.tiles);
  plan.at_once = std::min(room, most_at_once);
  return plan;
}

}  // namespace

bool DecodeTakes(const DecodeShape& s) {
  constexpr int64_t kMostBlocks = 65535, kMostKeys = int64_t{1} << 30, kMostRows = 1 << 24;
  const int64_t group = s.heads / s.kv_heads;
  const bool few =
      s.dim <= kDecodeDim ? s.queries == 1 || s.queries * group <= kDecodeRows : TakesWide(s);
  return few && s.rows <= kMostBlocks && s.kv_heads <= kMostBlocks && s.kv_len < kMostKeys &&
         s.rows * s.queries * s.heads < kMostRows;
}

DecodePlan PlanDecode(const AttentionParams& p, int64_t processors) {
  DecodePlan plan = BlocksFor(p);
  if (processors > kMostProcessors) processors = kMostProcessors;
  const bool near = p.window > 0 && !Joined(p) && p.window + p.length < p.kv_len;
  const int64_t keys = near ? p.window + p.length : p.kv_len;
  const int64_t most =
      CeilDiv(keys, kBlockKeys) < kMostSplits ? CeilDiv(keys, kBlockKeys) : kMostSplits;
  // All blocks at once, and none that begins when the others are done.
  plan.splits = processors * plan.at_once / (p.rows * p.kv_heads * plan.row_blocks);
  if (plan.splits > most) plan.splits = most;
  if (plan.splits < 1) plan.splits = 1;
  const int64_t states = plan.splits > 1 ? p.rows * p.kv_heads * RowsOfHead(p) * plan.splits : 0;
  plan.state_floats = states * (p.dim + static_cast<int64_t>(sizeof(StateTail) / sizeof(float)));
  return plan;
}

void LaunchDecode(const AttentionParams& params, const DecodePlan& plan, float* state,
                  cudaStream_t stream) {
  const DecodeCall p = DecodeOf(params, plan, state);
  const auto rows = static_cast<unsigned>(params.rows);
  LaunchTiles(p, plan, rows, stream);
  if (plan.splits == 1) return;
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(p.kv_heads), rows);
  const size_t shared = static_cast<size_t>(plan.splits) * (sizeof(StateTail) + sizeof(float));
  EXKV_LAUNCH(MergeKernel, grid, kMergeThreads, shared, stream, p);
}

}  // namespace exkv

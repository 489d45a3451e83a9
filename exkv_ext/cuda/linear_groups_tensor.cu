// Linear layers for a few rows by codes in groups as they lie, on tensor cores, for x of 16 bits: a
// block's warps take turns at kDeep chunks of inputs that follow each other, then at those that are
// left. Codes become 16-bit floats exactly, less the middle of their range; products are scaled in
// float32, and what a weight's offset adds is multiplied by a sum of x, a product with ones.
//
// An H100's memory is read at full speed by 274 instructions of a warp for a KiB of codes
// (tests/gpu/sass.py counts them), so there is a kernel for each number of bits and shift, and for
// 4 and 8 bits for each order of inputs, and for groups that have all of the chunks in common,
// whose scales are looked up once.
#include "groups_tensor.cuh"

namespace exkv {
namespace {

struct Call : GroupsCall, TileCall {};

constexpr int kPair = 2;  // outputs of a lane, whose codes are neighbours

// In which order a matrix has its inputs: in x's own, sorted, or what is only known there.
enum class Order { kOwn, kSorted, kEither };

// Blocks of a multiprocessor, for which there are registers: the compiler takes more of them
// from 10.0 on, and so do inputs that are gathered.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <Order>
constexpr int kBlocksAtOnce = 2;
#else
template <Order kOrder>
constexpr int kBlocksAtOnce = kOrder == Order::kOwn ? 3 : 2;
#endif

// Where a lane's share begins.
struct Source {
  const uint8_t* codes;
  int second;  // bytes from the first words to the second
  const uint16_t* x;
  const int32_t* order;
  bool is_sorted;         // has an order, where the kernel is for both
  const uint8_t* scales;  // of the first output
  const uint8_t* shifts;
  int next_scales;  // bytes to those of the second one
  int next_shifts;
};

// Of a chunk: eight inputs of two outputs, and of a row of x.
struct Share {
  struct alignas(16) Inputs {
    uint32_t pairs[kOctet / 2];
  };
  TwoOutputs codes;
  Inputs x;
};

// Lane l has outputs 2 (l / 4) and 2 (l / 4) + 1 of 16, row l / 4 of eight, and inputs as
// groups_codes.cuh says. What is not there repeats the last one.
template <int kBits, Order kOrder>
__device__ __forceinline__ Source FindSource(const Call& p, const Tile& tile, int lane) {
  const int own = lane / 4 * kPair, place = lane % 4;
  const int64_t last = (p.m.outputs - 1) / kGroupsBlock;
  const int64_t block = min((tile.first + own) / kGroupsBlock, last);
  const auto [first, second] = VectorsOf<kInPlanes<kBits> ? 0 : kBits>(kBits, place);
  Source s;
  s.codes =
      Pinned(p.m.codes + block * p.block_bytes + own % kGroupsBlock * 4 + first * kVectorBytes);
  s.second = (second - first) * kVectorBytes;
  s.x = Pinned(RowOfLane(p, tile) + (kOrder == Order::kOwn ? place * kOctet : 0));
  s.order = p.m.order + place * kOctet;
  const int64_t output = min(tile.first + own, p.m.outputs - 1);
  const bool has_next = output + 1 < p.m.outputs;
  s.scales = Pinned(ScalesOf(p, output));
  s.shifts = Pinned(ShiftsOf(p, output));
  s.next_scales = has_next ? p.scales_bytes : 0;
  s.next_shifts = has_next ? p.shifts_bytes : 0;
  return s;
}

__device__ __forceinline__ void Gather(const Source& s, int64_t chunk, Share::Inputs* x) {
  struct alignas(16) Four {
    int32_t at[4];
  };
  const auto* order = reinterpret_cast<const Four*>(s.order + chunk * kGroupsChunk);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Four four = order[half];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t first = s.x[four.at[2 * i]], second = s.x[four.at[2 * i + 1]];
      x->pairs[2 * half + i] = first | second << 16;
    }
  }
}

template <int kBits, Order kOrder>
__device__ __forceinline__ Share LoadShare(const Source& s, int64_t chunk) {
  const int place = static_cast<int>(threadIdx.x) % 4;
  const uint8_t* codes = s.codes + chunk * (kGroupsChunk * kBits);
  Share share;
  share.codes = LoadOutputs<kBits>(codes, codes + (kBits == 8 ? kVectorBytes : s.second), place);
  if (kOrder == Order::kSorted || (kOrder == Order::kEither && s.is_sorted)) {
    Gather(s, chunk, &share.x);
  } else {
    const uint16_t* x = s.x + (kOrder == Order::kOwn ? 0 : place * kOctet);
    share.x = *reinterpret_cast<const Share::Inputs*>(x + chunk * kGroupsChunk);
  }
  return share;
}

// What the lane of this place has, of the four that share outputs.
template <bool kShifted>
__device__ __forceinline__ ScaleAndOffset OfPlace(const ScaleAndOffset& own, int place) {
  constexpr unsigned kFullWarp = 0xffffffffu;
  const float scale = __shfl_sync(kFullWarp, own.scale, place, 4);
  return {scale, kShifted ? __shfl_sync(kFullWarp, own.offset, place, 4) : 0.0f};
}

// Adds a chunk's products, and its sums of x where they are asked for.
template <typename T, int kBits, bool kInputs>
__device__ __forceinline__ void AddShare(const Share& share, float (&products)[4],
                                         float (&inputs)[4]) {
  const auto& x = share.x.pairs;
#pragma unroll
  for (int i = 0; i < kOctet / 2; i += 2) {
    uint32_t a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = CenteredPair<T, kBits>(share.codes.words[j % 2], i + j / 2);
    Multiply<T>(products, a, x[i], x[i + 1]);
    if constexpr (kInputs) AddInputs<T>(x[i], x[i + 1], inputs);
  }
}

// Adds the part of kChunks chunks, which have scales in common, or each its own: then a lane finds
// those of chunk l % 4, for the four lanes of its outputs.
template <typename T, int kBits, Order kOrder, GroupsShift kShift, int kChunks, bool kShared>
__device__ __forceinline__ void AddChunks(const Call& p, const Source& s, int first,
                                          float (&sums)[4]) {
  constexpr bool kShifted = kShift != GroupsShift::kSymmetric;
  constexpr int kGroups = kShared ? 1 : kChunks, kEach = kChunks / kGroups;
  Share shares[kChunks];
  ScaleAndOffset own[kPair];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) shares[i] = LoadShare<kBits, kOrder>(s, first + i);
  const int place = static_cast<int>(threadIdx.x) % 4;
  const int group = GroupOf(p.inverse, kShared ? first : first + place);
#pragma unroll
  for (int n = 0; n < kPair; ++n) {
    const Stored stored = LoadStored(p, kShift, kBits, s.scales + n * s.next_scales,
                                     s.shifts + n * s.next_shifts, group);
    own[n] = ScaleOf(kShift, kBits, p.m.scale_type, stored);
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float products[4] = {}, inputs[4] = {};
#pragma unroll
    for (int i = g * kEach; i < (g + 1) * kEach; ++i) {
      AddShare<T, kBits, kShifted>(shares[i], products, inputs);
    }
#pragma unroll
    for (int n = 0; n < kPair; ++n) {
      const auto [scale, offset] = kShared ? own[n] : OfPlace<kShifted>(own[n], g);
#pragma unroll
      for (int c = 2 * n; c < 2 * n + 2; ++c) {
        sums[c] = fmaf(scale, products[c], sums[c]);
        if constexpr (kShifted) sums[c] = fmaf(offset, inputs[c], sums[c]);
      }
    }
  }
}

template <typename T, int kBits, Order kOrder, GroupsShift kShift, bool kWide>
__device__ __forceinline__ void AddTile(const Call& call) {
  Call p = call;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Tile tile = FindTile(p);
  if (tile.rows == 0) return;
  if (tile.chosen != nullptr) {
    p.m.codes = static_cast<const uint8_t*>(tile.chosen->parts[0]);
    p.m.scale = tile.chosen->parts[1];
    p.m.shift = tile.chosen->parts[2];
    p.m.order = static_cast<const int32_t*>(tile.chosen->parts[3]);
  }
  Source source = FindSource<kBits, kOrder>(p, tile, lane);
  source.is_sorted = call.m.order != nullptr;  // of all matrices, if it chooses
  float sums[4] = {};
  const int whole = p.chunks / kDeep;
  for (int i = warp; i < whole; i += kWarps) {
    AddChunks<T, kBits, kOrder, kShift, kDeep, kWide>(p, source, i * kDeep, sums);
  }
  const int left = whole * kDeep + warp;
  if (left < p.chunks) AddChunks<T, kBits, kOrder, kShift, 1, true>(p, source, left, sums);
  StoreTile<T>(p, {lane / 4 * kPair, lane / 4 * kPair + 1}, sums);
}

template <typename T, int kBits, Order kOrder, GroupsShift kShift, bool kWide>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksAtOnce<kOrder>) GroupsTensorKernel(Call p) {
  if (kForTensorCores) AddTile<T, kBits, kOrder, kShift, kWide>(p);
}

template <typename T, int kBits, GroupsShift kShift>
void LaunchOrder(const Call& p, cudaStream_t stream) {
  if constexpr (kInPlanes<kBits>) {
    return LaunchTiles(GroupsTensorKernel<T, kBits, Order::kEither, kShift, false>, p, stream);
  } else if (p.m.order != nullptr) {
    return LaunchTiles(GroupsTensorKernel<T, kBits, Order::kSorted, kShift, false>, p, stream);
  } else {
    const bool wide = p.m.groups == 1 || p.m.group % (kDeep * kGroupsChunk) == 0;
    return wide ? LaunchTiles(GroupsTensorKernel<T, kBits, Order::kOwn, kShift, true>, p, stream)
                : LaunchTiles(GroupsTensorKernel<T, kBits, Order::kOwn, kShift, false>, p, stream);
  }
}

template <typename T, int kBits>
void LaunchShift(const Call& p, cudaStream_t stream) {
  switch (p.m.beside) {
    case GroupsShift::kSymmetric:
      return LaunchOrder<T, kBits, GroupsShift::kSymmetric>(p, stream);
    case GroupsShift::kOffset:
      return LaunchOrder<T, kBits, GroupsShift::kOffset>(p, stream);
    case GroupsShift::kZero:
      return LaunchOrder<T, kBits, GroupsShift::kZero>(p, stream);
  }
}

template <typename T>
void LaunchBits(const Call& p, cudaStream_t stream) {
  switch (p.m.bits) {
    case 2:
      return LaunchShift<T, 2>(p, stream);
    case 3:
      return LaunchShift<T, 3>(p, stream);
    case 4:
      return LaunchShift<T, 4>(p, stream);
    case 5:
      return LaunchShift<T, 5>(p, stream);
    case 6:
      return LaunchShift<T, 6>(p, stream);
    default:
      return LaunchShift<T, 8>(p, stream);
  }
}

}  // namespace

bool GroupsFitTensorCores(const GroupsParams& params) {
  return params.dtype != FloatType::kFloat32 && HasTensorCores();
}

void LaunchGroupsOnTensorCores(const GroupsParams& params, const void* x, const ChosenCall& chosen,
                               cudaStream_t stream) {
  Call p{};
  static_cast<GroupsCall&>(p) = CallOf(params.matrix);
  static_cast<TileCall&>(p) = TileCallOf(params, x, chosen);
  return params.dtype == FloatType::kFloat16 ? LaunchBits<__half>(p, stream)
                                             : LaunchBits<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

// Linear layers for a few rows by codes of 4 and 8 bits as they lie, on tensor cores, for x of 16
// bits: a block's warps take turns at kDeep chunks of inputs that follow each other, then at those
// that are left. An H100's memory is read at full speed by 274 instructions of a warp for a KiB of
// codes (tests/gpu/sass.py counts them), so there is a kernel for each shift, and one for groups
// that have all of the chunks in common, whose scales are looked up once.
#include "groups_tensor.cuh"

namespace exkv {
namespace {

using Call = GroupsTensorCall;

constexpr int kPair = 2;  // outputs of a lane, whose codes are neighbours

// Blocks of a multiprocessor, for which there are registers: the compiler takes more of them
// from 10.0 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocksAtOnce = 2;
#else
constexpr int kBlocksAtOnce = 3;
#endif

// Where a lane's share begins.
struct Source {
  const uint8_t* codes;
  const uint16_t* x;
  const uint8_t* scales;  // of the first output
  const uint8_t* shifts;
  int next_scales;  // bytes to those of the second one
  int next_shifts;
};

// Of a chunk: eight inputs of two outputs, and of a row of x.
template <int kBits>
struct Share {
  struct alignas(8) Codes {
    uint32_t of[kPair];
  };
  struct alignas(16) Inputs {
    uint32_t pairs[kOctet / 2];
  };
  Codes codes[kBits / 4];
  Inputs x;
};

// Lane l has outputs 2 (l / 4) and 2 (l / 4) + 1 of 16, row l / 4 of eight, and inputs as
// groups_codes.cuh says. What is not there repeats the last one.
template <int kBits>
__device__ __forceinline__ Source FindSource(const Call& p, const Tile& tile, int lane) {
  const int own = lane / 4 * kPair, place = lane % 4;
  const int64_t last = (p.m.outputs - 1) / kGroupsBlock;
  const int64_t block = min((tile.first + own) / kGroupsBlock, last);
  Source s;
  s.codes = Pinned(p.m.codes + block * p.block_bytes + own % kGroupsBlock * 4 +
                   place * (kBits / 4) * kVectorBytes);
  s.x = Pinned(RowOfLane(p, tile) + place * kOctet);
  const int64_t output = min(tile.first + own, p.m.outputs - 1);
  const bool has_next = output + 1 < p.m.outputs;
  s.scales = Pinned(ScalesOf(p, output));
  s.shifts = Pinned(ShiftsOf(p, output));
  s.next_scales = has_next ? p.scales_bytes : 0;
  s.next_shifts = has_next ? p.shifts_bytes : 0;
  return s;
}

template <int kBits>
__device__ __forceinline__ Share<kBits> LoadShare(const Source& s, int64_t chunk) {
  using Codes = typename Share<kBits>::Codes;
  using Inputs = typename Share<kBits>::Inputs;
  Share<kBits> share;
#pragma unroll
  for (int w = 0; w < kBits / 4; ++w) {
    share.codes[w] = *reinterpret_cast<const Codes*>(s.codes + chunk * (kGroupsChunk * kBits) +
                                                     w * kVectorBytes);
  }
  share.x = *reinterpret_cast<const Inputs*>(s.x + chunk * kGroupsChunk);
  return share;
}

// Inputs 2 i and 2 i + 1 of output n, less the middle.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t PairOf(const Share<kBits>& share, int n, int i) {
  constexpr int kOfWord = 16 / kBits;
  return Centered<T, kBits>(share.codes[i / kOfWord].of[n] >> (i % kOfWord * kBits), kBits);
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
__device__ __forceinline__ void AddShare(const Share<kBits>& share, float (&products)[4],
                                         float (&inputs)[4]) {
  const auto& x = share.x.pairs;
#pragma unroll
  for (int i = 0; i < kOctet / 2; i += 2) {
    const uint32_t a[4] = {PairOf<T, kBits>(share, 0, i), PairOf<T, kBits>(share, 1, i),
                           PairOf<T, kBits>(share, 0, i + 1), PairOf<T, kBits>(share, 1, i + 1)};
    Multiply<T>(products, a, x[i], x[i + 1]);
    if constexpr (kInputs) AddInputs<T>(x[i], x[i + 1], inputs);
  }
}

// Adds the part of kChunks chunks, which have scales in common, or each its own: then a lane finds
// those of chunk l % 4, for the four lanes of its outputs.
template <typename T, int kBits, GroupsShift kShift, int kChunks, bool kShared>
__device__ __forceinline__ void AddChunks(const Call& p, const Source& s, int first,
                                          float (&sums)[4]) {
  constexpr bool kShifted = kShift != GroupsShift::kSymmetric;
  constexpr int kGroups = kShared ? 1 : kChunks, kEach = kChunks / kGroups;
  Share<kBits> shares[kChunks];
  ScaleAndOffset own[kPair];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) shares[i] = LoadShare<kBits>(s, first + i);
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

template <typename T, int kBits, GroupsShift kShift, bool kWide>
__device__ __forceinline__ void AddTile(const Call& p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Tile tile = FindTile(p);
  const Source source = FindSource<kBits>(p, tile, lane);
  float sums[4] = {};
  const int whole = p.chunks / kDeep;
  for (int i = warp; i < whole; i += kWarps) {
    AddChunks<T, kBits, kShift, kDeep, kWide>(p, source, i * kDeep, sums);
  }
  const int left = whole * kDeep + warp;
  if (left < p.chunks) AddChunks<T, kBits, kShift, 1, true>(p, source, left, sums);
  StoreTile<T>(p, tile, {lane / 4 * kPair, lane / 4 * kPair + 1}, sums);
}

template <typename T, int kBits, GroupsShift kShift, bool kWide>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksAtOnce) GroupsTensorKernel(Call p) {
  if (kForTensorCores) AddTile<T, kBits, kShift, kWide>(p);
}

template <typename T, int kBits, GroupsShift kShift>
void LaunchWidth(const Call& p, cudaStream_t stream) {
  const bool wide = p.m.groups == 1 || p.m.group % (kDeep * kGroupsChunk) == 0;
  return wide ? LaunchTiles(GroupsTensorKernel<T, kBits, kShift, true>, p, stream)
              : LaunchTiles(GroupsTensorKernel<T, kBits, kShift, false>, p, stream);
}

template <typename T, int kBits>
void LaunchShift(const Call& p, cudaStream_t stream) {
  switch (p.m.beside) {
    case GroupsShift::kSymmetric:
      return LaunchWidth<T, kBits, GroupsShift::kSymmetric>(p, stream);
    case GroupsShift::kOffset:
      return LaunchWidth<T, kBits, GroupsShift::kOffset>(p, stream);
    case GroupsShift::kZero:
      return LaunchWidth<T, kBits, GroupsShift::kZero>(p, stream);
  }
}

template <typename T>
void LaunchBits(const Call& p, cudaStream_t stream) {
  return p.m.bits == 8 ? LaunchShift<T, 8>(p, stream) : LaunchShift<T, 4>(p, stream);
}

}  // namespace

bool GroupsFitTensorCores(const GroupsParams& params) {
  return params.dtype != FloatType::kFloat32 && HasTensorCores();
}

void LaunchGroupsOnTensorCores(const GroupsParams& params, const void* x, cudaStream_t stream) {
  Call p{};
  static_cast<GroupsCall&>(p) = CallOf(params.matrix);
  static_cast<TileCall&>(p) = TileCallOf(params, x);
  const bool has_kernel = (p.m.bits == 4 || p.m.bits == 8) && p.m.order == nullptr;
  if (!has_kernel) return LaunchGroupsInPlanes(p, params.dtype, stream);
  return params.dtype == FloatType::kFloat16 ? LaunchBits<__half>(p, stream)
                                             : LaunchBits<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

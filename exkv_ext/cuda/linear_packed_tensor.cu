// Linear layers for a few rows by ggml's K types, on tensor cores, for x of 16 bits: a block's
// warps take turns at blocks of 256 inputs, of 16 outputs. Codes become 16-bit floats exactly;
// products of inputs that share a scale are scaled in float32, and minima are multiplied by a sum
// of x, a product with ones.
//
// Lane l has outputs l / 4 and l / 4 + 8, and of 16 inputs those that byte 4 (l % 4) and the next
// three stand for. A mask leaves the first and the third of them in a word, or the second and the
// fourth: x is paired likewise.
#include "packed_chunk.cuh"
#include "tensor_tile.cuh"

namespace exkv {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kPair = 2;  // outputs of a lane

struct Call : TileCall {
  PackedMatrix m;
};

struct ScaleAndLow {
  float scale;
  float low;
};

// The bits of a word from `at` on, or from before its first one.
__device__ __forceinline__ uint32_t ShiftDown(uint32_t word, int at) {
  return at >= 0 ? word >> at : word << -at;
}

// The types' blocks, as four lanes have one between them. `own`: scales of a quarter of the groups,
// in their order. Pair: two codes of a chunk of 32 inputs, in its lower or upper half (step), from
// the lower or upper byte of each half of a word (byte).

template <int kBits>
struct TensorWithMinima {
  static constexpr int kHigh = kBits == 5 ? 32 : 0;
  static constexpr int kInputs = 256, kGroup = 32, kOwn = kInputs / kGroup / 4;
  static constexpr bool kHasMinima = true;
  uint32_t codes[4][2], high[2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const uint8_t* row, int piece, int place) {
    const uint8_t* block = row + int64_t{piece} * (144 + kHigh);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint8_t* from = block + 16 + step * 16 + place * 4;
      if constexpr (kBits == 5) high[step] = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i][step] = *reinterpret_cast<const uint32_t*>(from + kHigh + i * 32);
      }
    }
    uint32_t first[4];  // two halves, and eight scales and minima of 6 bits
    LoadWords<16>(block, first);
    const int at = place % 2 * 16;
    const uint32_t a = first[1] >> at, b = first[2] >> at, c = first[3] >> at;
    const bool upper = place >= 2;
    const uint32_t s = upper ? (c & 0x0f0fu) | (a >> 2 & 0x3030u) : a & 0x3f3fu;
    const uint32_t m = upper ? (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u) : b & 0x3f3fu;
    const float d = __half2float(__ushort_as_half(static_cast<unsigned short>(first[0])));
    const float least = __half2float(__ushort_as_half(static_cast<unsigned short>(first[0] >> 16)));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(s >> (8 * i) & 0xffu);
      own[i].low = -least * static_cast<float>(m >> (8 * i) & 0xffu);
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk / 2][step] >> (chunk % 2 * 4 + byte * 8);
    uint32_t code = AndOr(word, 0x000f000fu, kBase<T>);
    if constexpr (kBits == 5) {
      code = AndOr(ShiftDown(high[step], chunk + byte * 8 - 4), 0x00100010u, code);
    }
    return SubtractPairs<T>(code, kBase<T>);
  }
};

// Half a block: of a whole one, codes of two outputs would be too many registers.
struct TensorQ6K {
  static constexpr int kInputs = 128, kGroup = 16, kOwn = kInputs / kGroup / 4;
  static constexpr bool kHasMinima = false;
  uint32_t codes[2][2], high[2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ static uint32_t WordAt(const uint8_t* from) {
    uint32_t word[1];
    LoadWords<2>(from, word);
    return word[0];
  }

  __device__ __forceinline__ void Load(const uint8_t* row, int piece, int place) {
    const uint8_t* block = row + int64_t{piece / 2} * 210;
    const int half = piece % 2;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int at = step * 16 + place * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) codes[i][step] = WordAt(block + half * 64 + i * 32 + at);
      high[step] = WordAt(block + 128 + half * 32 + at);
    }
    const uint8_t* scales = block + 192 + half * 8 + place * kOwn;
    const float d = HalfAt(block + 208);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(static_cast<int8_t>(scales[i]));
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk % 2][step] >> (chunk / 2 * 4 + byte * 8);
    const uint32_t above = ShiftDown(high[step], chunk * 2 + byte * 8 - 4);
    const uint32_t code = AndOr(above, 0x00300030u, AndOr(word, 0x000f000fu, kBase<T>));
    return SubtractPairs<T>(code, kBase<T> + 32 * 0x10001u);
  }
};

// A row's inputs of a lane in a step, as Pair has their codes.
struct InputPairs {
  uint32_t low;
  uint32_t high;
};

__device__ __forceinline__ InputPairs LoadInputs(const uint16_t* x) {
  struct alignas(8) Two {
    uint32_t at[2];
  };
  const Two two = *reinterpret_cast<const Two*>(x);
  return {__byte_perm(two.at[0], two.at[1], 0x5410), __byte_perm(two.at[0], two.at[1], 0x7632)};
}

// What the lane that has a group's scale says.
template <typename Block>
__device__ __forceinline__ ScaleAndLow OfGroup(const Block& block, int group) {
  const ScaleAndLow& own = block.own[group % Block::kOwn];
  const int place = group / Block::kOwn;
  const float scale = __shfl_sync(kFullWarp, own.scale, place, 4);
  if constexpr (!Block::kHasMinima) return {scale, 0};
  return {scale, __shfl_sync(kFullWarp, own.low, place, 4)};
}

template <typename Block>
__device__ __forceinline__ void AddScaled(const Block (&blocks)[kPair], int group,
                                          const float (&products)[4], const float (&inputs)[4],
                                          float (&sums)[4]) {
#pragma unroll
  for (int n = 0; n < kPair; ++n) {
    const ScaleAndLow by = OfGroup(blocks[n], group);
#pragma unroll
    for (int c = 2 * n; c < 2 * n + 2; ++c) {
      sums[c] = fmaf(by.scale, products[c], sums[c]);
      if constexpr (Block::kHasMinima) sums[c] = fmaf(by.low, inputs[c], sums[c]);
    }
  }
}

// Adds the part of a block, of whose inputs x has a lane's first.
template <typename T, typename Block>
__device__ __forceinline__ void AddBlock(const Block (&blocks)[kPair], const uint16_t* x,
                                         float (&sums)[4]) {
  constexpr int kEach = Block::kGroup / 16;
#pragma unroll
  for (int group = 0; group < Block::kInputs / Block::kGroup; ++group) {
    float products[4] = {}, inputs[4] = {};
#pragma unroll
    for (int i = group * kEach; i < (group + 1) * kEach; ++i) {
      const auto [low, high] = LoadInputs(x + i * 16);
      uint32_t a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = blocks[j % 2].template Pair<T>(i / 2, i % 2, j / 2);
      Multiply<T>(products, a, low, high);
      if constexpr (Block::kHasMinima) AddInputs<T>(low, high, inputs);
    }
    AddScaled(blocks, group, products, inputs, sums);
  }
}

template <typename T, typename Block>
__device__ __forceinline__ void AddTile(const Call& p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, place = lane % 4;
  const Tile tile = FindTile(p);
  const uint8_t* rows[kPair];
#pragma unroll
  for (int n = 0; n < kPair; ++n) {  // an output that is not there repeats the last one
    rows[n] = Pinned(p.m.rows + min(tile.first + lane / 4 + 8 * n, p.outputs - 1) * p.m.row_bytes);
  }
  const uint16_t* x = Pinned(RowOfLane(p, tile) + place * 4);
  float sums[4] = {};
  const int pieces = static_cast<int>(p.inputs / Block::kInputs);
  for (int i = warp; i < pieces; i += kWarps) {
    Block blocks[kPair];
#pragma unroll
    for (int n = 0; n < kPair; ++n) blocks[n].Load(rows[n], i, place);
    AddBlock<T>(blocks, x + int64_t{i} * Block::kInputs, sums);
  }
  StoreTile<T>(p, tile, {lane / 4, lane / 4 + 8}, sums);
}

template <typename T, typename Block>
__global__ void __launch_bounds__(kWarp* kWarps, 2) PackedTensorKernel(Call p) {
  if (kForTensorCores) AddTile<T, Block>(p);
}

template <typename T>
void LaunchType(const Call& p, cudaStream_t stream) {
  switch (p.m.type) {
    case GgmlType::kQ4K:
      return LaunchTiles(PackedTensorKernel<T, TensorWithMinima<4>>, p, stream);
    case GgmlType::kQ5K:
      return LaunchTiles(PackedTensorKernel<T, TensorWithMinima<5>>, p, stream);
    default:
      return LaunchTiles(PackedTensorKernel<T, TensorQ6K>, p, stream);
  }
}

bool HasTensorType(const PackedMatrix& m) {
  if (m.packing != Packing::kGgml) return false;
  return m.type == GgmlType::kQ4K || m.type == GgmlType::kQ5K || m.type == GgmlType::kQ6K;
}

}  // namespace

bool PackedFitsTensorCores(const PackedParams& params) {
  return HasTensorType(params.matrix) && params.dtype != FloatType::kFloat32 && HasTensorCores();
}

void LaunchPackedOnTensorCores(const PackedParams& params, const void* x, cudaStream_t stream) {
  Call p{};
  static_cast<TileCall&>(p) = TileCallOf(params, x);
  p.m = params.matrix;
  return params.dtype == FloatType::kFloat16 ? LaunchType<__half>(p, stream)
                                             : LaunchType<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

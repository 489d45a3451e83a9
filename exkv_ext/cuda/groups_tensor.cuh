// What the kernels of weights in groups share on tensor cores. Codes become 16-bit floats exactly,
// less the middle of their range; products are scaled in float32, and what a weight's offset adds
// is multiplied by a sum of x, a product with ones.
#pragma once

#include "groups_codes.cuh"
#include "tensor_tile.cuh"

namespace exkv {

constexpr int kBlocks = kOutputs / static_cast<int>(kGroupsBlock);
constexpr int kDeep = 4;  // chunks that a warp has under way

struct GroupsTensorCall : GroupsCall, TileCall {};

// Any number of bits, and inputs in any order: linear_groups_planes.cu. linear_groups_tensor.cu has
// codes of 4 and 8 bits whose inputs are in x's own order.
void LaunchGroupsInPlanes(const GroupsTensorCall& p, FloatType dtype, cudaStream_t stream);

// Two codes, the lowest kBits of each half of a word, less the middle of their range. kBits 0: all
// of the halves, of so many bits.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t Centered(uint32_t word, int64_t bits) {
  if constexpr (kBits == 8 && !std::is_same<T, __half>::value) {
    // 128 + the lower seven bits, less 128 where there is an eighth, or 256.
    return SubtractPairs<T>(AndOr(word, 0x007f007fu, 0x43004300u),
                            AndXor(word, 0x00800080u, 0x43804380u));
  } else {
    constexpr uint32_t kMask = kBits > 0 ? ((1u << kBits) - 1) * 0x10001u : 0xffffffffu;
    const uint32_t middle = kBits > 0 ? (1u << kBits) / 2 : 1u << (bits - 1);
    return SubtractPairs<T>(AndOr(word, kMask, kBase<T>), kBase<T> + middle * 0x10001u);
  }
}

}  // namespace exkv

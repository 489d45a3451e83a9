// What the kernels of weights in groups share on tensor cores. Codes become 16-bit floats exactly,
// less the middle of their range; products are scaled in float32, and what a weight's offset adds
// is multiplied by a sum of x, a product with ones.
#pragma once

#include "groups_codes.cuh"
#include "tensor_tile.cuh"

namespace exkv {

constexpr int kDeep = 4;  // chunks that a warp has under way

// How codes lie: bits of the first word's fields, and of the second one's. Of 8 bits the second
// word has codes of its own.
template <int kBits>
constexpr int kLow = kBits == 8   ? 8
                     : kBits >= 4 ? 4
                                  : 2;
template <int kBits>
constexpr int kHigh = kBits - kLow<kBits>;
template <int kBits>
constexpr bool kInPlanes = kBits != 8 && kBits != 4;

// A lane's codes of a chunk: of two outputs, each as Octet has them, its own the lowest.
struct TwoOutputs {
  uint32_t words[2][2];
};

// From where the first words of both outputs are, and the second ones.
template <int kBits>
__device__ __forceinline__ TwoOutputs LoadOutputs(const uint8_t* low, const uint8_t* high,
                                                  int place) {
  struct alignas(8) Two {
    uint32_t at[2];
  };
  TwoOutputs found = {};
  const Two first = *reinterpret_cast<const Two*>(low);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    found.words[n][0] = kLow<kBits> == 2 ? first.at[n] >> (place % 2 * 8) : first.at[n];
  }
  if constexpr (kBits == 8 || kHigh<kBits> > 0) {
    const Two second = *reinterpret_cast<const Two*>(high);
    const int at = kHigh<kBits> == 2 ? place % 2 * 8 : kHigh<kBits> == 1 ? place * 4 : 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) found.words[n][1] = second.at[n] >> at;
  }
  return found;
}

// Inputs 2 i and 2 i + 1 of an output, less the middle of the codes' range.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t CenteredPair(const uint32_t (&words)[2], int i) {
  constexpr uint32_t kMiddle = (1u << kBits) / 2 * 0x10001u;
  if constexpr (kBits == 8) {
    const uint32_t word = words[i / 2] >> (i % 2 * 8);
    if constexpr (!std::is_same<T, __half>::value) {
      // 128 + the lower seven bits, less 128 where there is an eighth, or 256.
      return SubtractPairs<T>(AndOr(word, 0x007f007fu, 0x43004300u),
                              AndXor(word, 0x00800080u, 0x43804380u));
    }
    return SubtractPairs<T>(AndOr(word, 0x00ff00ffu, kBase<T>), kBase<T> + kMiddle);
  } else {
    constexpr int low = kLow<kBits>, high = kHigh<kBits>;
    uint32_t code = AndOr(words[0] >> (i * low), ((1u << low) - 1) * 0x10001u, kBase<T>);
    if constexpr (high > 0) {
      constexpr uint32_t kUpper = ((1u << kBits) - (1u << low)) * 0x10001u;
      code = AndOr(ShiftDown(words[1], i * high - low), kUpper, code);
    }
    return SubtractPairs<T>(code, kBase<T> + kMiddle);
  }
}

}  // namespace exkv

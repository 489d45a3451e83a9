// How a warp encodes 32 values that share a scale, one in each lane: exkv/ops/kv_quant.py and
// exkv/ops/kv_formats.py, to the bit. Divisions are IEEE ones, and NaN is looked after.
#pragma once

#include "../kv_quant_params.h"
#include "launch.cuh"

namespace exkv {

constexpr unsigned kPackingWarp = 0xffffffffu;
static_assert(kGroup == 32, "a group has a value for each lane");

struct ScaleAndOffset {
  __half scale;
  __half offset;
};

// Its scale, and each lane's level of 8 bits.
__device__ __forceinline__ __half QuantizeLane(float value, int8_t* level) {
  // By its bits a magnitude compares as it should, and NaN stands above infinity.
  unsigned peak = __float_as_uint(value) & 0x7fffffffu;
  for (int step = 16; step > 0; step /= 2) {
    peak = max(peak, __shfl_xor_sync(kPackingWarp, peak, step));
  }
  const float exact = __fdiv_rn(__uint_as_float(peak), kLevels);
  const __half scale = __float2half_rn(exact > kMaxScale ? kMaxScale : exact);
  const float step = __half2float(scale);
  const float whole = rintf(fminf(fmaxf(__fdiv_rn(value, step), -kLevels), kLevels));
  *level = step > 0 ? static_cast<int8_t>(whole) : int8_t{0};
  return scale;
}

// Floats in their order as integers: NaN of either sign stands outside of the infinities.
__device__ __forceinline__ int OrderOf(float value) {
  const int bits = static_cast<int>(__float_as_uint(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float OfOrder(int order) {
  return __uint_as_float(static_cast<unsigned>(order ^ ((order >> 31) & 0x7fffffff)));
}

// `top` is the highest level.
__device__ __forceinline__ ScaleAndOffset RangeOfLanes(float value, float top) {
  int least = OrderOf(value), most = least;
  for (int step = 16; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(kPackingWarp, least, step));
    most = max(most, __shfl_xor_sync(kPackingWarp, most, step));
  }
  const float low = OfOrder(least), high = OfOrder(most);
  if (low != low || high != high) return {__ushort_as_half(0x7e00), __ushort_as_half(0x7e00)};
  const __half offset = __float2half_rn(fminf(fmaxf(low, -kMaxScale), kMaxScale));
  const float exact = __fdiv_rn(high - __half2float(offset), top);
  return {__float2half_rn(fminf(fmaxf(exact, 0.0f), kMaxScale)), offset};
}

// The byte of kBits-wide levels that begins with this lane's, right in every lane whose value is
// the first of a byte; levels of the lanes from `count` on are zero.
template <int kBits>
__device__ __forceinline__ uint8_t PackLane(float value, int count, ScaleAndOffset* range) {
  constexpr float kTop = (1 << kBits) - 1;
  constexpr int kShare = 8 / kBits;
  *range = RangeOfLanes(value, kTop);
  const float step = __half2float(range->scale), base = __half2float(range->offset);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned byte = 0;
  if (step > 0 && lane < count) {
    const float level = fminf(fmaxf(__fdiv_rn(value - base, step), 0.0f), kTop);
    byte = static_cast<unsigned>(rintf(level)) << (lane % kShare * kBits);
  }
  for (int other = 1; other < kShare; other *= 2) {
    byte |= __shfl_xor_sync(kPackingWarp, byte, other);
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace exkv

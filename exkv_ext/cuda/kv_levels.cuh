// What a group's scale, offset and levels are: exkv/ops/kv_quant.py and exkv/ops/kv_formats.py, to
// the bit. That is why divisions are IEEE ones and NaN is looked after. How a group's values lie in
// threads is for kernels to say.
#pragma once

#include "../params/kv_quant_params.h"
#include "launch.cuh"

namespace exkv {

// 8 bits, symmetric ------------------------------------------------------------------------------

// A magnitude by its bits, which compare as it does; NaN comes above infinity.
__device__ __forceinline__ unsigned MagnitudeOf(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// Of the group whose largest magnitude this is.
__device__ __forceinline__ __half ScaleOf(unsigned magnitude) {
  const float exact = __fdiv_rn(__uint_as_float(magnitude), kLevels);
  return __float2half_rn(exact > kMaxScale ? kMaxScale : exact);
}

__device__ __forceinline__ int8_t LevelOf(float value, float scale) {
  if (!(scale > 0)) return 0;  // all are zero, or a NaN is among them
  return static_cast<int8_t>(rintf(fminf(fmaxf(__fdiv_rn(value, scale), -kLevels), kLevels)));
}

// 4 and 2 bits, with an offset
// ---------------------------------------------------------------------

struct ScaleAndOffset {
  __half scale;
  __half offset;
};

// Floats in their order as integers: NaN of either sign comes outside of the infinities.
__device__ __forceinline__ int OrderOf(float value) {
  const int bits = static_cast<int>(__float_as_uint(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float OfOrder(int order) {
  return __uint_as_float(static_cast<unsigned>(order ^ ((order >> 31) & 0x7fffffff)));
}

// Of the group whose least and largest value these are, in order; `top` is the highest level.
__device__ __forceinline__ ScaleAndOffset RangeOf(int least, int most, float top) {
  const float low = OfOrder(least), high = OfOrder(most);
  if (low != low || high != high) return {__ushort_as_half(0x7e00), __ushort_as_half(0x7e00)};
  const __half offset = __float2half_rn(fminf(fmaxf(low, -kMaxScale), kMaxScale));
  const float scale = __fdiv_rn(high - __half2float(offset), top);
  return {__float2half_rn(fminf(fmaxf(scale, 0.0f), kMaxScale)), offset};
}

__device__ __forceinline__ unsigned LevelOf(float value, const ScaleAndOffset& range, float top) {
  const float scale = __half2float(range.scale);
  if (!(scale > 0)) return 0;  // all are alike, or a NaN is among them
  const float level = __fdiv_rn(value - __half2float(range.offset), scale);
  return static_cast<unsigned>(rintf(fminf(fmaxf(level, 0.0f), top)));
}

}  // namespace exkv

// How a warp encodes 32 values that share a scale, one in each lane.
#pragma once

#include "kv_levels.cuh"

namespace exkv {

constexpr unsigned kPackingWarp = 0xffffffffu;
static_assert(kGroup == 32, "a group has a value for each lane");

// Its scale, and each lane's level of 8 bits.
__device__ __forceinline__ __half QuantizeLane(float value, int8_t* level) {
  unsigned peak = MagnitudeOf(value);
  for (int step = 16; step > 0; step /= 2) {
    peak = max(peak, __shfl_xor_sync(kPackingWarp, peak, step));
  }
  const __half scale = ScaleOf(peak);
  *level = LevelOf(value, __half2float(scale));
  return scale;
}

// `top` is the highest level.
__device__ __forceinline__ ScaleAndOffset RangeOfLanes(float value, float top) {
  int least = OrderOf(value), most = least;
  for (int step = 16; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(kPackingWarp, least, step));
    most = max(most, __shfl_xor_sync(kPackingWarp, most, step));
  }
  return RangeOf(least, most, top);
}

// The byte of kBits-wide levels that begins with this lane's, right in every lane whose value is
// the first of a byte; levels of the lanes from `count` on are zero.
template <int kBits>
__device__ __forceinline__ uint8_t PackLane(float value, int count, ScaleAndOffset* range) {
  constexpr float kTop = (1 << kBits) - 1;
  constexpr int kShare = 8 / kBits;
  *range = RangeOfLanes(value, kTop);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned byte = 0;
  if (lane < count) byte = LevelOf(value, *range, kTop) << (lane % kShare * kBits);
  for (int other = 1; other < kShare; other *= 2) {
    byte |= __shfl_xor_sync(kPackingWarp, byte, other);
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace exkv

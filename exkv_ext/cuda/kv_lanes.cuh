// Groups of 32 values over lanes: eight hold a group, four neighbouring values each, so that a warp
// reads and writes four groups in whole lines. A row's last group may be short.
#pragma once

#include "../params/kv_quant_params.h"
#include "launch.cuh"

namespace exkv {

constexpr int kLanes = 8;
constexpr int kPerLane = 4;
constexpr int kLaneThreads = 256;
constexpr unsigned kFullWarp = 0xffffffffu;
static_assert(kLanes * kPerLane == kGroup, "a group is what its lanes hold");

// Four values that are moved at once.
template <typename T>
struct alignas(kPerLane * sizeof(T)) Four {
  T at[kPerLane];
};

// Where a lane works: its group, and its first value.
struct Place {
  int64_t group;   // counted over all rows
  int64_t row;     //
  int64_t column;  // of the lane's first value
  int64_t first;   // that value's offset in the whole tensor
  int count;       // values of the lane inside the row: kPerLane but at a short last group's end
};

__device__ __forceinline__ Place FindPlace(int64_t rows, int64_t dim, int64_t groups) {
  const int64_t lane = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  Place place;
  place.group = lane / kLanes;
  place.row = place.group / groups;
  place.column = (place.group % groups) * kGroup + (lane % kLanes) * kPerLane;
  place.first = place.row * dim + place.column;
  const int64_t left = place.row < rows ? dim - place.column : 0;
  place.count = left < 0 ? 0 : left < kPerLane ? static_cast<int>(left) : kPerLane;
  return place;
}

// Rows whose length is a multiple of four start where a Four may be (torch's own allocations
// do); the flag says that all do.
template <typename T>
__device__ __forceinline__ Four<T> LoadFour(const T* from, const Place& place, bool aligned) {
  if (aligned && place.count == kPerLane) {
    return *reinterpret_cast<const Four<T>*>(from + place.first);
  }
  Four<T> four = {};
  for (int i = 0; i < place.count; ++i) four.at[i] = from[place.first + i];
  return four;
}

template <typename T>
__device__ __forceinline__ void StoreFour(T* to, const Place& place, bool aligned,
                                          const Four<T>& four) {
  if (aligned && place.count == kPerLane) {
    *reinterpret_cast<Four<T>*>(to + place.first) = four;
    return;
  }
  for (int i = 0; i < place.count; ++i) to[place.first + i] = four.at[i];
}

// Blocks of kLaneThreads that all groups take.
inline unsigned LaneBlocks(int64_t rows, int64_t groups) {
  return static_cast<unsigned>((rows * groups * kLanes + kLaneThreads - 1) / kLaneThreads);
}

}  // namespace exkv

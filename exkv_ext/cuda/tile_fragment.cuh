// What the attention kernels share that widen tiles of keys into shared memory: fragments of
// kv_fragment.cuh become values of the queries' type, in rows as mma.cuh reads them.
#pragma once

#include "kv_fragment.cuh"
#include "mma.cuh"

namespace exkv {

// Where a lane works in its warp's fragments.
__device__ __forceinline__ int LaneRow() { return static_cast<int>(threadIdx.x) % 32 / 4; }
__device__ __forceinline__ int LaneColumn() { return static_cast<int>(threadIdx.x) % 4 * 2; }

template <typename T>
__device__ __forceinline__ void PutFragment(const float (&x)[kFragment], T* to) {
  Chunk<16> chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) chunk.words[i] = PackPair<T>(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<Chunk<16>*>(to) = chunk;
}

template <>
__device__ __forceinline__ void PutFragment<float>(const float (&x)[kFragment], float* to) {
#pragma unroll
  for (int i = 0; i < kFragment; i += 4) {
    Chunk<16> chunk;
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk.words[j] = __float_as_uint(x[i + j]);
    *reinterpret_cast<Chunk<16>*>(to + i) = chunk;
  }
}

__device__ __forceinline__ Span SpanOf(int index, int dim) {
  const int first = index * kFragment;
  return {first, max(0, min(kFragment, dim - first))};
}

template <typename T>
constexpr Kind kKindOf = sizeof(T) == 4 ? Kind::kFloat32 : Kind::kBFloat16;
template <>
constexpr Kind kKindOf<__half> = Kind::kFloat16;

struct alignas(16) FloatFour {
  float at[4];
};

__device__ __forceinline__ FloatFour FourAt(const float* from) {
  return *reinterpret_cast<const FloatFour*>(from);
}

}  // namespace exkv

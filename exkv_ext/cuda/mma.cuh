// Products of small matrices on tensor cores, by all lanes of a warp together; before compute
// capability 8.0, which has no such product, in plain arithmetic. The PTX is here and nowhere
// else; tests/cuda_emulation has the same in C++.
//
// A fragment is a lane's share of a matrix of 16-bit floats, two neighbours in a register; which
// ones: PTX ISA, "Matrix Fragments for mma.m16n8k16". In these pieces of 8 x 8, lane l holds the
// values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.cuh"

namespace exkv {

// Two floats as one register, the first in its lower half.
template <typename T>
__device__ __forceinline__ uint32_t PackPair(float first, float second);
template <>
__device__ __forceinline__ uint32_t PackPair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
template <>
__device__ __forceinline__ uint32_t PackPair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// The first or the second float of a register.
template <typename T>
__device__ __forceinline__ float FloatOf(uint32_t pair, bool second);
template <>
__device__ __forceinline__ float FloatOf<__half>(uint32_t pair, bool second) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(second ? pair >> 16 : pair)));
}
template <>
__device__ __forceinline__ float FloatOf<__nv_bfloat16>(uint32_t pair, bool second) {
  return __uint_as_float(second ? pair & 0xffff0000u : pair << 16);
}

// a - b and a * b of two pairs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <typename T>
using PairType =
    typename std::conditional<std::is_same<T, __half>::value, __half2, __nv_bfloat162>::type;

template <typename T, typename Apply>
__device__ __forceinline__ uint32_t ApplyToPairs(uint32_t a, uint32_t b, const Apply& apply) {
  PairType<T> first, second;
  memcpy(&first, &a, sizeof(a));
  memcpy(&second, &b, sizeof(b));
  const PairType<T> found = apply(first, second);
  memcpy(&a, &found, sizeof(a));
  return a;
}
template <typename T>
__device__ __forceinline__ uint32_t SubtractPairs(uint32_t a, uint32_t b) {
  return ApplyToPairs<T>(a, b, [](auto x, auto y) { return __hsub2(x, y); });
}
template <typename T>
__device__ __forceinline__ uint32_t MultiplyPairs(uint32_t a, uint32_t b) {
  return ApplyToPairs<T>(a, b, [](auto x, auto y) { return __hmul2(x, y); });
}
#else
template <typename T>
__device__ __forceinline__ uint32_t SubtractPairs(uint32_t a, uint32_t b) {
  return PackPair<T>(FloatOf<T>(a, false) - FloatOf<T>(b, false),
                     FloatOf<T>(a, true) - FloatOf<T>(b, true));
}
template <typename T>
__device__ __forceinline__ uint32_t MultiplyPairs(uint32_t a, uint32_t b) {
  return PackPair<T>(FloatOf<T>(a, false) * FloatOf<T>(b, false),
                     FloatOf<T>(a, true) * FloatOf<T>(b, true));
}
#endif

// (word & mask) | bits and (word & mask) ^ bits, each one instruction: of C++ with two constants
// the compiler makes two. Permuted is __byte_perm of a selector whose halves of a byte are below 8,
// which that function makes sure of anew.
#if defined(EXKV_CUDA_EMULATION)
inline uint32_t Permuted(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}
inline uint32_t AndOr(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) | bits; }
inline uint32_t AndXor(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) ^ bits; }
#else
__device__ __forceinline__ uint32_t Permuted(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(selector));
  return found;
}
__device__ __forceinline__ uint32_t AndOr(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(word), "r"(mask), "r"(bits));
  return found;
}
__device__ __forceinline__ uint32_t AndXor(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(found) : "r"(word), "r"(mask), "r"(bits));
  return found;
}
#endif

// Multiply, below, without tensor cores.
template <typename T>
__device__ __forceinline__ void MultiplyByLanes(float (&sum)[4], const uint32_t (&a)[4],
                                                uint32_t low, uint32_t high) {
  constexpr unsigned kFull = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = lane / 4 * 4, column = lane % 4 * 8;  // the first lanes that hold them
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {  // two of the inner dimension at a time
    const int from = k % 4;
    const uint32_t b = k < 4 ? low : high;
    const uint32_t rows[2] = {__shfl_sync(kFull, k < 4 ? a[0] : a[2], row + from),
                              __shfl_sync(kFull, k < 4 ? a[1] : a[3], row + from)};
    const uint32_t columns[2] = {__shfl_sync(kFull, b, column + from),
                                 __shfl_sync(kFull, b, column + 4 + from)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = fmaf(FloatOf<T>(rows[i / 2], false), FloatOf<T>(columns[i % 2], false), sum[i]);
      sum[i] = fmaf(FloatOf<T>(rows[i / 2], true), FloatOf<T>(columns[i % 2], true), sum[i]);
    }
  }
}

#if defined(EXKV_CUDA_EMULATION)
using emulation::LoadMatrices;
using emulation::LoadTransposed;
using emulation::Multiply;
using emulation::Transposed;
#else

// Four matrices of 8 x 8 from shared memory. Lanes 8 i to 8 i + 7 say where the rows of matrix i
// begin, at multiples of 16 bytes.
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&out)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void LoadTransposed(const void* row, uint32_t (&out)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// A matrix of 8 x 8, transposed.
__device__ __forceinline__ uint32_t Transposed(uint32_t piece) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(piece));
  return found;
}

// sum (16 x 8) += a (16 x 16) b (16 x 8): the lower eight values of the inner dimension are in
// `low`, the upper in `high`. T is what the 16-bit floats are.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <typename T>
__device__ __forceinline__ void Multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t low,
                                         uint32_t high) {
  MultiplyByLanes<T>(sum, a, low, high);
}
#else
template <typename T>
__device__ __forceinline__ void Multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t low,
                                         uint32_t high);
template <>
__device__ __forceinline__ void Multiply<__half>(float (&sum)[4], const uint32_t (&a)[4],
                                                 uint32_t low, uint32_t high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
template <>
__device__ __forceinline__ void Multiply<__nv_bfloat16>(float (&sum)[4], const uint32_t (&a)[4],
                                                        uint32_t low, uint32_t high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
#endif
#endif

}  // namespace exkv

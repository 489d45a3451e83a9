// linear for processors with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "isa.h"
#include "linear.h"
#include "scratch.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "half.inc"

namespace exkv {
namespace {

constexpr int64_t kStep = 16;
constexpr int kRowsAtOnce = 2;
constexpr int64_t kRowsInStreams = 4;
constexpr int64_t kPart = kAllInputs;
// Others than float32 are widened first: up to four rows of x for every weight row anew.
template <typename T>
constexpr int kRowsInLine = sizeof(T) == sizeof(float) ? 8 : 4;
template <typename T>
constexpr int kRowsTogether = sizeof(T) == sizeof(float) ? 8 : 4;

template <typename T>
constexpr int64_t kWidenedFrom = sizeof(T) == sizeof(float) ? kAllRows : 5;

using Sums = __m256;

inline Sums LoadSums(const float* values) { return _mm256_loadu_ps(values); }
inline void StoreSums(float* values, Sums sums) { _mm256_storeu_ps(values, sums); }

// In place: of its own choice GCC writes some sums over a factor, and moves them back by way of
// memory.
inline __attribute__((always_inline)) void AddProduct(Sums a, Sums b, Sums* sums) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(*sums) : "x"(a), "x"(b));
}

struct Pair {
  __m256 first, second;
};

inline Pair Load(const float* values) {
  return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}

inline Pair Load(const Half* values) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(values);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

// Values at even places, then those at odd places: bfloat16 is the upper half of float32.
inline Pair Load(const BFloat16* values) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}

template <typename T>
inline Sums LoadFirst(const T* values) {
  return Load(values).first;
}

template <typename T>
inline Sums LoadSecond(const T* values) {
  return Load(values).second;
}

inline Sums MulAdd(const Pair& a, const Pair& b, Sums sums) {
  return _mm256_fmadd_ps(a.second, b.second, _mm256_fmadd_ps(a.first, b.first, sums));
}

inline void SumUp(const Sums (&sums)[kLinearBlock], float (&out)[kLinearBlock]) {
  const __m256 low = _mm256_hadd_ps(sums[0], sums[1]), high = _mm256_hadd_ps(sums[2], sums[3]);
  const __m256 parts = _mm256_hadd_ps(low, high);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1)));
}

inline void Prefetch(const void* line) {
  _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1);
}

}  // namespace
}  // namespace exkv

#include "linear.inc"
#include "linear_tiles_avx2.inc"
#pragma GCC pop_options

namespace exkv {
namespace {
int64_t MaxRows(FloatType dtype) { return dtype == FloatType::kFloat32 ? 16 : kAllRows; }
}  // namespace

const LinearKernels kLinearAvx2 = {Run, Widen, MaxRows};
}  // namespace exkv
#endif

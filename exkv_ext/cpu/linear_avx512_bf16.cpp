// linear for processors with AVX-512 and its BF16 dot product. That instruction takes subnormal
// bfloat16 values as zero and rounds each sum to nearest even.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "isa.h"
#include "linear.h"
#include "scratch.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "half.inc"
#include "linear_avx512.inc"

namespace exkv {
namespace {

template <>
constexpr int kRowsInLine<BFloat16> = 16;
template <>
constexpr int kRowsTogether<BFloat16> = 16;
template <>
constexpr int64_t kWidenedFrom<BFloat16> = kAllRows;

inline __m512bh Load(const BFloat16* values) { return (__m512bh)_mm512_loadu_si512(values); }

inline Sums MulAdd(__m512bh a, __m512bh b, Sums sums) { return _mm512_dpbf16_ps(sums, a, b); }

}  // namespace
}  // namespace exkv

#include "linear.inc"
#include "linear_tiles_avx512.inc"
#pragma GCC pop_options

namespace exkv {
namespace {
int64_t MaxRows(FloatType dtype) { return MaxRowsBeside(dtype, 16); }
}  // namespace

const LinearKernels kLinearAvx512Bf16 = {Run, Widen, MaxRows};
}  // namespace exkv
#endif

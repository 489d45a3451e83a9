// linear for processors with AVX-512 F, BW, DQ and VL.
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
#pragma GCC target("f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")
#include "half.inc"
#include "linear_avx512.inc"

namespace exkv {
namespace {

// Values at even places, then those at odd places: bfloat16 is the upper half of float32.
inline Pair Load(const BFloat16* values) {
  const __m512i both = _mm512_loadu_si512(values);
  const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
}

}  // namespace
}  // namespace exkv

#include "linear.inc"
#include "linear_tiles_avx512.inc"
#pragma GCC pop_options

namespace exkv {
namespace {
int64_t MaxRows(FloatType dtype) { return MaxRowsBeside(dtype, kAllRows); }
}  // namespace

const LinearKernels kLinearAvx512 = {Run, Widen, MaxRows};
}  // namespace exkv
#endif

// kv_quant for processors with AVX-512 F, BW, DQ and VL. Vectors stay 256 bits wide: a group is
// small, and 512-bit loads would wait for the narrower stores that widening int8 ends in.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kv_quant.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=256")
#include "half.inc"

namespace exkv {
namespace {

inline void HalfToFloat32(const uint16_t* in, float* out) {
  for (int64_t i = 0; i < kGroup; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
}

inline void FloatToHalf32(const float* in, uint16_t* out) {
  for (int64_t i = 0; i < kGroup; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
}

}  // namespace
}  // namespace exkv

#include "kv_quant.inc"
#pragma GCC pop_options

namespace exkv {
const KvQuantKernels kKvQuantAvx512 = {Quantize, Dequantize};
}  // namespace exkv
#endif

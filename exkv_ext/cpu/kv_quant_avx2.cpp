// kv_quant for processors with AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kv_quant.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
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
const KvQuantKernels kKvQuantAvx2 = {Quantize, Dequantize};
}  // namespace exkv
#endif

// kv_quant for processors with AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kv_quant.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#include "half.inc"

namespace exkv {
namespace {

inline void HalfToFloat32(const uint16_t* in, float* out) {
  for (int64_t i = 0; i < kGroup; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(halves));
  }
}

inline void FloatToHalf32(const float* in, uint16_t* out) {
  for (int64_t i = 0; i < kGroup; i += 16) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), halves);
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

// linear_packed for processors with AVX-512's dot products of integers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_types.h"
#include "gguf_grids.h"
#include "linear_packed.h"
#include "scratch.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vnni,gfni")
#include "half.inc"
#include "rounded.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "groups_avx2.inc"
#include "packed_values.inc"

namespace exkv {
namespace {

inline __attribute__((always_inline)) Ints AddDot(Words a, Words x, Ints sums) {
  return _mm256_dpwssd_epi32(sums, a, x);
}

// Sixteen floats.
struct Sixteen {
  __m512 all;
};

inline Sixteen MulAdd(Sixteen a, Sixteen b, Sixteen c) {
  return {_mm512_fmadd_ps(a.all, b.all, c.all)};
}
inline Sixteen NegMulAdd(Sixteen a, Sixteen b, Sixteen c) {
  return {_mm512_fnmadd_ps(a.all, b.all, c.all)};
}
inline Sixteen Add(Sixteen a, Sixteen b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Sixteen LoadSixteen(const float* in) { return {_mm512_loadu_ps(in)}; }
inline Sixteen SetSixteen(float x) { return {_mm512_set1_ps(x)}; }
inline Vec PartOf(Sixteen x, int part) {
  if (part == 0) return _mm512_castps512_ps256(x.all);
  return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xff, _mm512_castps_pd(x.all), 1));
}
inline Sixteen OfWords(Words words) { return {_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words))}; }
inline Sixteen OfHalves(Words halves) { return {_mm512_cvtph_ps(halves)}; }

}  // namespace
}  // namespace exkv

#include "trellis_avx2.inc"
// After it:
#include "packed_avx2.inc"
// After that:
#include "packed_k_vnni.inc"
#include "panel_vnni.inc"
// In those vectors:
#include "byte_panels.inc"
// After them:
#include "packed_panels.inc"
#pragma GCC pop_options

namespace exkv {
const PackedKernels kPackedVnni = {InputOf,   InputBytes,        Prepare,
                                   RunWide,   DequantizeVectors, {RoundedBytes, RoundInput},
                                   RunRounded};
}  // namespace exkv
#endif

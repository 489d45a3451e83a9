// linear_packed for processors with AVX2, FMA and F16C.
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
#pragma GCC target("avx2,fma,f16c")
#include "half.inc"
#include "rounded.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "groups_avx2.inc"
#include "packed_values.inc"

namespace exkv {
namespace {

inline __attribute__((always_inline)) Ints AddDot(Words a, Words x, Ints sums) {
  Ints more = _mm256_add_epi32(sums, _mm256_madd_epi16(a, x));
  __asm__(""
          : "+x"(more));  // in this order: else GCC keeps all products, and has no registers left
  return more;
}

// Sixteen floats.
struct Sixteen {
  Vec at[2];
};

inline Sixteen MulAdd(Sixteen a, Sixteen b, Sixteen c) {
  return {MulAdd(a.at[0], b.at[0], c.at[0]), MulAdd(a.at[1], b.at[1], c.at[1])};
}
inline Sixteen NegMulAdd(Sixteen a, Sixteen b, Sixteen c) {
  return {_mm256_fnmadd_ps(a.at[0], b.at[0], c.at[0]), _mm256_fnmadd_ps(a.at[1], b.at[1], c.at[1])};
}
inline Sixteen Add(Sixteen a, Sixteen b) { return {a.at[0] + b.at[0], a.at[1] + b.at[1]}; }
inline Sixteen LoadSixteen(const float* in) { return {Load(in), Load(in + kLanes)}; }
inline Sixteen SetSixteen(float x) { return {Set1(x), Set1(x)}; }
inline Vec PartOf(Sixteen x, int part) { return x.at[part]; }
inline Sixteen OfWords(Words words) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words))),
          _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1)))};
}
inline Sixteen OfHalves(Words halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

}  // namespace
}  // namespace exkv

#include "trellis_avx2.inc"
// After it:
#include "packed_avx2.inc"
#include "panel_avx2.inc"
// In those vectors:
#include "byte_panels.inc"
// After them:
#include "packed_panels.inc"
#pragma GCC pop_options

namespace exkv {
const PackedKernels kPackedAvx2 = {
    InputOf, InputBytes, Prepare, Run, DequantizeVectors, {RoundedBytes, RoundInput}, RunRounded};
}  // namespace exkv
#endif

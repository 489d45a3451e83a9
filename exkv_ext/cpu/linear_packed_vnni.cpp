// linear_packed for processors with AVX-512's dot product of 16-bit integers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "gguf_grids.h"
#include "linear_packed.h"
#include "scratch.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
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

}  // namespace
}  // namespace exkv

#include "packed_avx2.inc"
#pragma GCC pop_options

namespace exkv {
const PackedKernels kPackedVnni = {InputOf, InputBytes, Prepare, Run, Dequantize};
}  // namespace exkv
#endif

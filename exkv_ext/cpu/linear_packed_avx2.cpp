// linear_packed for processors with AVX2, FMA and F16C.
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

}  // namespace
}  // namespace exkv

#include "packed_avx2.inc"
#pragma GCC pop_options

namespace exkv {
const PackedKernels kPackedAvx2 = {InputOf, InputBytes, Prepare, Run, Dequantize};
}  // namespace exkv
#endif

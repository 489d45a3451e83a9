// linear_groups for processors with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_types.h"
#include "linear_groups.h"
#include "scratch.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "half.inc"
#include "rounded.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "groups_avx2.inc"

namespace exkv {
namespace {

constexpr bool kUnrolled = true;
constexpr int kRowsAtOnce = 8;

inline Ints MulAddPairs(Words words, Pair x, Ints sums) {
  Ints more = _mm256_add_epi32(sums, _mm256_madd_epi16(words, x));
  __asm__(""
          : "+x"(more));  // in this order: else GCC keeps all products, and has no registers left
  return more;
}

}  // namespace
}  // namespace exkv

#include "linear_groups.inc"
#include "panel_avx2.inc"
// In those vectors:
#include "byte_panels.inc"
// After them:
#include "groups_panels.inc"
#pragma GCC pop_options

namespace exkv {
const GroupsKernels kGroupsAvx2 = {InputBytes, Prepare, Run, Dequantize, {RoundedBytes, RoundInput},
                                   RunRounded};
}  // namespace exkv
#endif

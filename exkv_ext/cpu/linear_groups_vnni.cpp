// linear_groups for processors with AVX-512's dot product of 16-bit integers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_types.h"
#include "linear_groups.h"
#include "scratch.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
#include "half.inc"
#include "rounded.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "groups_avx2.inc"

namespace exkv {
namespace {

constexpr bool kUnrolled = true;
constexpr int kRowsAtOnce = 4;

inline Ints MulAddPairs(Words words, Pair x, Ints sums) {
  return _mm256_dpwssd_epi32(sums, words, x);
}

}  // namespace
}  // namespace exkv

#include "linear_groups.inc"
#pragma GCC pop_options

namespace exkv {
const GroupsKernels kGroupsVnni = {InputBytes, Prepare, Run, Dequantize};
}  // namespace exkv
#endif

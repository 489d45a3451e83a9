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
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512bw,avx512vnni")
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
#include "panel_vnni.inc"
// In those vectors:
#include "byte_panels.inc"
// After them:
#include "groups_panels.inc"
#pragma GCC pop_options

namespace exkv {
const GroupsKernels kGroupsVnni = {InputBytes, Prepare, Run, Dequantize, {RoundedBytes, RoundInput},
                                   RunRounded};
}  // namespace exkv
#endif

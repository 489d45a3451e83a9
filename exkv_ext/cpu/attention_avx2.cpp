// Attention for processors with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "float_types.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "half.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "attention.inc"
#include "attention_direct.inc"
#include "attention_direct_groups.inc"

namespace exkv {
namespace {

template <typename Act>
auto WithTiles(const AttentionParams& p, const Act& act) {
  return IsDirect(p) ? WithDirect(p, act) : WithFloats(p, act);
}

}  // namespace
}  // namespace exkv

#include "attention_table.inc"
#pragma GCC pop_options

namespace exkv {
const AttentionKernels kAttentionAvx2 = {TokenBytes, AttentionScratch, Attend, Merge};
}  // namespace exkv
#endif

// Attention for processors with AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "float_types.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include "half.inc"
#include "simd_avx512.inc"
// Written in those vectors:
#include "attention.inc"

namespace exkv {
namespace {

template <typename Act>
auto WithTiles(const AttentionParams& p, const Act& act) {
  return WithFloats(p, act);
}

}  // namespace
}  // namespace exkv

#include "attention_table.inc"
#pragma GCC pop_options

namespace exkv {
const AttentionKernels kAttentionAvx512 = {TokenBytes, AttentionScratch, Attend, Merge};
}  // namespace exkv
#endif

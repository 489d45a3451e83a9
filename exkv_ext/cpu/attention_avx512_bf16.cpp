// Attention for processors with AVX-512 BF16, VNNI and VBMI.
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
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx512vbmi")
#include "half.inc"
#include "simd_avx512.inc"
#include "sums_avx512.inc"
// Written in those vectors:
#include "attention.inc"
#include "attention_by_tokens.inc"
// Engines of both kinds:
#include "attention_bf16.inc"
#include "attention_int8.inc"

namespace exkv {
namespace {

inline bool IsBFloat16(const PartStore& store) {
  return store.format == KvFormat::kFloat && store.dtype == FloatType::kBFloat16;
}

inline bool IsBFloat16(const AttentionParams& p) {
  if (p.dtype != FloatType::kBFloat16) return false;
  return p.part == nullptr ? !p.quantized : IsBFloat16(p.part->k) && IsBFloat16(p.part->v);
}

template <typename Act>
auto WithTiles(const AttentionParams& p, const Act& act) {
  if (IsGrouped(p) && p.dtype != FloatType::kFloat32) return WithInt8(p, act);
  if (IsBFloat16(p)) return WithBf16(p, act);
  return WithFloats(p, act);
}

}  // namespace
}  // namespace exkv

#include "attention_table.inc"
#pragma GCC pop_options

namespace exkv {
const AttentionKernels kAttentionAvx512Bf16 = {TokenBytes, AttentionScratch, Attend, Merge};
}  // namespace exkv
#endif

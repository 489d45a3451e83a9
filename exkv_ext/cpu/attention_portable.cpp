// Attention for any processor.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "float_types.h"
#include "half.inc"
#include "simd_portable.inc"
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

namespace exkv {
const AttentionKernels kAttentionPortable = {TokenBytes, AttentionScratch, Attend, Merge};
}  // namespace exkv

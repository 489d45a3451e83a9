// kv_quant for any processor.
#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "half.inc"
#include "kv_quant.h"

namespace exkv {
namespace {

inline void HalfToFloat32(const uint16_t* in, float* out) {
  for (int64_t i = 0; i < kGroup; ++i) out[i] = HalfValue(in[i]);
}

inline void FloatToHalf32(const float* in, uint16_t* out) {
  for (int64_t i = 0; i < kGroup; ++i) out[i] = HalfBits(in[i]);
}

}  // namespace
}  // namespace exkv

#include "kv_quant.inc"
// Written with its pieces:
#include "kv_groups.inc"

namespace exkv {
const KvQuantKernels kKvQuantPortable = {Quantize, Dequantize, Pack, Unpack, Hadamard};
}  // namespace exkv

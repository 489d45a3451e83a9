// kv_quant for processors with AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "kv_quant.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "half.inc"
#include "half_f16c.inc"
#include "kv_quant.inc"
// Written with its pieces:
#include "kv_groups.inc"
#pragma GCC pop_options

namespace exkv {
const KvQuantKernels kKvQuantAvx2 = {Quantize, Dequantize, Pack, Unpack, Hadamard};
}  // namespace exkv
#endif

// kv_quant for processors with AVX-512 F, BW, DQ and VL. Vectors stay 256 bits wide: a group is
// small, and 512-bit loads would wait for the narrower stores that widening int8 ends in.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "kv_quant.h"

#pragma GCC push_options
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=256")
#include "half.inc"
#include "half_f16c.inc"
#include "kv_quant.inc"
// Written with its pieces:
#include "kv_groups.inc"
#pragma GCC pop_options

namespace exkv {
const KvQuantKernels kKvQuantAvx512 = {Quantize, Dequantize, Pack, Unpack, Hadamard};
}  // namespace exkv
#endif

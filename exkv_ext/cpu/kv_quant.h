// kv_quant on the CPU: one table of kernels for each instruction set. The arithmetic is in
// kv_quant.inc and kv_groups.inc, which each instruction set's file compiles once.
#pragma once

#include "../params/kv_quant_params.h"

namespace exkv {

// The kernels work on rows [begin, end).
struct KvQuantKernels {
  void (*quantize)(const QuantizeParams& params, int64_t begin, int64_t end);
  void (*dequantize)(const DequantizeParams& params, int64_t begin, int64_t end);
  void (*pack)(const PackParams& params, int64_t begin, int64_t end);
  void (*unpack)(const UnpackParams& params, int64_t begin, int64_t end);
  // `space` has room for a block.
  void (*hadamard)(const HadamardParams& params, float* space, int64_t begin, int64_t end);
};

// A table is all that such a file exports: an inline function compiled for AVX-512 could
// otherwise be the copy that the linker keeps for everyone.
extern const KvQuantKernels kKvQuantPortable;
#if defined(__x86_64__)
extern const KvQuantKernels kKvQuantAvx2;
extern const KvQuantKernels kKvQuantAvx512;
#endif

}  // namespace exkv

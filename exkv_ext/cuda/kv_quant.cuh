// kv_quant on CUDA: what the bindings call. Free of torch; see ../kv_quant_params.h.
#pragma once

#include "../params/kv_quant_params.h"
#include "launch.cuh"

namespace exkv {

// Both only enqueue work on the stream: they allocate nothing and wait for nothing.
void LaunchQuantize(const QuantizeParams& params, cudaStream_t stream);
void LaunchDequantize(const DequantizeParams& params, cudaStream_t stream);

}  // namespace exkv

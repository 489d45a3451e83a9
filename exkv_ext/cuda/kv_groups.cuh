// Packed values and the Walsh-Hadamard transform on CUDA: what the bindings call. Free of torch;
// see
// ../kv_quant_params.h.
#pragma once

#include "../params/kv_quant_params.h"
#include "launch.cuh"

namespace exkv {

// Of values that are transformed together: what a block of threads holds.
inline constexpr int64_t kMostHadamard = 2048;

// All only enqueue work on the stream: they allocate nothing and wait for nothing.
void LaunchPack(const PackParams& params, cudaStream_t stream);
void LaunchUnpack(const UnpackParams& params, cudaStream_t stream);
void LaunchHadamard(const HadamardParams& params, cudaStream_t stream);

}  // namespace exkv

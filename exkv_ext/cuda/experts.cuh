// Products with chosen experts on CUDA: what the bindings call. Free of torch.
#pragma once

#include "../params/experts_params.h"
#include "launch.cuh"

namespace exkv {

// Inputs are a multiple of 16 bytes, and all tensors begin at one. Only enqueues work.
void LaunchExpertProducts(const ExpertsParams& params, cudaStream_t stream);

}  // namespace exkv

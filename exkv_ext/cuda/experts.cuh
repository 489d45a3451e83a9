// Products with chosen experts on CUDA: what the bindings call. Free of torch.
#pragma once

#include "../params/experts_params.h"
#include "launch.cuh"

namespace exkv {

// Inputs are a multiple of 16 bytes, and all tensors begin at one. Only enqueues work.
void LaunchExpertProducts(const ExpertsParams& params, cudaStream_t stream);

// Finds each pair's matrix and the pairs that it serves, for the kernels of weights of few bits;
// outputs of a pair whose choice is no expert become NaN.
void LaunchFindChosen(const ChoiceParams& params, cudaStream_t stream);

}  // namespace exkv

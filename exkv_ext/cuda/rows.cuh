// Norms, gates and rotary positions on CUDA: what the bindings call. Free of torch; see
// ../cpu/rows.h.
#pragma once

#include "../cpu/rows.h"
#include "launch.cuh"

namespace exkv {

// All only enqueue work on the stream: they allocate nothing and wait for nothing.
void LaunchNorm(const NormParams& params, cudaStream_t stream);
void LaunchSiluMul(const GateParams& params, cudaStream_t stream);
void LaunchGeluMul(const GateParams& params, cudaStream_t stream);
void LaunchRope(const RopeParams& params, cudaStream_t stream);

}  // namespace exkv

// Storing new keys and values on CUDA: what the bindings call. Free of torch; see
// ../append_params.h for the arguments of a kernel.
#pragma once

#include "../params/append_params.h"
#include "launch.cuh"

namespace exkv {

// Values of a head at most: a warp keeps them in shared memory.
inline constexpr int64_t kAppendDim = 2048;

// Only enqueues work on the stream: it allocates nothing and waits for nothing.
void LaunchAppend(const AppendParams& params, cudaStream_t stream);

}  // namespace exkv

// Linear layers of a few rows whose weights are integers in groups, on CUDA: what the bindings
// call. Free of torch; see ../params/groups_params.h.
#pragma once

#include "../cpu/linear_groups.h"
#include "launch.cuh"

namespace exkv {

// x (rows, inputs), contiguous; `input` of the params is not used. Only enqueues work.
void LaunchLinearGroups(const GroupsParams& params, const void* x, cudaStream_t stream);

}  // namespace exkv

// Linear layers of a few rows whose weights are integers in groups, on CUDA: what the bindings
// call. Free of torch; see ../params/groups_params.h.
#pragma once

#include "../cpu/linear_groups.h"
#include "../params/experts_params.h"
#include "launch.cuh"

namespace exkv {

// x (rows, inputs), contiguous, at a multiple of 16 bytes; `input` of the params is not used. Only
// enqueues work.
void LaunchLinearGroups(const GroupsParams& params, const void* x, cudaStream_t stream);

// By tensor cores, which take x of 16 bits; LaunchLinearGroups chooses. Where matrices are chosen
// on the device (experts.cuh), `params` has any one of them.
bool GroupsFitTensorCores(const GroupsParams& params);
void LaunchGroupsOnTensorCores(const GroupsParams& params, const void* x, const ChosenCall& chosen,
                               cudaStream_t stream);

// The same for matrices in sections, whose order begins at a multiple of 16 bytes.
void LaunchLinearSections(const GroupsParams& params, const void* x, cudaStream_t stream);

// Rows [begin, end) of such a matrix in `dtype`, contiguous, inputs in the order of x.
void LaunchDequantizeSections(const GroupsMatrix& matrix, FloatType dtype, int64_t begin,
                              int64_t end, void* out, cudaStream_t stream);

// Rows [begin, end) of the matrix in `dtype`, contiguous; begin is a multiple of kGroupsBlock.
void LaunchDequantizeWeight(const GroupsMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                            void* out, cudaStream_t stream);

}  // namespace exkv

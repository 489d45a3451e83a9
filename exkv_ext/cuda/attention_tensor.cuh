// The decode kernel on tensor cores: what attention.cu asks it.
#pragma once

#include "decode.cuh"

namespace exkv {

inline constexpr int kTensorRows = 4;   // query rows of a tile
inline constexpr int kTensorDim = 128;  // values of a head at most

// Whether it takes a call: queries of 16 bits over keys and values of their type, or of 8 bits,
// whose heads are whole groups of 32 values and begin where these can be loaded at once.
bool FitsTensorCores(const AttentionParams& params);

// Blocks of so many tiles that a multiprocessor of the current device takes at once.
int64_t TensorBlocks(const AttentionParams& params, int64_t tiles);

// Without the merge.
void LaunchOnTensorCores(const DecodeCall& p, const DecodePlan& plan, unsigned rows,
                         cudaStream_t stream);

}  // namespace exkv

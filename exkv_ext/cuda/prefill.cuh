// Attention of many queries over a quantized cache on CUDA: what the bindings call. Free of torch;
// see ../attention_params.h for the arguments of a kernel.
#pragma once

#include "../params/attention_params.h"
#include "attention.cuh"
#include "launch.cuh"

namespace exkv {

// Queries of one head of keys, times the rows of a batch, at most.
inline constexpr int64_t kPrefillRows = int64_t{1} << 30;

// Whether the kernel takes a call of this shape; few queries are better off with the decode kernel.
bool PrefillTakes(const DecodeShape& shape);

// Only enqueues work on the stream: it allocates nothing and waits for nothing. Keys and values are
// stored in any way that the params can say.
void LaunchPrefill(const AttentionParams& params, cudaStream_t stream);

}  // namespace exkv

// Attention of few queries over heads that attention.cu's lanes don't hold: what attention.cu asks.
#pragma once

#include "decode.cuh"

namespace exkv {

// How blocks are made: the query rows of one, and how many a multiprocessor is given at most.
struct WideBlocks {
  int64_t rows;
  int64_t at_once;
};

// For a call on the current device.
WideBlocks WideBlocksFor(const AttentionParams& params);

// Without the merge.
void LaunchWide(const DecodeCall& p, const DecodePlan& plan, unsigned rows, cudaStream_t stream);

}  // namespace exkv

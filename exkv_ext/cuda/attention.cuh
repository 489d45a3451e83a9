// Attention of few queries on CUDA: what the bindings call. Free of torch; see
// ../attention_params.h for the arguments of a kernel.
#pragma once

#include "../params/attention_params.h"
#include "launch.cuh"

namespace exkv {

// How a call is cut: decided on the host, from shapes and the device alone, so that a graph may
// keep it.
struct DecodePlan {
  int64_t tile_rows;     // query rows that a warp works on: 1, 2 or 4; or 8 or 16
  int64_t tiles;         // of a block; each has kDecodeWarps warps
  int64_t row_blocks;    // blocks that the rows of one head of keys take
  int64_t at_once;       // blocks that a multiprocessor is given
  int64_t splits;        // pieces of a row's keys; more than one are merged from `state`
  int64_t state_floats;  // memory that the launch needs
  bool on_tensor_cores;  // or by the kernel that takes all calls
  bool wide;             // by attention_wide.cu's: then tile_rows are a block's
};

inline constexpr int64_t kDecodeWarps = 4;
// A group of heads that is larger is no reason to leave a single query to the reference.
inline constexpr int64_t kDecodeRows = 16;
inline constexpr int64_t kDecodeDim = 256;
// Wider heads, of which many share one of keys (attention_wide.cu): queries of a row, values, and
// blocks of a multiprocessor, at most.
inline constexpr int64_t kWideQueries = 16;
inline constexpr int64_t kWideDim = 576;
inline constexpr int64_t kWideBlocks = 3;
inline constexpr int64_t kMostSplits = 64;
// So many warps keep a multiprocessor busy, where there are registers for them. Of more
// multiprocessors than the second number, some stay idle: it bounds the memory of the states
// (exkv/planning/kernel_uses.py knows it too).
inline constexpr int64_t kWarpsWanted = 16;
inline constexpr int64_t kMostProcessors = 256;

// What decides whether the kernel takes a call.
struct DecodeShape {
  int64_t rows;      // B
  int64_t queries;   // T
  int64_t heads;     // H
  int64_t kv_heads;  // H_kv
  int64_t dim;
  int64_t kv_len;
};

bool DecodeTakes(const DecodeShape& shape);

// For a device of so many multiprocessors, which is the current one.
DecodePlan PlanDecode(const AttentionParams& params, int64_t processors);

// Only enqueues work on the stream: it allocates nothing and waits for nothing. `state` has room
// for plan.state_floats, and is not read before it is written.
void LaunchDecode(const AttentionParams& params, const DecodePlan& plan, float* state,
                  cudaStream_t stream);

}  // namespace exkv

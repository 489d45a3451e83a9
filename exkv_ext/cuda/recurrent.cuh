// Layers with a state on CUDA: what the bindings call. Free of torch; see ../cpu/rows.h.
#pragma once

#include "../cpu/rows.h"
#include "../params/conv_params.h"
#include "launch.cuh"

namespace exkv {

inline constexpr int64_t kMostStateRows = 256;  // of a head's state: D_k, or N
inline constexpr int kMostScanStates = 64;      // of a channel's: N

// All only enqueue work on the stream: they allocate nothing and wait for nothing.
void LaunchConv(const ConvParams& params, cudaStream_t stream);
void LaunchDelta(const DeltaParams& params, cudaStream_t stream);  // up to kMostStateRows
void LaunchSsd(const SsdParams& params, cudaStream_t stream);      // likewise
void LaunchScan(const ScanParams& params, cudaStream_t stream);    // up to kMostScanStates

}  // namespace exkv

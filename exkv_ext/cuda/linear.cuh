// Linear layers for few rows on CUDA: what the bindings call. Free of torch; see ../cpu/linear.h.
#pragma once

#include <vector>

#include "../cpu/linear.h"
#include "launch.cuh"

namespace exkv {

// More rows than this are torch's own, on tensor cores.
inline constexpr int64_t kMostLinearRows = 4;

inline int64_t MostLinearRows(FloatType) { return kMostLinearRows; }

// Multiplies one x by several weights. Only enqueues work on the stream.
void LaunchLinear(const std::vector<LinearParams>& layers, int64_t processors, cudaStream_t stream);

}  // namespace exkv

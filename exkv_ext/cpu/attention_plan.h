// Cuts one attention call into items for threads, and runs them.
//
// Few queries: a row's keys are cut into ranges whose states are merged at the end, so that one
// long sequence occupies every thread, and each range is read in the order in which it lies in
// memory. Many queries: heads and blocks of queries are the items, each over all of its keys. The
// cut depends on shapes only, so that results are the same bits whatever the threads do.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention.h"

namespace exkv {

// Calls its argument with ranges of [0, n), on several threads or on one.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)>&)>;

void RunAttention(const AttentionKernels& kernels, const AttentionParams& params,
                  const ParallelFor& parallel_for);

}  // namespace exkv

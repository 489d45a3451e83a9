// Cuts one attention call into items for threads, and runs them.
//
// Few queries: a row's keys are cut into ranges whose states are merged at the end, so that one
// long sequence occupies every thread, and each range is read in the order in which it lies in
// memory. Many queries: heads and blocks of queries are the items, each over all of its keys. The
// cut depends on shapes only, so that results are the same bits whatever the threads do.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention.h"

namespace exkv {

// A call cut into items, for whoever has threads: each item is run once, by any thread, and the
// call is done when all of them are. The params and the kernels must outlive it.
class AttentionCall {
 public:
  AttentionCall(const AttentionKernels& kernels, const AttentionParams& params);

  int64_t items() const { return static_cast<int64_t>(items_.size()); }

  // Floats that the states of split rows need, aligned to 64 bytes, in all; perhaps none.
  int64_t state_floats() const;
  void GiveStates(float* memory);

  // `then` is the item that this thread runs next, or one that isn't there.
  void Run(int64_t item, int64_t then);

 private:
  void PlanDecode();
  void PlanPrefill();
  void Finished(int64_t item);
  int64_t Count(size_t run) const { return runs_[run + 1] - runs_[run]; }

  const AttentionKernels& kernels_;
  const AttentionParams& p_;
  std::vector<AttentionItem> items_;
  std::vector<int64_t> runs_;  // first item of each run that differs in keys only, and the end
  bool split_ = false;
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // items of each run that aren't finished
};

// Calls its argument with ranges of [0, n), on several threads or on one.
using ParallelFor =
    std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)>&)>;

void RunAttention(const AttentionKernels& kernels, const AttentionParams& params,
                  const ParallelFor& parallel_for);

}  // namespace exkv

#include "attention_plan.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace exkv {
namespace {

// Up to so many queries a row, ranges of keys are the items.
constexpr int64_t kDecodeQueries = 16;
// A range of keys shorter than this isn't worth a merge.
constexpr int64_t kShortestSplit = 64;
constexpr int64_t kUsualSplit = 512;
// Query rows over all states of a call with splits: bounds the memory of the states.
constexpr int64_t kMostStateRows = 8192;
// Query rows of an item where there are many: enough to make up for packing a tile.
constexpr int64_t kPrefillRows = 128;

// Memory of one thread for its calls to come, aligned to 64 bytes, without contents to keep.
class Scratch {
 public:
  float* Get(int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<float*>(
          ::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<float, Delete> memory_;
  int64_t size_ = 0;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Keys that queries [begin, end) of a row see between them: later queries never see earlier ends.
KeyRange UnionOfKeys(const AttentionParams& p, int64_t row, int64_t begin, int64_t end) {
  return {VisibleKeys(p, row, begin).begin, VisibleKeys(p, row, end - 1).end};
}

// Keys of a split; a multiple of the kernels' tiles.
int64_t SplitLength(const AttentionParams& p) {
  const int64_t rows = p.length * p.heads;
  const int64_t most =
      std::max<int64_t>(1, std::min(kMaxSplits / p.rows, kMostStateRows / (p.rows * rows)));
  int64_t keys = std::min(p.kv_len, p.window > 0 ? p.window + p.length : p.kv_len);
  // Long contexts in usual lengths, short ones in eight pieces.
  keys = std::max(std::min(CeilDiv(keys, 8), kUsualSplit), CeilDiv(keys, most));
  return CeilDiv(std::max<int64_t>(keys, 1), kShortestSplit) * kShortestSplit;
}

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<int64_t> merges;  // first item of each run that differs in keys only; and the end
  bool split = false;
};

Plan PlanDecode(const AttentionParams& p) {
  Plan plan;
  const int64_t step = SplitLength(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    const KeyRange keys = UnionOfKeys(p, row, 0, p.length);
    plan.merges.push_back(static_cast<int64_t>(plan.items.size()));
    for (int64_t begin = keys.begin; begin < keys.end; begin += step) {
      const int64_t end = std::min(begin + step, keys.end);
      plan.items.push_back({row, 0, p.kv_heads, 0, p.length, begin, end, nullptr});
    }
    plan.split |= static_cast<int64_t>(plan.items.size()) - plan.merges.back() > 1;
  }
  plan.merges.push_back(static_cast<int64_t>(plan.items.size()));
  return plan;
}

Plan PlanPrefill(const AttentionParams& p) {
  Plan plan;
  const int64_t step = std::max<int64_t>(1, kPrefillRows / (p.heads / p.kv_heads));
  // The last queries see most keys; what takes longest goes first.
  for (int64_t end = p.length; end > 0; end -= std::min(step, end)) {
    const int64_t begin = std::max<int64_t>(0, end - step);
    for (int64_t row = 0; row < p.rows; ++row) {
      const KeyRange keys = UnionOfKeys(p, row, begin, end);
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        plan.items.push_back({row, head, head + 1, begin, end, keys.begin, keys.end, nullptr});
      }
    }
  }
  return plan;
}

void GiveStates(const AttentionParams& p, Plan* plan) {
  thread_local Scratch states;
  const int64_t floats = StateFloats(p, plan->items[0].QueryRows(p));
  float* memory = states.Get(floats * static_cast<int64_t>(plan->items.size()));
  for (AttentionItem& item : plan->items) {
    item.state = memory;
    memory += floats;
  }
}

void MergeAll(const AttentionKernels& kernels, const AttentionParams& p, const Plan& plan,
              const ParallelFor& parallel_for) {
  const int64_t rows = p.length * p.heads;
  parallel_for(p.rows * rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin / rows; row * rows < end; ++row) {
      const int64_t first = plan.merges[row];
      kernels.merge(p, &plan.items[first], plan.merges[row + 1] - first,
                    std::max<int64_t>(begin - row * rows, 0), std::min(end - row * rows, rows));
    }
  });
}

}  // namespace

void RunAttention(const AttentionKernels& kernels, const AttentionParams& p,
                  const ParallelFor& parallel_for) {
  Plan plan = p.length <= kDecodeQueries ? PlanDecode(p) : PlanPrefill(p);
  if (plan.split) GiveStates(p, &plan);
  const int64_t count = static_cast<int64_t>(plan.items.size());
  // Whoever is free takes the next one: a thread that is held up by others keeps nobody waiting.
  std::atomic<int64_t> next{0};
  parallel_for(count, [&](int64_t, int64_t) {
    thread_local Scratch scratch;
    for (int64_t i = next++; i < count;) {
      const AttentionItem& item = plan.items[i];
      i = next++;
      const AttentionItem* then = i < count ? &plan.items[i] : nullptr;
      kernels.attend(p, item, then, scratch.Get(kernels.scratch_floats(p, item)));
    }
  });
  if (plan.split) MergeAll(kernels, p, plan, parallel_for);
}

}  // namespace exkv

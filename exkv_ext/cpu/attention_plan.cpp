#include "attention_plan.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <vector>

namespace exkv {
namespace {

// Up to so many queries a row, ranges of keys are the items.
constexpr int64_t kDecodeQueries = 16;
// A range of keys shorter than this isn't worth a merge.
constexpr int64_t kShortestSplit = 64;
constexpr int64_t kUsualSplit = 512;
// Keys and values of a tile of tokens, all heads that are worked on side by side. Two such tiles,
// this one and the one that is asked for, must leave room in the second cache.
constexpr int64_t kTileBytes = 128 << 10;
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

// Whether the queries of several rows stand in one.
bool Joined(const AttentionParams& p) {
  return p.part != nullptr && p.part->row_queries != p.length;
}

// The same for queries of rows that were joined: no order can be relied on.
KeyRange UnionOfJoined(const AttentionParams& p, int64_t row, int64_t begin, int64_t end) {
  KeyRange all{p.kv_len, 0};
  for (int64_t query = begin; query < end; ++query) {
    const KeyRange keys = VisibleKeys(p, row, query);
    if (keys.begin == keys.end) continue;
    all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
  }
  return all;
}

// Keys that queries [begin, end) of a row see between them: later queries never see earlier ends.
KeyRange UnionOfKeys(const AttentionParams& p, int64_t row, int64_t begin, int64_t end) {
  if (Joined(p)) return UnionOfJoined(p, row, begin, end);
  return {VisibleKeys(p, row, begin).begin, VisibleKeys(p, row, end - 1).end};
}

// Keys of a split; a multiple of the kernels' tiles.
int64_t SplitLength(const AttentionParams& p) {
  const int64_t rows = p.length * p.heads;
  const int64_t most =
      std::max<int64_t>(1, std::min(kMaxSplits / p.rows, kMostStateRows / (p.rows * rows)));
  const bool near = p.window > 0 && !Joined(p);
  int64_t keys = std::min(p.kv_len, near ? p.window + p.length : p.kv_len);
  // Long contexts in usual lengths, short ones in eight pieces.
  keys = std::max(std::min(CeilDiv(keys, 8), kUsualSplit), CeilDiv(keys, most));
  return CeilDiv(std::max<int64_t>(keys, 1), kShortestSplit) * kShortestSplit;
}

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<int64_t> runs;  // first item of each run that differs in keys only, and the end
  bool split = false;
};

// Bytes of one head's key and value.
int64_t HeadBytes(const AttentionParams& p) {
  if (p.part != nullptr) {
    const PartParams& part = *p.part;
    return part.k.items * part.k.item_bytes + part.v.items * part.v.item_bytes;
  }
  return 2 * p.dim * (p.quantized ? 1 : p.dtype == FloatType::kFloat32 ? 4 : 2);
}

// Heads of keys that are worked on side by side.
int64_t HeadsTogether(const AttentionParams& p) {
  const int64_t head = kShortestSplit * HeadBytes(p);
  const int64_t most = std::max<int64_t>(1, kTileBytes / head);
  return CeilDiv(p.kv_heads, CeilDiv(p.kv_heads, most));  // all blocks alike
}

Plan PlanDecode(const AttentionParams& p) {
  Plan plan;
  const int64_t step = SplitLength(p);
  const int64_t heads = HeadsTogether(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    const KeyRange keys = UnionOfKeys(p, row, 0, p.length);
    for (int64_t head = 0; head < p.kv_heads; head += heads) {
      const int64_t head_end = std::min(head + heads, p.kv_heads);
      plan.runs.push_back(static_cast<int64_t>(plan.items.size()));
      int64_t begin = keys.begin;
      do {  // once even where nothing is seen, since something must write that to the output
        const int64_t end = std::min(begin + step, std::max(begin, keys.end));
        plan.items.push_back({row, head, head_end, 0, p.length, begin, end, nullptr});
        begin += step;
      } while (begin < keys.end);
      plan.split |= static_cast<int64_t>(plan.items.size()) - plan.runs.back() > 1;
    }
  }
  plan.runs.push_back(static_cast<int64_t>(plan.items.size()));
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

// Counts each run's finished items down; whoever finishes the last one merges them.
class Merges {
 public:
  Merges(const AttentionKernels& kernels, const AttentionParams& p, const Plan& plan)
      : kernels_(kernels), p_(p), plan_(plan), left_(new std::atomic<int64_t>[plan.runs.size()]) {
    for (size_t run = 0; run + 1 < plan.runs.size(); ++run) left_[run] = Count(run);
  }

  void Finished(int64_t item) {
    const auto after = std::upper_bound(plan_.runs.begin(), plan_.runs.end(), item);
    const size_t run = static_cast<size_t>(after - plan_.runs.begin()) - 1;
    if (--left_[run] > 0) return;
    kernels_.merge(p_, &plan_.items[plan_.runs[run]], Count(run));
  }

 private:
  int64_t Count(size_t run) const { return plan_.runs[run + 1] - plan_.runs[run]; }

  const AttentionKernels& kernels_;
  const AttentionParams& p_;
  const Plan& plan_;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
};

}  // namespace

void RunAttention(const AttentionKernels& kernels, const AttentionParams& p,
                  const ParallelFor& parallel_for) {
  Plan plan = p.length <= kDecodeQueries ? PlanDecode(p) : PlanPrefill(p);
  std::optional<Merges> merges;
  if (plan.split) {
    GiveStates(p, &plan);
    merges.emplace(kernels, p, plan);
  }
  const int64_t count = static_cast<int64_t>(plan.items.size());
  // Whoever is free takes the next one: a thread that is held up by others keeps nobody waiting.
  std::atomic<int64_t> next{0};
  parallel_for(count, [&](int64_t, int64_t) {
    thread_local Scratch scratch;
    for (int64_t i = next++, then; i < count; i = then) {
      then = next++;
      const AttentionItem& item = plan.items[i];
      const AttentionItem* ahead = then < count ? &plan.items[then] : nullptr;
      kernels.attend(p, item, ahead, scratch.Get(kernels.scratch_floats(p, item)));
      if (merges.has_value()) merges->Finished(i);
    }
  });
}

}  // namespace exkv

#include "attention_plan.h"

#include <algorithm>

#include "scratch.h"

namespace exkv {
namespace {

// Up to so many queries a row, ranges of keys are the items.
constexpr int64_t kDecodeQueries = 16;
// A range of keys shorter than this isn't worth a merge.
constexpr int64_t kShortestSplit = 64;
constexpr int64_t kUsualSplit = 512;
// Query rows over all states of a row with splits: bounds the memory of the states.
constexpr int64_t kMostStateRows = 2048;
// Query rows of an item where there are many: enough to make up for packing a tile.
constexpr int64_t kPrefillRows = 128;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether the queries of several rows are joined in one.
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

// Keys of a split of a row whose queries see so many; a multiple of the kernels' tiles. It depends
// on nothing else of the call: a row's result is the same bits whatever rows are beside it.
int64_t SplitLength(const AttentionParams& p, int64_t keys) {
  const int64_t rows = p.length * p.heads;
  const int64_t most = std::max<int64_t>(1, std::min(kMaxSplits, kMostStateRows / rows));
  // Long contexts in usual lengths, short ones in eight pieces.
  keys = std::max(std::min(CeilDiv(keys, 8), kUsualSplit), CeilDiv(keys, most));
  return CeilDiv(std::max<int64_t>(keys, 1), kShortestSplit) * kShortestSplit;
}

// Bytes of one head's key and value.
int64_t HeadBytes(const AttentionParams& p) {
  if (p.part != nullptr) {
    const PartParams& part = *p.part;
    return part.k.items * part.k.item_bytes + part.v.items * part.v.item_bytes;
  }
  return 2 * p.dim * (p.quantized ? 1 : p.dtype == FloatType::kFloat32 ? 4 : 2);
}

// Heads of keys that are worked on side by side.
int64_t HeadsTogether(const AttentionKernels& kernels, const AttentionParams& p) {
  const int64_t most = std::max<int64_t>(1, kernels.token_bytes(p) / HeadBytes(p));
  return CeilDiv(p.kv_heads, CeilDiv(p.kv_heads, most));  // all blocks alike
}

}  // namespace

AttentionCall::AttentionCall(const AttentionKernels& kernels, const AttentionParams& params)
    : kernels_(kernels), p_(params) {
  if (p_.length <= kDecodeQueries) {
    PlanDecode();
  } else {
    PlanPrefill();
  }
  if (!split_) return;
  left_.reset(new std::atomic<int64_t>[runs_.size()]);
  for (size_t run = 0; run + 1 < runs_.size(); ++run) left_[run] = Count(run);
}

void AttentionCall::PlanDecode() {
  const int64_t heads = HeadsTogether(kernels_, p_);
  for (int64_t row = 0; row < p_.rows; ++row) {
    const KeyRange keys = UnionOfKeys(p_, row, 0, p_.length);
    const int64_t step = SplitLength(p_, std::max<int64_t>(keys.end - keys.begin, 0));
    for (int64_t head = 0; head < p_.kv_heads; head += heads) {
      const int64_t head_end = std::min(head + heads, p_.kv_heads);
      runs_.push_back(items());
      int64_t begin = keys.begin;
      do {  // once even where nothing is seen, since something must write that to the output
        const int64_t end = std::min(begin + step, std::max(begin, keys.end));
        items_.push_back({row, head, head_end, 0, p_.length, begin, end, nullptr});
        begin += step;
      } while (begin < keys.end);
      split_ |= items() - runs_.back() > 1;
    }
  }
  runs_.push_back(items());
}

void AttentionCall::PlanPrefill() {
  const int64_t step = std::max<int64_t>(1, kPrefillRows / (p_.heads / p_.kv_heads));
  // The last queries see most keys; what takes longest goes first.
  for (int64_t end = p_.length; end > 0; end -= std::min(step, end)) {
    const int64_t begin = std::max<int64_t>(0, end - step);
    for (int64_t row = 0; row < p_.rows; ++row) {
      const KeyRange keys = UnionOfKeys(p_, row, begin, end);
      for (int64_t head = 0; head < p_.kv_heads; ++head) {
        items_.push_back({row, head, head + 1, begin, end, keys.begin, keys.end, nullptr});
      }
    }
  }
}

int64_t AttentionCall::state_floats() const {
  return split_ ? StateFloats(p_, items_[0].QueryRows(p_)) * items() : 0;
}

void AttentionCall::GiveStates(float* memory) {
  if (!split_) return;
  const int64_t floats = StateFloats(p_, items_[0].QueryRows(p_));
  for (AttentionItem& item : items_) {
    item.state = memory;
    memory += floats;
  }
}

void AttentionCall::Run(int64_t item, int64_t then) {
  thread_local Scratch scratch;
  const AttentionItem* ahead = then < items() ? &items_[then] : nullptr;
  float* space = scratch.Get(kernels_.scratch_floats(p_, items_[item]));
  kernels_.attend(p_, items_[item], ahead, space);
  if (split_) Finished(item);
}

// Whoever finishes a run's last item merges them.
void AttentionCall::Finished(int64_t item) {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), item);
  const size_t run = static_cast<size_t>(after - runs_.begin()) - 1;
  if (--left_[run] == 0) kernels_.merge(p_, &items_[runs_[run]], Count(run));
}

void RunAttention(const AttentionKernels& kernels, const AttentionParams& p,
                  const ParallelFor& parallel_for) {
  thread_local Scratch states;
  AttentionCall call(kernels, p);
  call.GiveStates(states.Get(call.state_floats()));
  // Whoever is free takes the next one: a thread that is held up by others keeps nobody waiting.
  std::atomic<int64_t> next{0};
  parallel_for(call.items(), [&](int64_t, int64_t) {
    for (int64_t i = next++, then; i < call.items(); i = then) {
      then = next++;
      call.Run(i, then);
    }
  });
}

}  // namespace exkv

// Attention on the CPU: one table of kernels for each instruction set (attention.inc, and with
// dot products attention_bf16.inc and attention_int8.inc); attention_plan.h cuts a call into items.
#pragma once

#include <cstdint>

#include "../params/attention_params.h"

namespace exkv {

// What one thread does at a time: some queries of one row over a range of keys, for some of the
// heads of keys. With `state`, what it found goes there, to be merged with other ranges of keys;
// else it is normalised and written to the output.
struct AttentionItem {
  int64_t row;
  int64_t head_begin;  // heads of keys
  int64_t head_end;
  int64_t query_begin;
  int64_t query_end;
  int64_t key_begin;
  int64_t key_end;
  float* state;

  int64_t QueryRows(const AttentionParams& p) const {
    return (head_end - head_begin) * (query_end - query_begin) * (p.heads / p.kv_heads);
  }
};

constexpr int64_t kMaxSplits = 64;  // items that one merge takes

struct AttentionKernels {
  // Bytes of a token's keys and values that are best worked on together in decode-sized calls: the
  // next ones are prefetched, and all of them must stay in the L2 cache.
  int64_t (*token_bytes)(const AttentionParams& params);
  // Floats that `attend` needs for such an item.
  int64_t (*scratch_floats)(const AttentionParams& params, const AttentionItem& item);
  // Both float pointers are aligned to 64 bytes. `next`, or null, is what this thread does next:
  // its first keys are prefetched.
  void (*attend)(const AttentionParams& params, const AttentionItem& item,
                 const AttentionItem* next, float* scratch);
  // Merges the states of `count` items that differ in their keys only into the output.
  void (*merge)(const AttentionParams& params, const AttentionItem* items, int64_t count);
};

// Values that a query's row of a state has room for, beside its maximum and sum: D in whole
// vectors, of whatever width.
inline int64_t StateDim(int64_t dim) { return (dim + 31) / 32 * 32; }

inline int64_t StateFloats(const AttentionParams& p, int64_t query_rows) {
  return (query_rows * (StateDim(p.dim) + 2) + 15) / 16 * 16;
}

extern const AttentionKernels kAttentionPortable;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;
extern const AttentionKernels kAttentionAvx512Bf16;
#endif

}  // namespace exkv

// What an attention kernel is told, on any device. Free of torch, so that kernels stay so too.
// What is computed: exkv/ops/attention.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

// A tensor (rows, tokens, heads, n) whose last dimension is contiguous; strides in elements.
struct TokenView {
  const void* data;
  int64_t row;
  int64_t token;
  int64_t head;
};

struct AttentionParams {
  FloatType dtype;   // of q and out, and of k and v unless they are quantized
  bool quantized;    // k and v are int8, with scales
  int64_t rows;      // B
  int64_t length;    // T, queries of a row
  int64_t heads;     // H, a multiple of kv_heads
  int64_t kv_heads;  // H_kv
  int64_t dim;       // D
  int64_t kv_len;    // keys of the longest row
  TokenView q;       // (B, T, H, D)
  TokenView k;       // (B, S, H_kv, D)
  TokenView v;
  TokenView k_scale;         // (B, S, H_kv, ceil(D / kGroup)) float16, where quantized
  TokenView v_scale;         //
  const int32_t* past_lens;  // (B,), or null: kv_len - length in every row
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  void* out;       // (B, T, H, D) contiguous

  int64_t Past(int64_t row) const {
    return past_lens == nullptr ? kv_len - length : past_lens[row];
  }
};

// The keys [begin, end) that a query sees; never empty.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

inline KeyRange VisibleKeys(const AttentionParams& p, int64_t row, int64_t query) {
  const int64_t position = p.Past(row) + query;
  // Padding would stand behind the last key, perhaps by more than a window.
  const int64_t last = position < p.kv_len - 1 ? position : p.kv_len - 1;
  const int64_t first = p.window > 0 ? last - p.window + 1 : 0;
  return {first > 0 ? first : 0, last + 1};
}

}  // namespace exkv

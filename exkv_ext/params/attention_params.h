// The arguments of attention kernels, on any device. Free of torch, so that kernels stay so too.
// What is computed: exkv/ops/attention.py.
#pragma once

#include <cstdint>

#include "kv_formats.h"
#include "kv_quant_params.h"

namespace exkv {

// A tensor (rows, tokens, heads, n) whose last dimension is contiguous; strides in elements.
struct TokenView {
  const void* data;
  int64_t row;
  int64_t token;
  int64_t head;
};

// How keys or values of a part are stored.
struct PartStore {
  KvFormat format;
  FloatType dtype;     // of floats
  int64_t items;       // of one head of one token: D, or the bytes that it is packed in
  int64_t item_bytes;  //
  TokenView offset;    // float16 beside the scale, where packed
};

// What exkv::attention_part knows beyond the other ops (exkv/ops/attention_parts.py). Where all
// rows share the keys, the rows' queries follow each other in one row.
struct PartParams {
  PartStore k;
  PartStore v;
  const int32_t* key_start;  // a number for each row of the batch, as past_lens
  const int32_t* key_count;
  int64_t row_queries;  // of one row of the batch
  float* lse;           // (B, T, H) contiguous; on the host null where nobody asks for it
  // Null, or (B, table_row): then the rows of k and v are pages of `page` tokens, and token j of
  // row b is token j % page of page block_table[b, j / page].
  const int32_t* block_table;
  int64_t table_row;
  int64_t page;
  int64_t pages;  // that there are: an entry that names no page of them is not followed
};

// Tokens that follow each other in memory wherever pages begin: a page is a multiple of them.
inline constexpr int64_t kPageStep = 16;

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
  // Null in the other ops; in attention_part `quantized` says nothing, and `out` is float32.
  const PartParams* part;
  // Null, or (B,): row b reads row store_rows[b] of k and v, which several may read.
  const int32_t* store_rows;

  int64_t Past(int64_t row) const {
    return past_lens == nullptr ? kv_len - length : past_lens[row];
  }
};

inline int64_t StoreRow(const int32_t* store_rows, int64_t row) {
  return store_rows == nullptr ? row : store_rows[row];
}

// The keys [begin, end) that a query sees; empty in a part only, begin and end are equal then.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

inline KeyRange VisibleInPart(const AttentionParams& p, int64_t row, int64_t query) {
  const PartParams& part = *p.part;
  const int64_t batch_row = row + query / part.row_queries;
  // Relative to the part's first key.
  const int64_t position =
      int64_t{p.past_lens[batch_row]} + query % part.row_queries - part.key_start[batch_row];
  int64_t end = part.key_count[batch_row] < p.kv_len ? part.key_count[batch_row] : p.kv_len;
  if (position + 1 < end) end = position + 1;
  if (end < 0) end = 0;
  int64_t begin = p.window > 0 ? position - p.window + 1 : 0;
  if (begin < 0) begin = 0;
  return {begin < end ? begin : end, end};
}

inline KeyRange VisibleKeys(const AttentionParams& p, int64_t row, int64_t query) {
  if (p.part != nullptr) return VisibleInPart(p, row, query);
  const int64_t position = p.Past(row) + query;
  // Padding would come after the last key, perhaps by more than a window.
  const int64_t last = position < p.kv_len - 1 ? position : p.kv_len - 1;
  const int64_t first = p.window > 0 ? last - p.window + 1 : 0;
  return {first > 0 ? first : 0, last + 1};
}

}  // namespace exkv

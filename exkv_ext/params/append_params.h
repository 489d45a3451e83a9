// The arguments of kernels that store new keys and values, on any device. Free of torch, so that
// kernels stay so too. What is computed: exkv/ops/append_kv.py.
#pragma once

#include <cstdint>

#include "attention_params.h"

namespace exkv {

// Keys or values: what is given, and the store that takes them.
struct AppendSide {
  TokenView x;  // (B, T, H_kv, D)
  KvFormat format;
  int64_t items;     // of one head of one token in the store: D, or the bytes it is packed in
  TokenView values;  // (rows or pages, tokens, H_kv, items)
  TokenView scale;   // float16 (..., groups), where the format has them
  TokenView offset;  //
};

struct AppendParams {
  FloatType dtype;  // of what is given, of floats in a store, and of cos and sin
  int64_t rows;     // B
  int64_t length;   // T
  int64_t heads;    // H_kv
  int64_t dim;      // D
  int64_t width;    // R, even: features of a key that are rotated; 0 for none
  TokenView cos;    // (B, T, 1, R)
  TokenView sin;
  int64_t block;               // of the Walsh-Hadamard transform; 0 where heads aren't transformed
  float factor;                // block^-1/2
  const int32_t* past_lens;    // (B,)
  const int32_t* new_lens;     // (B,), or null: T in every row
  const int32_t* block_table;  // null, or (B, table_row): then rows of the stores are pages
  int64_t table_row;
  int64_t page;  // tokens of one
  int64_t pages;
  int64_t ring;  // 0: none
  int64_t room;  // places of a row
  AppendSide sides[2];
  const int32_t* store_rows;  // as of AttentionParams; not where rows are pages
};

// The tokens [begin, end) of a row that are written.
struct AppendedTokens {
  int64_t begin;
  int64_t end;
};

inline AppendedTokens TokensWritten(const AppendParams& p, int64_t row) {
  int64_t end = p.length;
  if (p.new_lens != nullptr && p.new_lens[row] < end) end = p.new_lens[row];
  return {p.ring > 0 && end > p.ring ? end - p.ring : 0, end};
}

// A token's place in its row.
inline int64_t PlaceInRow(const AppendParams& p, int64_t row, int64_t token) {
  const int64_t place = p.past_lens[row] + token;
  return p.ring > 0 ? place % p.ring : place;
}

}  // namespace exkv

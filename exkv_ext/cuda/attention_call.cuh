// The arguments of the attention kernels, passed by value, and what these share: which keys a row
// of queries sees, where its results go, and how tensors become stores that threads walk along.
#pragma once

#include "../params/attention_params.h"
#include "kv_fragment.cuh"

namespace exkv {

struct AttentionCall {
  FloatType out_type;
  int length;       // T, or all rows' queries where they share one row of keys
  int row_queries;  // of one row of the batch
  int heads;
  int kv_heads;
  int dim;
  int kv_len;
  int rows;  // query rows of one head of keys: length * heads / kv_heads
  int window;
  float scale;
  float softcap;
  bool part;  // queries may see no key at all, and the log-sum-exp is wanted
  Store q;
  Store k;
  Store v;
  const int32_t* past_lens;    // null: kv_len - length everywhere
  const int32_t* key_start;    // null: 0
  const int32_t* key_count;    // null: kv_len
  const int32_t* block_table;  // null, or (B, table_row): then rows of k and v are pages
  int64_t table_row;
  int page;  // tokens of one
  int pages;
  void* out;
  float* lse;
};

// Keys that a row sees.
struct Range {
  int begin;
  int end;
};

// As VisibleKeys and VisibleInPart in ../attention_params.h.
__device__ inline Range VisibleTo(const AttentionCall& p, int row, int query) {
  const int batch_row = row + query / p.row_queries;
  const int past = p.past_lens == nullptr ? p.kv_len - p.length : p.past_lens[batch_row];
  int position = past + query % p.row_queries;
  int count = p.kv_len;
  if (p.part) {
    position -= p.key_start[batch_row];
    count = min(count, p.key_count[batch_row]);
  } else {
    position = min(position, p.kv_len - 1);  // padding
  }
  const int end = max(0, min(count, position + 1));
  const int begin = p.window > 0 ? max(0, position - p.window + 1) : 0;
  return {min(begin, end), end};
}

// The page that an entry of the block table names, or -1: the host doesn't look at tables on a
// device. What such a page holds is NaN (kv_fragment.cuh), which shows in the logits.
__device__ __forceinline__ int PageAt(const AttentionCall& p, const int32_t* entry) {
  const int page = *entry;
  return page >= 0 && page < p.pages ? page : -1;
}

// A score that was never higher than -inf stands for a sum without terms.
__device__ __forceinline__ float Base(float peak) { return peak == -INFINITY ? 0 : peak; }

// Where a row of queries is in the output: its first value is this times D.
__device__ inline int64_t OutRow(const AttentionCall& p, int row, int head, int at) {
  const int group = p.heads / p.kv_heads;
  return (static_cast<int64_t>(row) * p.length + at / group) * p.heads + head * group + at % group;
}

__device__ inline void SetFloat(void* data, FloatType type, int64_t at, float value) {
  switch (type) {
    case FloatType::kFloat32:
      static_cast<float*>(data)[at] = value;
      break;
    case FloatType::kFloat16:
      static_cast<__half*>(data)[at] = __float2half_rn(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
  }
}

// The host's side ------------------------------------------------------------------------------

inline Kind KindOf(KvFormat format, FloatType dtype) {
  switch (format) {
    case KvFormat::kFloat:
      return dtype == FloatType::kFloat32   ? Kind::kFloat32
             : dtype == FloatType::kFloat16 ? Kind::kFloat16
                                            : Kind::kBFloat16;
    case KvFormat::kInt8:
      return Kind::kInt8;
    case KvFormat::kInt4:
      return Kind::kInt4;
    case KvFormat::kInt2:
      return Kind::kInt2;
    case KvFormat::kInt4Channel:
      return Kind::kInt4Channel;
    default:
      return Kind::kInt2Channel;
  }
}

// Whether fragments that begin at multiples of eight values can be loaded at once.
inline bool FragmentsAligned(const Plane& plane, Kind kind) {
  const int64_t bytes = BitsOfKind(kind) < 16 ? BitsOfKind(kind) : 16;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(plane.data));
  return (address | plane.row | plane.token | plane.head) % bytes == 0;
}

inline Plane PlaneOf(const TokenView& view, int64_t item) {
  return {static_cast<const unsigned char*>(view.data), view.row * item, view.token * item,
          view.head * item};
}

inline Store StoreOf(const PartStore& part, const TokenView& values, const TokenView& scale) {
  const Kind kind = KindOf(part.format, part.dtype);
  const int64_t half = sizeof(uint16_t), item = BitsOfKind(kind) < 8 ? 1 : BitsOfKind(kind) / 8;
  const Plane plane = PlaneOf(values, item);
  return {kind, FragmentsAligned(plane, kind), plane, PlaneOf(scale, half),
          PlaneOf(part.offset, half)};
}

// Of one format, without offsets.
inline PartStore PlainStore(KvFormat format, FloatType dtype) {
  PartStore store{};
  store.format = format;
  store.dtype = dtype;
  return store;
}

inline AttentionCall CallOf(const AttentionParams& params) {
  constexpr int64_t kMostWindow = int64_t{1} << 30;
  AttentionCall p{};
  p.out_type = params.dtype;
  p.length = static_cast<int>(params.length);
  p.row_queries = p.length;
  p.heads = static_cast<int>(params.heads);
  p.kv_heads = static_cast<int>(params.kv_heads);
  p.dim = static_cast<int>(params.dim);
  p.kv_len = static_cast<int>(params.kv_len);
  p.rows = p.length * (p.heads / p.kv_heads);
  p.window = static_cast<int>(params.window < kMostWindow ? params.window : kMostWindow);
  p.scale = params.scale;
  p.softcap = params.softcap;
  p.past_lens = params.past_lens;
  p.out = params.out;
  p.q = StoreOf(PlainStore(KvFormat::kFloat, params.dtype), params.q, {});
  const PartParams* part = params.part;
  const PartStore whole =
      PlainStore(params.quantized ? KvFormat::kInt8 : KvFormat::kFloat, params.dtype);
  p.k = StoreOf(part ? part->k : whole, params.k, params.k_scale);
  p.v = StoreOf(part ? part->v : whole, params.v, params.v_scale);
  if (part == nullptr) return p;
  p.part = true;
  p.out_type = FloatType::kFloat32;
  p.row_queries = static_cast<int>(part->row_queries);
  p.key_start = part->key_start;
  p.key_count = part->key_count;
  p.block_table = part->block_table;
  p.table_row = part->table_row;
  p.page = static_cast<int>(part->page);
  p.pages = static_cast<int>(part->pages);
  p.lse = part->lse;
  return p;
}

}  // namespace exkv

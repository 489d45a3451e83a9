// Between torch and the kernels of exkv::attention_part: as attention_binding.h, whose checks and
// views it uses.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "store_binding.h"

namespace exkv {

// One row serves all, unless rows are pages.
inline TokenView RowView(const Tensor& x, bool paged) {
  TokenView view = ViewOf(x);
  if (!paged && x.size(0) == 1) view.row = 0;
  return view;
}

inline PartStore FillStore(const KvStore& checked, const std::vector<Tensor>& tensors, bool paged,
                           TokenView* values, TokenView* scale) {
  PartStore store{};
  store.format = checked.format();
  store.items = tensors[0].size(3);
  store.item_bytes = static_cast<int64_t>(tensors[0].element_size());
  if (store.format == KvFormat::kFloat) store.dtype = *KernelFloatType(tensors[0].scalar_type());
  *values = RowView(tensors[0], paged);
  if (tensors.size() > 1) *scale = RowView(tensors[1], paged);
  if (tensors.size() > 2) store.offset = RowView(tensors[2], paged);
  return store;
}

struct PartArguments {
  const Tensor& q;
  const std::vector<Tensor>& k;
  const std::string& k_format;
  const std::vector<Tensor>& v;
  const std::string& v_format;
  const Tensor& past_lens;
  const Tensor& key_start;
  const Tensor& key_count;
  int64_t kv_len;
  double scale;
  int64_t window;
  double softcap;
  const std::optional<Tensor>& block_table;
};

// Whether there are kernels for both formats; if not, the reference serves the call.
inline bool HasKernels(const PartArguments& a) {
  return FindKvFormat(a.k_format) != nullptr && FindKvFormat(a.v_format) != nullptr;
}

// The reference is an op of its own (exkv/ops/registry.py), reached through torch's dispatcher.
inline std::tuple<Tensor, Tensor> Reference(const PartArguments& a) {
  using torch::stable::detail::from;
  const int64_t k_format = TextNumber(a.k_format), v_format = TextNumber(a.v_format);
  std::array<StableIValue, 13> stack{
      from(a.q),         from(a.k),         from(k_format),     from(a.v),      from(v_format),
      from(a.past_lens), from(a.key_start), from(a.key_count),  from(a.kv_len), from(a.scale),
      from(a.window),    from(a.softcap),   from(a.block_table)};
  CheckHandedOn(
      torch_call_dispatcher("exkv::attention_part_reference", "", stack.data(), TORCH_ABI_VERSION),
      "attention_part", a.k_format, a.v_format);
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

// The entries that are read, where the host can look at them: none may name a page that isn't
// among the `pages`.
inline void CheckEntries(const AttentionParams& p, int64_t pages) {
  const PartParams& part = *p.part;
  for (int64_t row = 0; row < p.rows; ++row) {
    const KeyRange keys{VisibleKeys(p, row, 0).begin, VisibleKeys(p, row, p.length - 1).end};
    for (int64_t entry = keys.begin / part.page; entry * part.page < keys.end; ++entry) {
      const int32_t found = part.block_table[row * part.table_row + entry];
      STD_TORCH_CHECK(found >= 0 && found < pages, "attention_part: block_table's row ", row,
                      " has ", found, " as entry ", entry, "; k and v have ", pages,
                      " pages, 0 to ", pages - 1);
    }
  }
}

// The two stores of a part, checked with all the rest.
struct PartStores {
  KvStore k;
  KvStore v;
};

// A store of rows of kv_len tokens at least, or of pages.
inline KvStore CheckedStore(const PartArguments& a, const char* name, const std::string& format,
                            const std::vector<Tensor>& tensors) {
  const bool paged = a.block_table.has_value();
  const KvStore store({"attention_part", "q", a.q, "B or 1", paged}, name, format, tensors);
  STD_TORCH_CHECK(paged || store.rows() == 1 || store.rows() == a.q.size(0),
                  "attention_part: ", name, " has ", store.rows(), " rows; it needs q's ",
                  a.q.size(0), ", or 1 that all share");
  STD_TORCH_CHECK(store.heads() > 0 && a.q.size(2) % store.heads() == 0, "attention_part: q's ",
                  a.q.size(2), " heads must be a multiple of ", name, "'s ", store.heads());
  const ScalarType floats = tensors[0].scalar_type();
  STD_TORCH_CHECK(store.format() != KvFormat::kFloat || KernelFloatType(floats).has_value(),
                  "attention_part: ", name, " must be float32, float16 or bfloat16, not ",
                  torch::headeronly::toString(floats));
  const int64_t tokens = paged ? store.tokens() : a.kv_len;
  store.CheckLayout(tensors, floats, tokens, store.heads(), paged);
  return store;
}

inline PartStores Checked(const PartArguments& a) {
  const AttentionChecks checks("attention_part", a.q);
  STD_TORCH_CHECK(a.kv_len >= 0, "attention_part: kv_len ", a.kv_len, " must be 0 or more");
  const auto numbers = [&](const char* name, const Tensor& x) {
    CheckRowNumbers("attention_part", name, x, "q", a.q, a.q.size(0));
  };
  numbers("past_lens", a.past_lens);
  numbers("key_start", a.key_start);
  numbers("key_count", a.key_count);
  const bool paged = a.block_table.has_value();
  const KvStore k = CheckedStore(a, "k", a.k_format, a.k);
  const KvStore v = CheckedStore(a, "v", a.v_format, a.v);
  STD_TORCH_CHECK(k.rows() == v.rows() && k.heads() == v.heads(), "attention_part: k has ",
                  k.rows(), paged ? " pages and " : " rows and ", k.heads(), " heads, and v has ",
                  v.rows(), " and ", v.heads(), ": they must have the same");
  STD_TORCH_CHECK(!paged || k.tokens() == v.tokens(), "attention_part: k has pages of ", k.tokens(),
                  " tokens, and v of ", v.tokens(), ": they must be alike");
  if (paged) CheckTable("attention_part", *a.block_table, a.q, a.kv_len, k.tokens());
  CheckScores("attention_part", a.scale, a.window, a.softcap);
  return {k, v};
}

// What kernels are given of a part beside its arguments: numbers of each row on the device, a table
// where rows are pages, and where the results go, (B, T, H, D) and (B, T, H) of float32.
struct PartMemory {
  const int32_t* past_lens;
  const int32_t* key_start;
  const int32_t* key_count;
  const Tensor* table;
  float* out;
  float* lse;
};

// Whether the rows share their keys.
inline bool IsShared(const PartArguments& a, const PartStores& stores) {
  return !a.block_table.has_value() && stores.k.rows() == 1;
}

// Hands checked arguments on. Rows that share their keys are one row of queries to the kernels, so
// that a tile of keys is packed once for all of them.
template <typename Launch>
void LaunchPart(const PartArguments& a, const PartStores& stores, const PartMemory& memory,
                const Launch& launch) {
  const bool paged = memory.table != nullptr;
  AttentionParams params =
      CommonParams(a.q, a.k[0], a.v[0], a.kv_len, a.scale, a.window, a.softcap);
  PartParams part{};
  part.k = FillStore(stores.k, a.k, paged, &params.k, &params.k_scale);
  part.v = FillStore(stores.v, a.v, paged, &params.v, &params.v_scale);
  part.key_start = memory.key_start;
  part.key_count = memory.key_count;
  part.row_queries = params.length;
  part.lse = memory.lse;
  if (paged) {
    part.block_table = memory.table->const_data_ptr<int32_t>();
    part.table_row = memory.table->size(1);
    part.page = stores.k.tokens();
    part.pages = stores.k.rows();
  }
  params.past_lens = memory.past_lens;
  params.out = memory.out;
  params.part = &part;
  if (IsShared(a, stores)) {
    params.length *= params.rows;
    params.rows = 1;
  }
  launch(params);
}

// exkv::attention_part.
template <typename Launch>
std::tuple<Tensor, Tensor> AttentionPart(const PartArguments& a, const Launch& launch) {
  const PartStores stores = Checked(a);
  Tensor out = NewEmpty(a.q, a.q.sizes(), ScalarType::Float);
  Tensor lse = NewEmpty(a.q, {a.q.size(0), a.q.size(1), a.q.size(2)}, ScalarType::Float);
  if (a.q.numel() == 0) return {out, lse};
  const bool joinable = !IsShared(a, stores) || a.q.stride(0) == a.q.size(1) * a.q.stride(1);
  const Tensor q = joinable ? a.q : Contiguous(a.q);
  const Tensor past = Contiguous(a.past_lens);
  const Tensor start = Contiguous(a.key_start);
  const Tensor count = Contiguous(a.key_count);
  std::optional<Tensor> table;
  if (a.block_table.has_value()) table = Contiguous(*a.block_table);
  const PartMemory memory{past.const_data_ptr<int32_t>(),
                          start.const_data_ptr<int32_t>(),
                          count.const_data_ptr<int32_t>(),
                          table.has_value() ? &*table : nullptr,
                          static_cast<float*>(out.mutable_data_ptr()),
                          static_cast<float*>(lse.mutable_data_ptr())};
  const PartArguments lined{q,           a.k,         a.k_format,   a.v,      a.v_format,
                            a.past_lens, a.key_start, a.key_count,  a.kv_len, a.scale,
                            a.window,    a.softcap,   a.block_table};
  LaunchPart(lined, stores, memory, launch);
  return {out, lse};
}

// The op as the dispatcher calls it; kRun is a device's.
template <std::tuple<Tensor, Tensor> (*kRun)(const PartArguments&)>
std::tuple<Tensor, Tensor> AttentionPartOp(const Tensor& q, std::vector<Tensor> k,
                                           StringHandle k_format, std::vector<Tensor> v,
                                           StringHandle v_format, const Tensor& past_lens,
                                           const Tensor& key_start, const Tensor& key_count,
                                           int64_t kv_len, double scale, int64_t window,
                                           double softcap, std::optional<Tensor> block_table) {
  const std::string k_name = TakeText(k_format), v_name = TakeText(v_format);
  return kRun({q, k, k_name, v, v_name, past_lens, key_start, key_count, kv_len, scale, window,
               softcap, block_table});
}

}  // namespace exkv

// Between torch and the kernels of exkv::attention_part: as attention_binding.h, whose checks and
// views it uses. Formats and their names: exkv/ops/kv_formats.py.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention_binding.h"

namespace exkv {

// The text behind a handle, which it gives back. torch's own way to a std::string (2.11 to 2.13)
// never frees the one that it makes.
inline std::string TakeText(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

inline void CheckPage(const char* op, const std::string& name, int64_t tokens) {
  STD_TORCH_CHECK(tokens > 0 && tokens % kPageStep == 0, op, ": ", name, " has pages of ", tokens,
                  " tokens; they must be a multiple of ", kPageStep);
}

// The tensors of one store, checked against its format; rows of `tokens` at least, or in pages of
// as many.
class StoreChecks {
 public:
  StoreChecks(const char* name, const std::string& format, const std::vector<Tensor>& tensors,
              const Tensor& q, int64_t kv_len, bool paged)
      : name_(name),
        format_name_(format),
        format_(FindKvFormat(format)->format),
        q_(q),
        paged_(paged) {
    const size_t wanted = TraitsOf(format_).tensors;
    bool right = tensors.size() == wanted;
    for (const Tensor& tensor : tensors) right = right && tensor.dim() == 4;
    STD_TORCH_CHECK(right, "attention_part: ", name_, " must be ", wanted,
                    " tensors (B or 1, S, H_kv, ...) to be ", format_name_, "; it is ",
                    tensors.size(), " tensors", Shapes(tensors));
    rows_ = tensors[0].size(0);
    heads_ = tensors[0].size(2);
    tokens_ = paged ? tensors[0].size(1) : kv_len;
    if (paged) {
      CheckPageOfFormat();
    } else {
      STD_TORCH_CHECK(rows_ == 1 || rows_ == q.size(0), "attention_part: ", name_, " has ", rows_,
                      " rows; it needs q's ", q.size(0), ", or 1 that all share");
    }
    STD_TORCH_CHECK(heads_ > 0 && q.size(2) % heads_ == 0, "attention_part: q's ", q.size(2),
                    " heads must be a multiple of ", name_, "'s ", heads_);
    Values(tensors[0], tokens_);
    const bool by_channel = IsByChannel(format_);
    const int64_t entries = by_channel ? NumGroups(tokens_) : tokens_;
    const int64_t last = by_channel ? q.size(3) : NumGroups(q.size(3));
    if (wanted > 1) Entries("scale", tensors[1], ScalarType::Half, entries, last);
    if (wanted > 2) Entries("offset", tensors[2], ScalarType::Half, entries, last);
  }

  PartStore Fill(const std::vector<Tensor>& tensors, TokenView* values, TokenView* scale) const {
    PartStore store{};
    store.format = format_;
    store.items = tensors[0].size(3);
    store.item_bytes = static_cast<int64_t>(tensors[0].element_size());
    if (format_ == KvFormat::kFloat) store.dtype = *KernelFloatType(tensors[0].scalar_type());
    *values = RowView(tensors[0]);
    if (tensors.size() > 1) *scale = RowView(tensors[1]);
    if (tensors.size() > 2) store.offset = RowView(tensors[2]);
    return store;
  }

  int64_t rows() const { return rows_; }
  int64_t heads() const { return heads_; }
  int64_t tokens() const { return tokens_; }

 private:
  static std::string Shapes(const std::vector<Tensor>& tensors) {
    std::string text;
    for (const Tensor& tensor : tensors) text += " " + ShapeText(tensor);
    return text;
  }

  // One row serves all.
  TokenView RowView(const Tensor& x) const {
    TokenView view = ViewOf(x);
    if (!paged_ && x.size(0) == 1) view.row = 0;
    return view;
  }

  void CheckPageOfFormat() const {
    CheckPage("attention_part", name_, tokens_);
    STD_TORCH_CHECK(!IsByChannel(format_) || tokens_ % kGroup == 0, "attention_part: ", name_,
                    " has pages of ", tokens_, " tokens, and ", format_name_, " encodes ", kGroup,
                    " together; make pages a multiple of that");
  }

  void Values(const Tensor& x, int64_t kv_len) const {
    const int64_t dim = q_.size(3);
    if (format_ == KvFormat::kFloat) {
      STD_TORCH_CHECK(KernelFloatType(x.scalar_type()).has_value(), "attention_part: ", name_,
                      " must be float32, float16 or bfloat16, not ",
                      torch::headeronly::toString(x.scalar_type()));
      return Entries(nullptr, x, x.scalar_type(), kv_len, dim);
    }
    const ScalarType dtype = format_ == KvFormat::kInt8 ? ScalarType::Char : ScalarType::Byte;
    Entries(nullptr, x, dtype, kv_len, (dim * TraitsOf(format_).bits + 7) / 8);
  }

  void Entries(const char* part, const Tensor& x, ScalarType dtype, int64_t entries,
               int64_t last) const {
    const std::string label = part == nullptr ? name_ : std::string(name_) + "'s " + part;
    CheckSameDevice("attention_part", "q", q_, label.c_str(), x);
    const bool roomy = paged_ ? x.size(1) == entries : x.size(1) >= entries;
    const bool fits = x.scalar_type() == dtype && x.size(0) == rows_ && roomy &&
                      x.size(2) == heads_ && x.size(3) == last;
    const std::string more =
        paged_ ? "" : ", or have more than " + std::to_string(entries) + " entries,";
    STD_TORCH_CHECK(fits, "attention_part: ", label, " must be ",
                    torch::headeronly::toString(dtype), " (", rows_, ", ", entries, ", ", heads_,
                    ", ", last, ")", more, " to be ", format_name_, " of ", q_.size(3),
                    " values; it is ", torch::headeronly::toString(x.scalar_type()), " ",
                    ShapeText(x));
    STD_TORCH_CHECK(x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1,
                    "attention_part: the last dimension of ", label,
                    " must be contiguous, and its stride is ", x.stride(3));
  }

  const char* name_;
  std::string format_name_;
  KvFormat format_;
  const Tensor& q_;
  bool paged_;
  int64_t rows_;  // or pages
  int64_t heads_;
  int64_t tokens_;
};

inline void CheckNumbers(const char* name, const Tensor& x, const Tensor& q) {
  CheckSameDevice("attention_part", "q", q, name, x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 1 && x.size(0) == q.size(0),
                  "attention_part: ", name, " must be int32 (", q.size(0),
                  ",), a number for each row; it is ", torch::headeronly::toString(x.scalar_type()),
                  " ", ShapeText(x));
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

// After the reference of an op was asked for a format that the kernels don't know. Its own words
// are lost on the way here.
inline void CheckHandedOn(AOTITorchError code, const char* op, const std::string& k_format,
                          const std::string& v_format) {
  const bool k = FindKvFormat(k_format) == nullptr;
  STD_TORCH_CHECK(code == AOTI_TORCH_SUCCESS, op, ": ", k ? "k" : "v", "_format is '",
                  k ? k_format : v_format, "', which the kernels don't know (they know ",
                  KvFormatNames(kGroup), "), and the reference didn't take it or its tensors");
}

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

inline void CheckTable(const char* op, const Tensor& table, const Tensor& q, int64_t kv_len,
                       int64_t page) {
  CheckSameDevice(op, "q", q, "block_table", table);
  STD_TORCH_CHECK(
      table.scalar_type() == ScalarType::Int && table.dim() == 2 && table.size(0) == q.size(0), op,
      ": block_table must be int32 (", q.size(0), ", pages), a list of pages for each row; it is ",
      torch::headeronly::toString(table.scalar_type()), " ", ShapeText(table));
  STD_TORCH_CHECK(kv_len <= table.size(1) * page, op, ": kv_len ", kv_len, " must be at most the ",
                  table.size(1) * page, " tokens of block_table's ", table.size(1), " pages of ",
                  page);
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
  StoreChecks k;
  StoreChecks v;
};

inline PartStores Checked(const PartArguments& a) {
  const AttentionChecks checks("attention_part", a.q);
  STD_TORCH_CHECK(a.kv_len >= 0, "attention_part: kv_len ", a.kv_len, " must be 0 or more");
  CheckNumbers("past_lens", a.past_lens, a.q);
  CheckNumbers("key_start", a.key_start, a.q);
  CheckNumbers("key_count", a.key_count, a.q);
  const bool paged = a.block_table.has_value();
  const StoreChecks k("k", a.k_format, a.k, a.q, a.kv_len, paged);
  const StoreChecks v("v", a.v_format, a.v, a.q, a.kv_len, paged);
  STD_TORCH_CHECK(k.rows() == v.rows() && k.heads() == v.heads(), "attention_part: k has ",
                  k.rows(), paged ? " pages and " : " rows and ", k.heads(), " heads, and v has ",
                  v.rows(), " and ", v.heads(), ": they must have the same");
  STD_TORCH_CHECK(k.tokens() == v.tokens(), "attention_part: k has pages of ", k.tokens(),
                  " tokens, and v of ", v.tokens(), ": they must be alike");
  if (paged) CheckTable("attention_part", *a.block_table, a.q, a.kv_len, k.tokens());
  CheckScores("attention_part", a.scale, a.window, a.softcap);
  return {k, v};
}

// exkv::attention_part. Rows that share their keys are one row of queries to the kernels, so that a
// tile of keys is packed once for all of them.
template <typename Launch>
std::tuple<Tensor, Tensor> AttentionPart(const PartArguments& a, const Launch& launch) {
  const PartStores stores = Checked(a);
  const std::vector<int64_t> shape(a.q.sizes().begin(), a.q.sizes().end());
  Tensor out = NewEmpty(a.q, shape, ScalarType::Float);
  Tensor lse = NewEmpty(a.q, {shape[0], shape[1], shape[2]}, ScalarType::Float);
  if (a.q.numel() == 0) return {out, lse};
  const bool paged = a.block_table.has_value();
  const bool shared = !paged && stores.k.rows() == 1;
  const bool joinable = !shared || a.q.stride(0) == shape[1] * a.q.stride(1);
  const Tensor q = joinable ? a.q : Contiguous(a.q);
  const Tensor past = Contiguous(a.past_lens);
  const Tensor start = Contiguous(a.key_start);
  const Tensor count = Contiguous(a.key_count);
  std::optional<Tensor> table;
  if (paged) table = Contiguous(*a.block_table);
  AttentionParams params = CommonParams(q, a.k[0], a.v[0], a.kv_len, a.scale, a.window, a.softcap);
  PartParams part{};
  part.k = stores.k.Fill(a.k, &params.k, &params.k_scale);
  part.v = stores.v.Fill(a.v, &params.v, &params.v_scale);
  part.key_start = start.const_data_ptr<int32_t>();
  part.key_count = count.const_data_ptr<int32_t>();
  part.row_queries = shape[1];
  part.lse = static_cast<float*>(lse.mutable_data_ptr());
  if (paged) {
    part.block_table = table->const_data_ptr<int32_t>();
    part.table_row = table->size(1);
    part.page = stores.k.tokens();
    part.pages = stores.k.rows();
  }
  params.past_lens = past.const_data_ptr<int32_t>();
  params.out = out.mutable_data_ptr();
  params.part = &part;
  if (shared) {
    params.rows = 1;
    params.length = shape[0] * shape[1];
  }
  launch(params);
  return {out, lse};
}

}  // namespace exkv

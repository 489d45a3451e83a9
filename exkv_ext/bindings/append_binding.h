// Between torch and the kernels of exkv::append_kv: checks the tensors, fills the params.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../params/append_params.h"
#include "attention_part_binding.h"
#include "kv_groups_binding.h"
#include "rope_binding.h"

namespace exkv {

struct AppendArguments {
  const Tensor& k;
  const Tensor& v;
  const std::optional<Tensor>& cos;
  const std::optional<Tensor>& sin;
  const std::vector<Tensor>& k_stored;
  const std::string& k_format;
  const std::vector<Tensor>& v_stored;
  const std::string& v_format;
  const Tensor& past_lens;
  const std::optional<Tensor>& new_lens;
  const std::optional<Tensor>& block_table;
  int64_t ring;
  bool hadamard;
};

inline void CheckAppended(const AppendArguments& a) {
  CheckRows("append_kv", "k", a.k);
  CheckAlike("append_kv", "k", a.k, "v", a.v);
  bool same = a.k.dim() == 4 && a.v.dim() == 4;
  for (int64_t i = 0; same && i < 4; ++i) same = a.k.size(i) == a.v.size(i);
  STD_TORCH_CHECK(same, "append_kv: k and v must both be (B, T, heads, D) of one dtype; k is ",
                  ShapeText(a.k), " and v ", ShapeText(a.v));
  STD_TORCH_CHECK(a.cos.has_value() == a.sin.has_value(),
                  "append_kv: cos and sin go together; give both, or none");
}

inline void CheckRowNumbers(const char* name, const Tensor& x, const Tensor& k) {
  CheckSameDevice("append_kv", "k", k, name, x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 1 && x.size(0) == k.size(0),
                  "append_kv: ", name, " must be int32 (", k.size(0),
                  ",), a number for each row; it is ", torch::headeronly::toString(x.scalar_type()),
                  " ", ShapeText(x));
}

// One store, checked against its format and what goes into it.
class AppendStore {
 public:
  AppendStore(const char* name, const std::string& format, const std::vector<Tensor>& tensors,
              const Tensor& k, bool paged)
      : name_(name), format_name_(format), k_(k) {
    format_ = FindKvFormat(format)->format;
    STD_TORCH_CHECK(!IsByChannel(format_), "append_kv: ", name, "_format is '", format,
                    "'; it must be one of ", KvFormatNames(1), ", which encode every token by ",
                    "itself");
    const size_t wanted = TraitsOf(format_).tensors;
    bool right = tensors.size() == wanted;
    for (const Tensor& tensor : tensors) right = right && tensor.dim() == 4;
    STD_TORCH_CHECK(right, "append_kv: ", name, "_stored must be ", wanted,
                    " tensors (B or more, S, H_kv, ...) to be ", format, "; it is ", tensors.size(),
                    " tensors");
    rows_ = tensors[0].size(0);
    tokens_ = tensors[0].size(1);
    if (paged) {
      CheckPage("append_kv", std::string(name) + "_stored", tokens_);
    } else {
      STD_TORCH_CHECK(rows_ >= k.size(0), "append_kv: ", name, "_stored has ", rows_,
                      " rows, and k has ", k.size(0));
    }
    const int64_t dim = k.size(3), groups = NumGroups(dim);
    Check("", tensors[0], ValuesType(), (dim * TraitsOf(format_).bits + 7) / 8);
    if (wanted > 1) Check("'s scale", tensors[1], ScalarType::Half, groups);
    if (wanted > 2) Check("'s offset", tensors[2], ScalarType::Half, groups);
  }

  AppendSide Side(const Tensor& x, const std::vector<Tensor>& tensors) const {
    AppendSide side{};
    side.x = ViewOf(x);
    side.format = format_;
    side.items = tensors[0].size(3);
    side.values = WrittenView(tensors[0]);
    if (tensors.size() > 1) side.scale = WrittenView(tensors[1]);
    if (tensors.size() > 2) side.offset = WrittenView(tensors[2]);
    return side;
  }

  int64_t rows() const { return rows_; }
  int64_t tokens() const { return tokens_; }

 private:
  ScalarType ValuesType() const {
    return format_ == KvFormat::kFloat  ? k_.scalar_type()
           : format_ == KvFormat::kInt8 ? ScalarType::Char
                                        : ScalarType::Byte;
  }

  void Check(const char* part, const Tensor& x, ScalarType dtype, int64_t packed) const {
    const std::string label = std::string(name_) + "_stored" + part;
    const bool plain = *part == '\0' && format_ == KvFormat::kFloat;
    const int64_t last = plain ? k_.size(3) : packed;
    CheckSameDevice("append_kv", "k", k_, label.c_str(), x);
    const bool fits = x.scalar_type() == dtype && x.size(0) == rows_ && x.size(1) == tokens_ &&
                      x.size(2) == k_.size(2) && x.size(3) == last;
    STD_TORCH_CHECK(fits, "append_kv: ", label, " must be ", torch::headeronly::toString(dtype),
                    " (", rows_, ", ", tokens_, ", ", k_.size(2), ", ", last, ") to be ",
                    format_name_, " of k ", ShapeText(k_), "; it is ",
                    torch::headeronly::toString(x.scalar_type()), " ", ShapeText(x));
    STD_TORCH_CHECK(x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1,
                    "append_kv: the last dimension of ", label,
                    " must be contiguous, and its stride is ", x.stride(3));
  }

  const char* name_;
  const std::string& format_name_;
  const Tensor& k_;
  KvFormat format_;
  int64_t rows_;
  int64_t tokens_;
};

// A call's params, checked, and the tensors that they point into.
class AppendCall {
 public:
  explicit AppendCall(const AppendArguments& a)
      : k_(InLine(Checked(a).k)), v_(InLine(a.v)), past_(Contiguous(a.past_lens)) {
    SetSizes(a);
    SetStores(a);
    SetFactors(a);
    params_.past_lens = past_.const_data_ptr<int32_t>();
    if (!a.new_lens.has_value()) return;
    new_ = Contiguous(*a.new_lens);
    params_.new_lens = new_->const_data_ptr<int32_t>();
  }

  const AppendParams& params() const { return params_; }

 private:
  static const AppendArguments& Checked(const AppendArguments& a) {
    CheckAppended(a);
    CheckRowNumbers("past_lens", a.past_lens, a.k);
    if (a.new_lens.has_value()) CheckRowNumbers("new_lens", *a.new_lens, a.k);
    return a;
  }

  void SetSizes(const AppendArguments& a) {
    params_.dtype = *KernelFloatType(k_.scalar_type());
    params_.rows = k_.size(0);
    params_.length = k_.size(1);
    params_.heads = k_.size(2);
    params_.dim = k_.size(3);
    if (!a.hadamard) return;
    params_.block = params_.dim & -params_.dim;
    params_.factor = static_cast<float>(1 / std::sqrt(static_cast<double>(params_.block)));
  }

  void SetStores(const AppendArguments& a) {
    const bool paged = a.block_table.has_value();
    const AppendStore k("k", a.k_format, a.k_stored, k_, paged);
    const AppendStore v("v", a.v_format, a.v_stored, k_, paged);
    STD_TORCH_CHECK(k.rows() == v.rows() && k.tokens() == v.tokens(), "append_kv: k_stored has ",
                    k.rows(), " rows of ", k.tokens(), " tokens, and v_stored ", v.rows(), " of ",
                    v.tokens(), ": they must have the same");
    params_.room = params_.page = k.tokens();
    if (paged) {
      CheckTable("append_kv", *a.block_table, k_, 0, params_.page);
      table_ = Contiguous(*a.block_table);
      params_.block_table = table_->const_data_ptr<int32_t>();
      params_.table_row = table_->size(1);
      params_.pages = k.rows();
      params_.room *= params_.table_row;
    }
    STD_TORCH_CHECK(a.ring >= 0 && a.ring <= params_.room, "append_kv: ring ", a.ring,
                    " must be at most the ", params_.room,
                    " tokens that a row has room for, or 0 for none");
    params_.ring = a.ring;
    params_.sides[0] = k.Side(k_, a.k_stored);
    params_.sides[1] = v.Side(v_, a.v_stored);
  }

  void SetFactors(const AppendArguments& a) {
    if (!a.cos.has_value()) return;
    CheckFactors("cos", *a.cos, k_, "append_kv", "k");
    CheckFactors("sin", *a.sin, k_, "append_kv", "k");
    CheckSameShape("append_kv", "cos", *a.cos, "sin", *a.sin);
    cos_ = InLine(*a.cos);
    sin_ = InLine(*a.sin);
    params_.width = cos_->size(2);
    params_.cos = FactorView(*cos_);
    params_.sin = FactorView(*sin_);
  }

  Tensor k_;
  Tensor v_;
  Tensor past_;
  std::optional<Tensor> new_;
  std::optional<Tensor> table_;
  std::optional<Tensor> cos_;
  std::optional<Tensor> sin_;
  AppendParams params_{};
};

// Every token that is written has a place, where the host can look.
inline void CheckPlaces(const AppendParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const AppendedTokens written = TokensWritten(p, row);
    for (int64_t token = written.begin; token < written.end; ++token) {
      const int64_t place = PlaceInRow(p, row, token);
      STD_TORCH_CHECK(place >= 0 && place < p.room, "append_kv: row ", row, " has ",
                      p.past_lens[row], " tokens and room for ", p.room, "; there is no place ",
                      place, " for token ", token);
      if (p.block_table == nullptr) continue;
      const int32_t found = p.block_table[row * p.table_row + place / p.page];
      STD_TORCH_CHECK(found >= 0 && found < p.pages, "append_kv: block_table's row ", row, " has ",
                      found, " as entry ", place / p.page, "; k and v have ", p.pages,
                      " pages, 0 to ", p.pages - 1);
    }
  }
}

// The reference is an op of its own (exkv/ops/registry.py), reached through torch's dispatcher.
inline void Reference(const AppendArguments& a) {
  using torch::stable::detail::from;
  std::array<StableIValue, 13> stack{from(a.k),           from(a.v),
                                     from(a.cos),         from(a.sin),
                                     from(a.k_stored),    from(TextNumber(a.k_format)),
                                     from(a.v_stored),    from(TextNumber(a.v_format)),
                                     from(a.past_lens),   from(a.new_lens),
                                     from(a.block_table), from(a.ring),
                                     from(a.hadamard)};
  CheckHandedOn(
      torch_call_dispatcher("exkv::append_kv_reference", "", stack.data(), TORCH_ABI_VERSION),
      "append_kv", a.k_format, a.v_format);
}

// exkv::append_kv; launch(params) stores. Formats without kernels are the reference's.
template <typename Launch>
void AppendKv(const AppendArguments& a, const Launch& launch) {
  if (!FindKvFormat(a.k_format) || !FindKvFormat(a.v_format)) return Reference(a);
  const AppendCall call(a);
  if (a.k.numel() > 0) launch(call.params());
}

}  // namespace exkv

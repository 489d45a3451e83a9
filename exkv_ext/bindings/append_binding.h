// Between torch and the kernels of exkv::append_kv: checks the tensors, fills the params.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../params/append_params.h"
#include "rope_binding.h"
#include "store_binding.h"

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

// The store of k or of v, as `name` says, that takes keys or values like k.
inline KvStore CheckedStore(const char* op, const std::string& name, const std::string& format,
                            const std::vector<Tensor>& tensors, const Tensor& k, bool paged) {
  STD_TORCH_CHECK(!IsByChannel(FindKvFormat(format)->format), op, ": ", name, "_format is '",
                  format, "'; it must be one of ", KvFormatNames(1), ", which encode every token ",
                  "by itself");
  const KvStore store({op, "k", k, "B or more", paged}, name + "_stored", format, tensors);
  STD_TORCH_CHECK(paged || store.rows() >= k.size(0), op, ": ", name, "_stored has ", store.rows(),
                  " rows, and k has ", k.size(0));
  store.CheckLayout(tensors, k.scalar_type(), store.tokens(), k.size(2), true);
  return store;
}

// Both stores of an op, which have the same places.
struct AppendStores {
  KvStore k;
  KvStore v;

  AppendStores(const char* op, KvStore k_store, KvStore v_store)
      : k(std::move(k_store)), v(std::move(v_store)) {
    STD_TORCH_CHECK(k.rows() == v.rows() && k.tokens() == v.tokens(), op, ": k_stored has ",
                    k.rows(), " rows of ", k.tokens(), " tokens, and v_stored ", v.rows(), " of ",
                    v.tokens(), ": they must have the same");
  }
};

inline AppendSide FillSide(const KvStore& store, const Tensor& x,
                           const std::vector<Tensor>& tensors) {
  AppendSide side{};
  side.x = ViewOf(x);
  side.format = store.format();
  side.items = tensors[0].size(3);
  side.values = WrittenView(tensors[0]);
  if (tensors.size() > 1) side.scale = WrittenView(tensors[1]);
  if (tensors.size() > 2) side.offset = WrittenView(tensors[2]);
  return side;
}

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
    const int64_t rows = a.k.size(0);
    CheckRowNumbers("append_kv", "past_lens", a.past_lens, "k", a.k, rows);
    if (a.new_lens) CheckRowNumbers("append_kv", "new_lens", *a.new_lens, "k", a.k, rows);
    return a;
  }

  void SetSizes(const AppendArguments& a) {
    params_.dtype = *KernelFloatType(k_.scalar_type());
    params_.rows = k_.size(0);
    params_.length = k_.size(1);
    params_.heads = k_.size(2);
    params_.dim = k_.size(3);
    if (!a.hadamard) return;
    params_.block = HadamardBlock(params_.dim);
    params_.factor = HadamardFactor(params_.block);
  }

  void SetStores(const AppendArguments& a) {
    const bool paged = a.block_table.has_value();
    const AppendStores stores("append_kv",
                              CheckedStore("append_kv", "k", a.k_format, a.k_stored, k_, paged),
                              CheckedStore("append_kv", "v", a.v_format, a.v_stored, k_, paged));
    params_.room = params_.page = stores.k.tokens();
    if (paged) {
      CheckTable("append_kv", *a.block_table, k_, 0, params_.page);
      table_ = Contiguous(*a.block_table);
      params_.block_table = table_->const_data_ptr<int32_t>();
      params_.table_row = table_->size(1);
      params_.pages = stores.k.rows();
      params_.room *= params_.table_row;
    }
    STD_TORCH_CHECK(a.ring >= 0 && a.ring <= params_.room, "append_kv: ring ", a.ring,
                    " must be at most the ", params_.room,
                    " tokens that a row has room for, or 0 for none");
    params_.ring = a.ring;
    params_.sides[0] = FillSide(stores.k, k_, a.k_stored);
    params_.sides[1] = FillSide(stores.v, v_, a.v_stored);
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

// exkv::append_kv; launch(params) stores heads of at most `most` values. Formats without kernels
// are the reference's.
template <typename Launch>
void AppendKv(const AppendArguments& a, const Launch& launch,
              int64_t most = std::numeric_limits<int64_t>::max()) {
  if (!FindKvFormat(a.k_format) || !FindKvFormat(a.v_format)) return Reference(a);
  const AppendCall call(a);
  STD_TORCH_CHECK(a.k.size(3) <= most, "append_kv: heads of ", a.k.size(3), " values; on ",
                  DeviceName(a.k), " the kernel takes ", most, " at most");
  if (a.k.numel() > 0) launch(call.params());
}

// The op as the dispatcher calls it; kRun is a device's.
template <void (*kRun)(const AppendArguments&)>
void AppendKvOp(const Tensor& k, const Tensor& v, std::optional<Tensor> cos,
                std::optional<Tensor> sin, std::vector<Tensor> k_stored, StringHandle k_format,
                std::vector<Tensor> v_stored, StringHandle v_format, const Tensor& past_lens,
                std::optional<Tensor> new_lens, std::optional<Tensor> block_table, int64_t ring,
                bool hadamard) {
  const std::string k_name = TakeText(k_format), v_name = TakeText(v_format);
  kRun({k, v, cos, sin, k_stored, k_name, v_stored, v_name, past_lens, new_lens, block_table, ring,
        hadamard});
}

}  // namespace exkv

// Between torch and exkv::decode_attention, which is made of what append_binding.h and
// attention_part_binding.h check.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "append_binding.h"
#include "attention_part_binding.h"
#include "kv_groups_binding.h"

namespace exkv {

struct DecodeAttentionArguments {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const std::vector<Tensor>& k_stored;
  const std::string& k_format;
  const std::vector<Tensor>& v_stored;
  const std::string& v_format;
  const Tensor& past_lens;
  int64_t kv_len;
  double scale;
  int64_t window;
  double softcap;
  int64_t ring;
  bool hadamard;
};

// The reference is an op of its own (exkv/ops/registry.py), reached through torch's dispatcher.
inline Tensor Reference(const DecodeAttentionArguments& a) {
  using torch::stable::detail::from;
  std::array<StableIValue, 14> stack{from(a.q),
                                     from(a.k),
                                     from(a.v),
                                     from(a.k_stored),
                                     from(TextNumber(a.k_format)),
                                     from(a.v_stored),
                                     from(TextNumber(a.v_format)),
                                     from(a.past_lens),
                                     from(a.kv_len),
                                     from(a.scale),
                                     from(a.window),
                                     from(a.softcap),
                                     from(a.ring),
                                     from(a.hadamard)};
  CheckHandedOn(torch_call_dispatcher("exkv::decode_attention_reference", "", stack.data(),
                                      TORCH_ABI_VERSION),
                "decode_attention", a.k_format, a.v_format);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline void CheckOneToken(const DecodeAttentionArguments& a) {
  const bool one = a.q.dim() == 4 && a.k.dim() == 4 && a.q.size(1) == 1 && a.k.size(1) == 1 &&
                   a.k.size(0) == a.q.size(0);
  STD_TORCH_CHECK(one,
                  "decode_attention: q, k and v must bring one token a row, (B, 1, heads, D); ",
                  "q is ", ShapeText(a.q), ", and k ", ShapeText(a.k));
  CheckRowNumbers("decode_attention", "past_lens", a.past_lens, "q", a.q, a.q.size(0));
}

// Numbers of each row for the part that is attended to: all keys that are stored.
class DecodeRows {
 public:
  explicit DecodeRows(const DecodeAttentionArguments& a)
      : rows_(static_cast<size_t>(a.q.size(0))), numbers_(3 * rows_) {
    const Tensor past = Contiguous(a.past_lens);
    const int32_t* lens = past.const_data_ptr<int32_t>();
    const int64_t last = a.ring > 0 ? a.ring - 1 : INT32_MAX;  // in a ring that is full
    for (size_t row = 0; row < rows_; ++row) {
      numbers_[row] = static_cast<int32_t>(std::min<int64_t>(lens[row], last));
      numbers_[2 * rows_ + row] = static_cast<int32_t>(std::min<int64_t>(a.kv_len, INT32_MAX));
    }
  }

  PartMemory Memory(float* out) const {
    const int32_t* past = numbers_.data();
    return {past, past + rows_, past + 2 * rows_, nullptr, out, nullptr};
  }

 private:
  size_t rows_;
  std::vector<int32_t> numbers_;  // tokens before, the first key, and keys
};

// The result, from which the transform is taken again where there is one, in q's dtype.
template <typename Hadamard>
Tensor Finished(const DecodeAttentionArguments& a, const Tensor& wide, const Hadamard& hadamard) {
  if (a.hadamard && wide.numel() > 0) hadamard(HadamardOf(wide, wide));
  const ScalarType dtype = a.q.scalar_type();
  return dtype == ScalarType::Float ? wide : torch::stable::to(wide, dtype);
}

// The op on the host; append(arguments) stores, attend(params) reads, hadamard(params) transforms.
template <typename Append, typename Attend, typename Hadamard>
Tensor DecodeAttention(const DecodeAttentionArguments& a, const Append& append,
                       const Attend& attend, const Hadamard& hadamard) {
  if (!FindKvFormat(a.k_format) || !FindKvFormat(a.v_format)) return Reference(a);
  CheckOneToken(a);
  const std::optional<Tensor> none;
  // So far for the checks: a number for each row is what all three must be.
  const Tensor& lens = a.past_lens;
  const PartArguments given{a.q,  a.k_stored, a.k_format, a.v_stored, a.v_format, lens, lens,
                            lens, a.kv_len,   a.scale,    a.window,   a.softcap,  none};
  const PartStores stores = Checked(given);  // before anything is written
  Tensor wide = NewEmpty(a.q, a.q.sizes(), ScalarType::Float);
  if (a.q.numel() == 0) return Finished(a, wide, hadamard);
  append(AppendArguments{a.k, a.v, none, none, a.k_stored, a.k_format, a.v_stored, a.v_format, lens,
                         none, none, a.ring, a.hadamard});
  const Tensor q = a.hadamard ? NewEmpty(a.q, a.q.sizes()) : a.q;
  if (a.hadamard) hadamard(HadamardOf(Contiguous(a.q), q));
  const DecodeRows rows(a);
  const PartArguments part{q,    a.k_stored, a.k_format, a.v_stored, a.v_format, lens, lens,
                           lens, a.kv_len,   a.scale,    a.window,   a.softcap,  none};
  LaunchPart(part, stores, rows.Memory(static_cast<float*>(wide.mutable_data_ptr())), attend);
  return Finished(a, wide, hadamard);
}

}  // namespace exkv

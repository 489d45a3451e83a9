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

// int32 (B,), on the host.
template <typename Number>
Tensor RowNumbers(const Tensor& like, const Number& number) {
  Tensor made = NewEmpty(like, {like.size(0)}, ScalarType::Int);
  int32_t* out = static_cast<int32_t*>(made.mutable_data_ptr());
  for (int64_t row = 0; row < like.size(0); ++row) out[row] = number(row);
  return made;
}

// Where each row's query is among the keys that are stored: in a ring that is full, behind all.
inline Tensor LastSeen(const Tensor& past_lens, int64_t ring) {
  if (ring <= 0) return past_lens;
  const Tensor past = Contiguous(past_lens);
  const int32_t* lens = past.const_data_ptr<int32_t>();
  return RowNumbers(past, [&](int64_t row) {
    return static_cast<int32_t>(std::min<int64_t>(lens[row], ring - 1));
  });
}

// The op on the host; append(arguments) stores, attend(params) reads, hadamard(x) transforms.
template <typename Append, typename Attend, typename Hadamard>
Tensor DecodeAttention(const DecodeAttentionArguments& a, const Append& append,
                       const Attend& attend, const Hadamard& hadamard) {
  if (!FindKvFormat(a.k_format) || !FindKvFormat(a.v_format)) return Reference(a);
  CheckOneToken(a);
  const std::optional<Tensor> none;
  const Tensor q = a.hadamard ? hadamard(a.q) : a.q;
  const Tensor seen = LastSeen(a.past_lens, a.ring);
  const Tensor start = RowNumbers(a.past_lens, [](int64_t) { return 0; });
  const Tensor count = RowNumbers(a.past_lens, [&](int64_t) {
    return static_cast<int32_t>(std::min<int64_t>(a.kv_len, INT32_MAX));
  });
  const PartArguments part{q,     a.k_stored, a.k_format, a.v_stored, a.v_format, seen, start,
                           count, a.kv_len,   a.scale,    a.window,   a.softcap,  none};
  // What is wrong with the part is refused before anything is written.
  const auto run = [&](const AttentionParams& params) {
    append(AppendArguments{a.k, a.v, none, none, a.k_stored, a.k_format, a.v_stored, a.v_format,
                           a.past_lens, none, none, a.ring, a.hadamard});
    attend(params);
  };
  const Tensor wide = std::get<0>(AttentionPart(part, run));
  const Tensor out = a.hadamard ? hadamard(wide) : wide;
  const ScalarType dtype = a.q.scalar_type();
  return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

}  // namespace exkv

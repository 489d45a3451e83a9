// Between torch and the attention kernels: checks the tensors, makes the output, fills the params.
// As for kv_quant, only the launch that is handed in differs between devices.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../params/attention_params.h"
#include "binding.h"

namespace exkv {

inline void CheckScores(const char* op, double scale, int64_t window, double softcap) {
  STD_TORCH_CHECK(window >= 0, op, ": window ", window, " must be positive, or 0 for none");
  STD_TORCH_CHECK(softcap >= 0 && std::isfinite(softcap), op, ": softcap ", softcap,
                  " must be positive, or 0 for none");
  STD_TORCH_CHECK(std::isfinite(scale), op, ": scale ", scale, " must be finite");
}

// Checks tensors of one op, and says which op and tensor in every refusal.
class AttentionChecks {
 public:
  AttentionChecks(const char* op, const Tensor& q) : op_(op), q_(q) {
    CheckShape("q", q);
    STD_TORCH_CHECK(KernelFloatType(q.scalar_type()).has_value(), op_,
                    ": q must be float32, float16 or bfloat16, not ",
                    torch::headeronly::toString(q.scalar_type()));
  }

  // Keys or values, or their scales: (B, S, H_kv, last) on q's device.
  void Stored(const char* name, const Tensor& x, ScalarType dtype, int64_t last) const {
    CheckSameDevice(op_, "q", q_, name, x);
    CheckShape(name, x);
    STD_TORCH_CHECK(x.scalar_type() == dtype, op_, ": ", name, " must be ",
                    torch::headeronly::toString(dtype), ", not ",
                    torch::headeronly::toString(x.scalar_type()));
    STD_TORCH_CHECK(x.size(0) == q_.size(0) && x.size(3) == last, op_, ": ", name, " must be (",
                    q_.size(0), ", S, H_kv, ", last, ") for q ", ShapeText(q_), "; it is ",
                    ShapeText(x));
    const int64_t kv_heads = x.size(2);
    STD_TORCH_CHECK(kv_heads > 0 && q_.size(2) % kv_heads == 0, op_, ": q's ", q_.size(2),
                    " heads must be a multiple of ", name, "'s ", kv_heads);
  }

  // A tensor that goes with the keys.
  void LikeKeys(const char* name, const Tensor& x, const Tensor& k) const {
    STD_TORCH_CHECK(x.size(1) == k.size(1) && x.size(2) == k.size(2), op_, ": ", name,
                    " must have k's tokens and heads; k is ", ShapeText(k), ", ", name, " ",
                    ShapeText(x));
  }

  void Lengths(const Tensor& past_lens, const Tensor& k, int64_t kv_len) const {
    CheckRowNumbers(op_, "past_lens", past_lens, "q", q_, q_.size(0));
    STD_TORCH_CHECK(kv_len <= k.size(1), op_, ": kv_len ", kv_len, " must be at most the ",
                    k.size(1), " tokens that k has room for");
    STD_TORCH_CHECK(kv_len >= 1 || q_.numel() == 0, op_, ": kv_len ", kv_len,
                    " must count one key at least");
  }

 private:
  void CheckShape(const char* name, const Tensor& x) const {
    STD_TORCH_CHECK(x.dim() == 4, op_, ": ", name, " must be (B, tokens, heads, D); it is ",
                    ShapeText(x));
    CheckLastContiguous(op_, name, x);
  }

  const char* op_;
  const Tensor& q_;
};

inline TokenView ViewOf(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

// The same of a tensor that is written to.
inline TokenView WrittenView(const Tensor& x) {
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

// What both ops have in common; the tensors are checked.
inline AttentionParams CommonParams(const Tensor& q, const Tensor& k, const Tensor& v,
                                    int64_t kv_len, double scale, int64_t window, double softcap) {
  AttentionParams params{};
  params.dtype = *KernelFloatType(q.scalar_type());
  params.rows = q.size(0);
  params.length = q.size(1);
  params.heads = q.size(2);
  params.kv_heads = k.size(2);
  params.dim = q.size(3);
  params.kv_len = kv_len;
  params.q = ViewOf(q);
  params.k = ViewOf(k);
  params.v = ViewOf(v);
  params.scale = static_cast<float>(scale);
  params.window = window;
  params.softcap = static_cast<float>(softcap);
  return params;
}

inline Tensor EmptyOutput(const Tensor& q) { return NewEmpty(q, q.sizes(), q.scalar_type()); }

struct AttentionArguments {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& past_lens;
  int64_t kv_len;
  bool ragged;
  double scale;
  int64_t window;
  double softcap;
};

struct AttentionInt8Arguments {
  const Tensor& q;
  const Tensor& k;
  const Tensor& k_scale;
  const Tensor& v;
  const Tensor& v_scale;
  const Tensor& past_lens;
  int64_t kv_len;
  double scale;
  int64_t window;
  double softcap;
};

// The params but for lengths and output, of arguments that are as they must be.
inline AttentionParams Checked(const AttentionArguments& a) {
  const AttentionChecks checks("attention", a.q);
  checks.Stored("k", a.k, a.q.scalar_type(), a.q.size(3));
  checks.Stored("v", a.v, a.q.scalar_type(), a.q.size(3));
  checks.LikeKeys("v", a.v, a.k);
  checks.Lengths(a.past_lens, a.k, a.kv_len);
  CheckScores("attention", a.scale, a.window, a.softcap);
  STD_TORCH_CHECK(a.ragged || a.kv_len >= a.q.size(1), "attention: kv_len ", a.kv_len,
                  " must count the keys of q's own ", a.q.size(1), " tokens too");
  return CommonParams(a.q, a.k, a.v, a.kv_len, a.scale, a.window, a.softcap);
}

inline AttentionParams Checked(const AttentionInt8Arguments& a) {
  const AttentionChecks checks("attention_int8", a.q);
  const int64_t groups = NumGroups(a.q.size(3));
  checks.Stored("k", a.k, ScalarType::Char, a.q.size(3));
  checks.Stored("k_scale", a.k_scale, ScalarType::Half, groups);
  checks.Stored("v", a.v, ScalarType::Char, a.q.size(3));
  checks.Stored("v_scale", a.v_scale, ScalarType::Half, groups);
  checks.LikeKeys("k_scale", a.k_scale, a.k);
  checks.LikeKeys("v", a.v, a.k);
  checks.LikeKeys("v_scale", a.v_scale, a.k);
  checks.Lengths(a.past_lens, a.k, a.kv_len);
  CheckScores("attention_int8", a.scale, a.window, a.softcap);
  AttentionParams params = CommonParams(a.q, a.k, a.v, a.kv_len, a.scale, a.window, a.softcap);
  params.quantized = true;
  params.k_scale = ViewOf(a.k_scale);
  params.v_scale = ViewOf(a.v_scale);
  return params;
}

// Checks the arguments and hands them on; `ragged` says whether past_lens is read.
template <typename Arguments, typename Launch>
Tensor Attend(const Arguments& a, bool ragged, const Launch& launch) {
  AttentionParams params = Checked(a);
  Tensor out = EmptyOutput(a.q);
  const Tensor lens = Contiguous(a.past_lens);
  params.past_lens = ragged ? lens.const_data_ptr<int32_t>() : nullptr;
  params.out = out.mutable_data_ptr();
  if (a.q.numel() > 0) launch(params);
  return out;
}

// exkv::attention
template <typename Launch>
Tensor Attention(const AttentionArguments& a, const Launch& launch) {
  return Attend(a, a.ragged, launch);
}

// exkv::attention_int8
template <typename Launch>
Tensor AttentionInt8(const AttentionInt8Arguments& a, const Launch& launch) {
  return Attend(a, true, launch);
}

}  // namespace exkv

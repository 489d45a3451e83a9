// Between torch and the attention kernels: checks the tensors, makes the output, fills the params.
// As for kv_quant, only the launch that is handed in differs between devices.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "attention_params.h"
#include "binding.h"

namespace exkv {

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
    CheckSameDevice(op_, "q", q_, "past_lens", past_lens);
    STD_TORCH_CHECK(past_lens.scalar_type() == ScalarType::Int && past_lens.dim() == 1 &&
                        past_lens.size(0) == q_.size(0),
                    op_, ": past_lens must be int32 (", q_.size(0), "), a number for each row; it ",
                    "is ", torch::headeronly::toString(past_lens.scalar_type()), " ",
                    ShapeText(past_lens));
    STD_TORCH_CHECK(kv_len <= k.size(1), op_, ": kv_len ", kv_len, " must be at most the ",
                    k.size(1), " tokens that k has room for");
    STD_TORCH_CHECK(kv_len >= 1 || q_.numel() == 0, op_, ": kv_len ", kv_len,
                    " must count one key at least");
  }

  void Params(double scale, int64_t window, double softcap) const {
    STD_TORCH_CHECK(window >= 0, op_, ": window ", window, " must be positive, or 0 for none");
    STD_TORCH_CHECK(softcap >= 0 && std::isfinite(softcap), op_, ": softcap ", softcap,
                    " must be positive, or 0 for none");
    STD_TORCH_CHECK(std::isfinite(scale), op_, ": scale ", scale, " must be finite");
  }

 private:
  void CheckShape(const char* name, const Tensor& x) const {
    STD_TORCH_CHECK(x.dim() == 4, op_, ": ", name, " must be (B, tokens, heads, D); it is ",
                    ShapeText(x));
    STD_TORCH_CHECK(x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1, op_, ": the last ",
                    "dimension of ", name, " must be contiguous, and its stride is ", x.stride(3));
  }

  const char* op_;
  const Tensor& q_;
};

inline TokenView ViewOf(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
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

inline Tensor EmptyOutput(const Tensor& q) {
  return torch::stable::new_empty(q, q.sizes(), q.scalar_type());
}

// exkv::attention
template <typename Launch>
Tensor Attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& past_lens,
                 int64_t kv_len, bool ragged, double scale, int64_t window, double softcap,
                 const Launch& launch) {
  const AttentionChecks checks("attention", q);
  checks.Stored("k", k, q.scalar_type(), q.size(3));
  checks.Stored("v", v, q.scalar_type(), q.size(3));
  checks.LikeKeys("v", v, k);
  checks.Lengths(past_lens, k, kv_len);
  checks.Params(scale, window, softcap);
  STD_TORCH_CHECK(ragged || kv_len >= q.size(1), "attention: kv_len ", kv_len,
                  " must count the keys of q's own ", q.size(1), " tokens too");
  Tensor out = EmptyOutput(q);
  AttentionParams params = CommonParams(q, k, v, kv_len, scale, window, softcap);
  const Tensor lens = Contiguous(past_lens);
  params.past_lens = ragged ? lens.const_data_ptr<int32_t>() : nullptr;
  params.out = out.mutable_data_ptr();
  if (q.numel() > 0) launch(params);
  return out;
}

// exkv::attention_int8
template <typename Launch>
Tensor AttentionInt8(const Tensor& q, const Tensor& k, const Tensor& k_scale, const Tensor& v,
                     const Tensor& v_scale, const Tensor& past_lens, int64_t kv_len, double scale,
                     int64_t window, double softcap, const Launch& launch) {
  const AttentionChecks checks("attention_int8", q);
  const int64_t groups = NumGroups(q.size(3));
  checks.Stored("k", k, ScalarType::Char, q.size(3));
  checks.Stored("k_scale", k_scale, ScalarType::Half, groups);
  checks.Stored("v", v, ScalarType::Char, q.size(3));
  checks.Stored("v_scale", v_scale, ScalarType::Half, groups);
  checks.LikeKeys("k_scale", k_scale, k);
  checks.LikeKeys("v", v, k);
  checks.LikeKeys("v_scale", v_scale, k);
  checks.Lengths(past_lens, k, kv_len);
  checks.Params(scale, window, softcap);
  Tensor out = EmptyOutput(q);
  AttentionParams params = CommonParams(q, k, v, kv_len, scale, window, softcap);
  const Tensor lens = Contiguous(past_lens);
  params.quantized = true;
  params.k_scale = ViewOf(k_scale);
  params.v_scale = ViewOf(v_scale);
  params.past_lens = lens.const_data_ptr<int32_t>();
  params.out = out.mutable_data_ptr();
  if (q.numel() > 0) launch(params);
  return out;
}

}  // namespace exkv

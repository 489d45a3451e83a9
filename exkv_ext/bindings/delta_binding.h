// Between torch and the kernel of the gated delta rule: checks the tensors, makes the output, fills
// the params.
#pragma once

#include "recurrent_binding.h"

namespace exkv {

// q, k (B, T, H_k, D_k), v (B, T, H, D_v); float32 decay (B, T, H, 1 or D_k), beta (B, T, H) and
// state (B, H, D_k, D_v), which is changed in place; new_lens int32 (B,) -> (B, T, H, D_v).
template <typename Launch>
Tensor GatedDelta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                  const Tensor& beta, const Tensor& state, const std::optional<Tensor>& new_lens,
                  const Launch& launch) {
  const char* op = "gated_delta";
  DeltaParams params{};
  params.dtype = CheckRows(op, "q", q);
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, op, ": q and v must be (B, T, heads, D); they are ",
                  ShapeText(q), " and ", ShapeText(v));
  CheckSameShape(op, "q", q, "k", k);
  CheckAlike(op, "q", q, "k", k);
  CheckAlike(op, "q", q, "v", v);
  const int64_t rows = q.size(0), length = q.size(1), heads = v.size(2);
  STD_TORCH_CHECK(
      v.size(0) == rows && v.size(1) == length && q.size(2) > 0 && heads % q.size(2) == 0, op,
      ": v ", ShapeText(v), " must have q's rows and tokens, and a multiple of its ",
      "heads; q is ", ShapeText(q));
  const auto check = [&](const char* name, const Tensor& y, std::initializer_list<int64_t> shape) {
    CheckFloats(op, "q", q, name, y, shape, "q's rows and v's heads");
  };
  const int64_t channels = decay.dim() == 4 && decay.size(3) == q.size(3) ? q.size(3) : 1;
  check("decay", decay, {rows, length, heads, channels});
  check("beta", beta, {rows, length, heads});
  check("state", state, {rows, heads, q.size(3), v.size(3)});
  CheckContiguousRows(op, state);
  const std::optional<Tensor> lens = CheckedLens(op, "q", q, new_lens);
  Tensor out = NewEmpty(v, v.sizes());
  if (v.numel() == 0) return out;
  const Tensor queries = InLine(q), keys = InLine(k), values = InLine(v);
  const Tensor decays = Contiguous(decay), betas = Contiguous(beta);
  params.rows = rows * heads;
  params.heads = heads;
  params.groups = heads / q.size(2);
  params.length = length;
  params.key_dim = q.size(3);
  params.value_dim = v.size(3);
  params.channels = channels;
  params.q = ViewOf(queries);
  params.k = ViewOf(keys);
  params.v = ViewOf(values);
  params.decay = FloatsOf(decays);
  params.beta = FloatsOf(betas);
  FillState(params, state, lens, out);
  launch(params);
  return out;
}

}  // namespace exkv

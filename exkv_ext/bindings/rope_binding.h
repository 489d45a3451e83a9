// Between torch and the kernel of rotary positions: checks the tensors, makes the outputs, fills
// the params.
#pragma once

#include <tuple>

#include "attention_binding.h"
#include "rows_binding.h"

namespace exkv {

// Heads (B, T, H, D) like q's.
inline void CheckHeads(const char* name, const Tensor& x, const Tensor& q) {
  STD_TORCH_CHECK(x.dim() == 4, "rope: ", name, " must be (B, T, heads, D); it is ", ShapeText(x));
  STD_TORCH_CHECK(x.size(0) == q.size(0) && x.size(1) == q.size(1) && x.size(3) == q.size(3),
                  "rope: ", name, " must have q's rows, tokens and head size; q is ", ShapeText(q),
                  ", ", name, " ", ShapeText(x));
  CheckAlike("rope", "q", q, name, x);
}

// Factors (B, T, R), or (1, T, R) for rows that are at the same positions.
inline void CheckFactors(const char* name, const Tensor& x, const Tensor& q,
                         const char* op = "rope", const char* q_name = "q") {
  STD_TORCH_CHECK(
      x.dim() == 3 && (x.size(0) == q.size(0) || x.size(0) == 1) && x.size(1) == q.size(1), op,
      ": ", name, " must be (", q.size(0), ", ", q.size(1), ", R), a factor for each token of ",
      q_name, " ", ShapeText(q), "; it is ", ShapeText(x));
  STD_TORCH_CHECK(x.size(2) % 2 == 0 && x.size(2) <= q.size(3), op, ": ", name, " ", ShapeText(x),
                  " must rotate an even number of features, at most the ", q.size(3),
                  " of a head; it rotates ", x.size(2));
  CheckAlike(op, q_name, q, name, x);
}

// The same with neighbours in the last dimension.
inline Tensor InLine(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) <= 1 || x.stride(last) == 1 ? x : Contiguous(x);
}

inline TokenView FactorView(const Tensor& x) {
  return {x.const_data_ptr(), x.size(0) == 1 ? 0 : x.stride(0), x.stride(1), 0};
}

// q (B, T, H, D), k (B, T, H_kv, D), cos and sin (B, T, R) -> q and k, rotated.
template <typename Launch>
std::tuple<Tensor, Tensor> Rope(const Tensor& q, const Tensor& k, const Tensor& cos,
                                const Tensor& sin, const Launch& launch) {
  RopeParams params{};
  params.dtype = CheckRows("rope", "q", q);
  CheckHeads("q", q, q);
  CheckHeads("k", k, q);
  CheckFactors("cos", cos, q);
  CheckFactors("sin", sin, q);
  CheckSameShape("rope", "cos", cos, "sin", sin);
  Tensor rotated_q = NewEmpty(q, q.sizes());
  Tensor rotated_k = NewEmpty(k, k.sizes());
  if (q.numel() + k.numel() == 0) return {rotated_q, rotated_k};
  const Tensor queries = InLine(q), keys = InLine(k), c = InLine(cos), s = InLine(sin);
  params.length = q.size(1);
  params.rows = q.size(0) * params.length;
  params.head_dim = q.size(3);
  params.dim = (q.size(2) + k.size(2)) * params.head_dim;
  params.width = cos.size(2);
  params.cos = FactorView(c);
  params.sin = FactorView(s);
  params.heads[0] = {ViewOf(queries), q.size(2), rotated_q.mutable_data_ptr()};
  params.heads[1] = {ViewOf(keys), k.size(2), rotated_k.mutable_data_ptr()};
  launch(params);
  return {rotated_q, rotated_k};
}

}  // namespace exkv

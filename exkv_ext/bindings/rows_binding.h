// Between torch and the kernels of norms and gates: checks the tensors, makes the outputs, fills
// the params.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../cpu/rows.h"
#include "binding.h"

namespace exkv {

// Values from a row (the last dimension) to the next, where all rows are at one distance and a
// row's values are neighbours; else nothing.
inline std::optional<int64_t> RowStep(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) return std::nullopt;
  std::optional<int64_t> step;
  int64_t rows = 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (!step) step = x.stride(i);
    if (x.stride(i) != *step * rows) return std::nullopt;
    rows *= x.size(i);
  }
  return step ? step : x.size(last);
}

// The same values in rows that a kernel can walk along.
inline Tensor InRows(const Tensor& x) { return RowStep(x) ? x : Contiguous(x); }

inline FloatType CheckRows(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": ", name, " needs a dimension to work along; it has none");
  const std::optional<FloatType> dtype = KernelFloatType(x.scalar_type());
  STD_TORCH_CHECK(dtype.has_value(), op, ": ", name, " must be float32, float16 or bfloat16, not ",
                  torch::headeronly::toString(x.scalar_type()));
  return *dtype;
}

inline void CheckAlike(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                       const Tensor& b) {
  CheckSameDevice(op, a_name, a, b_name, b);
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), op, ": ", a_name, " is ",
                  torch::headeronly::toString(a.scalar_type()), " and ", b_name, " ",
                  torch::headeronly::toString(b.scalar_type()), "; convert one of them");
}

inline void CheckSameShape(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                           const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t i = 0; same && i < a.dim(); ++i) same = a.size(i) == b.size(i);
  STD_TORCH_CHECK(same, op, ": ", a_name, " is ", ShapeText(a), " and ", b_name, " ", ShapeText(b),
                  "; they must have one shape");
}

inline NormParams CheckedNorm(const char* op, const Tensor& x, const Tensor& weight, double eps,
                              bool offset) {
  NormParams params{};
  params.dtype = CheckRows(op, "x", x);
  CheckAlike(op, "x", x, "weight", weight);
  const int64_t dim = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == dim, op, ": weight ", ShapeText(weight),
                  " must have one entry for each of the ", dim, " features of x ", ShapeText(x));
  params.dim = dim;
  params.rows = dim == 0 ? 0 : x.numel() / dim;
  params.eps = static_cast<float>(eps);
  params.offset = offset;
  return params;
}

// x (..., N), weight (N) -> (..., N).
template <typename Launch>
Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, bool offset,
               const Launch& launch) {
  NormParams params = CheckedNorm("rms_norm", x, weight, eps, offset);
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor rows = InRows(x), factor = Contiguous(weight);
  params.x = rows.const_data_ptr();
  params.x_step = *RowStep(rows);
  params.weight = factor.const_data_ptr();
  params.out = out.mutable_data_ptr();
  launch(params);
  return out;
}

// x (..., N), weight and bias (N) -> (..., N).
template <typename Launch>
Tensor LayerNorm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 double eps, bool offset, const Launch& launch) {
  NormParams params = CheckedNorm("layer_norm", x, weight, eps, offset);
  if (bias) CheckAlike("layer_norm", "weight", weight, "bias", *bias);
  if (bias) CheckSameShape("layer_norm", "weight", weight, "bias", *bias);
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor rows = InRows(x), factor = Contiguous(weight);
  const Tensor added = bias ? Contiguous(*bias) : factor;
  params.centered = true;
  params.x = rows.const_data_ptr();
  params.x_step = *RowStep(rows);
  params.weight = factor.const_data_ptr();
  params.bias = bias ? added.const_data_ptr() : nullptr;
  params.out = out.mutable_data_ptr();
  launch(params);
  return out;
}

// x and residual (..., N), weight (N) -> their sum (..., N) and its norm.
template <typename Launch>
std::tuple<Tensor, Tensor> AddRmsNorm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                      double eps, bool offset, const Launch& launch) {
  NormParams params = CheckedNorm("add_rms_norm", x, weight, eps, offset);
  CheckAlike("add_rms_norm", "x", x, "residual", residual);
  CheckSameShape("add_rms_norm", "x", x, "residual", residual);
  Tensor sum = NewEmpty(x, x.sizes());
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return {sum, out};
  const Tensor rows = InRows(x), added = InRows(residual);
  const Tensor factor = Contiguous(weight);
  params.x = rows.const_data_ptr();
  params.x_step = *RowStep(rows);
  params.residual = added.const_data_ptr();
  params.residual_step = *RowStep(added);
  params.weight = factor.const_data_ptr();
  params.sum = sum.mutable_data_ptr();
  params.out = out.mutable_data_ptr();
  launch(params);
  return {sum, out};
}

// gate (..., N) becomes act(gate) * up; up (..., N).
template <typename Launch>
void GateMul(const char* op, Tensor gate, const Tensor& up, const Launch& launch) {
  GateParams params{};
  params.dtype = CheckRows(op, "gate", gate);
  CheckAlike(op, "gate", gate, "up", up);
  CheckSameShape(op, "gate", gate, "up", up);
  if (gate.numel() == 0) return;
  STD_TORCH_CHECK(gate.const_data_ptr() != up.const_data_ptr(), op,
                  ": gate and up are one tensor, and gate is overwritten; clone one of them");
  Tensor rows = InRows(gate);
  const Tensor factor = InRows(up);
  params.dim = gate.size(gate.dim() - 1);
  params.rows = gate.numel() / params.dim;
  params.gate = rows.mutable_data_ptr();
  params.gate_step = *RowStep(rows);
  STD_TORCH_CHECK(params.rows == 1 || params.gate_step >= params.dim, op,
                  ": gate's rows overlap, and gate is overwritten; clone it");
  params.up = factor.const_data_ptr();
  params.up_step = *RowStep(factor);
  launch(params);
  if (!RowStep(gate)) torch::stable::copy_(gate, rows);
}

}  // namespace exkv

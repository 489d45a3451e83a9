// Between torch and the linear kernels: checks the tensors, makes the output, fills the params, and
// leaves to torch what its own kernels do better.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "cpu/linear.h"
#include "kv_quant_binding.h"

namespace exkv {

inline void CheckLinear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, "linear: x needs a dimension to multiply along; it has none");
  STD_TORCH_CHECK(weight.dim() == 2, "linear: weight must be (out, in), and it is ",
                  ShapeText(weight));
  STD_TORCH_CHECK(x.size(x.dim() - 1) == weight.size(1), "linear: x ", ShapeText(x), " ends in ",
                  x.size(x.dim() - 1), " and weight ", ShapeText(weight), " takes ",
                  weight.size(1));
  CheckSameDevice("linear", "x", x, "weight", weight);
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "linear: x is ",
                  torch::headeronly::toString(x.scalar_type()), " and weight ",
                  torch::headeronly::toString(weight.scalar_type()), "; convert one of them");
  if (!bias.has_value()) return;
  CheckSameDevice("linear", "x", x, "bias", *bias);
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear: bias ",
                  ShapeText(*bias), " must have one entry for each of weight's ", weight.size(0),
                  " outputs");
  STD_TORCH_CHECK(x.scalar_type() == bias->scalar_type(), "linear: x is ",
                  torch::headeronly::toString(x.scalar_type()), " and bias ",
                  torch::headeronly::toString(bias->scalar_type()), "; convert one of them");
}

inline Tensor AtenLinear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x (..., in), weight (out, in), bias (out) -> (..., out).
template <typename Launch>
Tensor Linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const LinearKernels& kernels, const Launch& launch) {
  CheckLinear(x, weight, bias);
  const std::optional<FloatType> dtype = KernelFloatType(x.scalar_type());
  const int64_t inputs = weight.size(1), outputs = weight.size(0);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  const bool whole = weight.is_contiguous() && (!bias || bias->is_contiguous());
  if (!dtype || !whole || rows > kernels.max_rows(*dtype)) {
    return AtenLinear(x, weight, bias);
  }
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor out = torch::stable::new_empty(x, shape);
  if (out.numel() == 0) return out;
  const Tensor input = torch::stable::contiguous(x);
  LinearParams params{};
  params.dtype = *dtype;
  params.rows = rows;
  params.inputs = inputs;
  params.outputs = outputs;
  params.x = input.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.bias = bias ? bias->const_data_ptr() : nullptr;
  params.out = out.mutable_data_ptr();
  launch(params);
  return out;
}

}  // namespace exkv

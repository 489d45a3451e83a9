// Between torch and the linear kernels: checks the tensors, makes the output, fills the params, and
// leaves to torch what its own kernels do better.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "../cpu/linear.h"
#include "kv_quant_binding.h"

namespace exkv {

// Some rows of a packed matrix as floats.
template <typename Matrix, typename Launch>
Tensor DequantizedRows(const char* op, const Tensor& like, const Matrix& m, int64_t rows,
                       ScalarType dtype, const Launch& launch) {
  const FloatType type = CheckFloats(op, "dtype", dtype);
  Tensor out = NewEmpty(like, {rows, m.inputs}, dtype);
  if (out.numel() > 0) launch(m, type, out.mutable_data_ptr());
  return out;
}

inline void CheckLinear(const char* op, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x needs a dimension to multiply along; it has none");
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight must be (out, in), and it is ",
                  ShapeText(weight));
  STD_TORCH_CHECK(x.size(x.dim() - 1) == weight.size(1), op, ": x ", ShapeText(x), " ends in ",
                  x.size(x.dim() - 1), " and weight ", ShapeText(weight), " takes ",
                  weight.size(1));
  CheckSameDevice(op, "x", x, "weight", weight);
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), op, ": x is ",
                  torch::headeronly::toString(x.scalar_type()), " and weight ",
                  torch::headeronly::toString(weight.scalar_type()), "; convert one of them");
  if (!bias.has_value()) return;
  CheckSameDevice(op, "x", x, "bias", *bias);
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": bias ",
                  ShapeText(*bias), " must have one entry for each of weight's ", weight.size(0),
                  " outputs");
  STD_TORCH_CHECK(x.scalar_type() == bias->scalar_type(), op, ": x is ",
                  torch::headeronly::toString(x.scalar_type()), " and bias ",
                  torch::headeronly::toString(bias->scalar_type()), "; convert one of them");
}

inline Tensor AtenLinear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Rows up to which kernels take a call, by its dtype.
using MostRows = int64_t (*)(FloatType);

// The input of linear layers as the kernels take it.
class LinearInput {
 public:
  explicit LinearInput(const Tensor& x)
      : x_(x), rows_(1), shape_(x.sizes().begin(), x.sizes().end()) {
    for (int64_t i = 0; i + 1 < x.dim(); ++i) rows_ *= x.size(i);
  }

  // x weight^T + bias: by torch at once where there are more rows than the kernels take, or an
  // empty tensor, and one more of the `layers` for them.
  Tensor Times(const Tensor& weight, const std::optional<Tensor>& bias, MostRows most_rows,
               std::vector<LinearParams>* layers) {
    const std::optional<FloatType> dtype = KernelFloatType(x_.scalar_type());
    const bool contiguous = weight.is_contiguous() && (!bias || bias->is_contiguous());
    if (!dtype || !contiguous || rows_ > most_rows(*dtype)) return AtenLinear(x_, weight, bias);
    shape_.back() = weight.size(0);
    Tensor out = NewEmpty(x_, shape_);
    if (out.numel() == 0) return out;
    if (!lined_) lined_ = Contiguous(x_);
    LinearParams params{};
    params.dtype = *dtype;
    params.rows = rows_;
    params.inputs = weight.size(1);
    params.outputs = weight.size(0);
    params.x = lined_->const_data_ptr();
    params.weight = weight.const_data_ptr();
    params.bias = bias ? bias->const_data_ptr() : nullptr;
    params.out = out.mutable_data_ptr();
    layers->push_back(params);
    return out;
  }

 private:
  const Tensor& x_;
  int64_t rows_;
  std::vector<int64_t> shape_;
  std::optional<Tensor> lined_;
};

// x (..., in), weight (out, in), bias (out) -> (..., out).
template <typename Launch>
Tensor Linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              MostRows most_rows, const Launch& launch) {
  CheckLinear("linear", x, weight, bias);
  LinearInput input(x);
  std::vector<LinearParams> layers;
  Tensor out = input.Times(weight, bias, most_rows, &layers);
  if (!layers.empty()) launch(layers);
  return out;
}

// The same for several weights, whose outputs may differ in number; biases for all or none.
template <typename Launch>
std::vector<Tensor> Linears(const Tensor& x, const std::vector<Tensor>& weights,
                            const std::vector<Tensor>& biases, MostRows most_rows,
                            const Launch& launch) {
  STD_TORCH_CHECK(biases.empty() || biases.size() == weights.size(), "linears: ", biases.size(),
                  " biases for ", weights.size(), " weights; give one for each, or none");
  const auto bias = [&](size_t i) {
    return biases.empty() ? std::nullopt : std::optional<Tensor>(biases[i]);
  };
  for (size_t i = 0; i < weights.size(); ++i) CheckLinear("linears", x, weights[i], bias(i));
  std::vector<Tensor> outs;
  if (weights.empty()) return outs;
  LinearInput input(x);
  std::vector<LinearParams> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    outs.push_back(input.Times(weights[i], bias(i), most_rows, &layers));
  }
  if (!layers.empty()) launch(layers);
  return outs;
}

// The reference is an op of its own (exkv/ops/registry.py), reached through torch's dispatcher.
inline Tensor HeadsReference(const Tensor& x, const Tensor& weight) {
  using torch::stable::detail::from;
  std::array<StableIValue, 2> stack{from(x), from(weight)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("exkv::linear_heads_reference", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x (H, N, in), weight (H, out, in) -> (H, N, out): each head by its own matrix.
template <typename Launch>
Tensor LinearHeads(const Tensor& x, const Tensor& weight, MostRows most_rows,
                   const Launch& launch) {
  const bool fit = x.dim() == 3 && weight.dim() == 3 && x.size(0) == weight.size(0) &&
                   x.size(2) == weight.size(2);
  STD_TORCH_CHECK(fit, "linear_heads: x must be (heads, N, in) and weight (heads, out, in); x is ",
                  ShapeText(x), " and weight ", ShapeText(weight));
  CheckSameDevice("linear_heads", "x", x, "weight", weight);
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "linear_heads: x is ",
                  torch::headeronly::toString(x.scalar_type()), " and weight ",
                  torch::headeronly::toString(weight.scalar_type()), "; convert one of them");
  const std::optional<FloatType> dtype = KernelFloatType(x.scalar_type());
  const bool contiguous = x.is_contiguous() && weight.is_contiguous();
  if (!dtype || !contiguous || x.size(1) > most_rows(*dtype)) return HeadsReference(x, weight);
  Tensor out = NewEmpty(x, {x.size(0), x.size(1), weight.size(1)});
  if (out.numel() == 0) return out;
  LinearParams head{};
  head.dtype = *dtype;
  head.rows = x.size(1);
  head.inputs = x.size(2);
  head.outputs = weight.size(1);
  const int64_t bytes = static_cast<int64_t>(x.element_size());
  const auto* inputs = static_cast<const char*>(x.const_data_ptr());
  const auto* weights = static_cast<const char*>(weight.const_data_ptr());
  auto* outputs = static_cast<char*>(out.mutable_data_ptr());
  std::vector<LinearParams> heads(static_cast<size_t>(x.size(0)), head);
  for (LinearParams& each : heads) {
    each.x = inputs;
    each.weight = weights;
    each.out = outputs;
    inputs += head.rows * head.inputs * bytes;
    weights += head.outputs * head.inputs * bytes;
    outputs += head.rows * head.outputs * bytes;
  }
  launch(heads);
  return out;
}

}  // namespace exkv

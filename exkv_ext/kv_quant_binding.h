// Between torch and the kv_quant kernels: checks the tensors, makes the outputs, fills the params.
// bindings.cpp and cuda/bindings.cpp differ only in the launch that they hand in.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kv_quant_params.h"

namespace exkv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string DeviceName(const Tensor& tensor) {
  const std::string type = tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device";
  const int32_t index = tensor.get_device_index();
  return index < 0 ? type : type + ":" + std::to_string(index);
}

// The dispatcher looks at any one argument, so a second tensor may well live elsewhere.
inline void CheckSameDevice(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                            const Tensor& b) {
  STD_TORCH_CHECK(a.device() == b.device(), op, ": ", a_name, " is on ", DeviceName(a), " and ",
                  b_name, " on ", DeviceName(b), "; move one of them");
}

inline std::string ShapeText(const Tensor& tensor) {
  std::string text = "(";
  for (const int64_t size : tensor.sizes()) text += std::to_string(size) + ", ";
  if (text.size() > 1) text.resize(text.size() - 2);
  return text + ")";
}

inline std::optional<FloatType> KernelFloatType(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return FloatType::kFloat32;
    case ScalarType::Half:
      return FloatType::kFloat16;
    case ScalarType::BFloat16:
      return FloatType::kBFloat16;
    default:
      return std::nullopt;
  }
}

inline int64_t NumGroups(int64_t dim) { return (dim + kGroup - 1) / kGroup; }

// x (..., D) -> values int8 (..., D), scales float16 (..., ceil(D / 32)).
template <typename Launch>
std::tuple<Tensor, Tensor> QuantizeKv(const Tensor& x, const Launch& launch) {
  STD_TORCH_CHECK(x.dim() >= 1, "quantize_kv: x needs a dimension to group along; it has none");
  // As in the reference, any other type is taken as float32.
  const bool known = KernelFloatType(x.scalar_type()).has_value();
  const Tensor input =
      torch::stable::contiguous(known ? x : torch::stable::to(x, ScalarType::Float));
  const std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  std::vector<int64_t> scale_shape = shape;
  scale_shape.back() = NumGroups(shape.back());
  Tensor values = torch::stable::new_empty(input, shape, ScalarType::Char);
  Tensor scales = torch::stable::new_empty(input, scale_shape, ScalarType::Half);
  if (x.numel() > 0) {
    QuantizeParams params{};
    params.dtype = *KernelFloatType(input.scalar_type());
    params.rows = x.numel() / shape.back();
    params.dim = shape.back();
    params.groups = scale_shape.back();
    params.x = input.const_data_ptr();
    params.values = static_cast<int8_t*>(values.mutable_data_ptr());
    params.scales = static_cast<uint16_t*>(scales.mutable_data_ptr());
    launch(params);
  }
  return {values, scales};
}

inline void CheckQuantized(const Tensor& values, const Tensor& scales) {
  CheckSameDevice("dequantize_kv", "q", values, "scale", scales);
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Char, "dequantize_kv: q must be int8, not ",
                  torch::headeronly::toString(values.scalar_type()));
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Half,
                  "dequantize_kv: scale must be float16, not ",
                  torch::headeronly::toString(scales.scalar_type()));
  bool fits = values.dim() >= 1 && values.dim() == scales.dim();
  for (int64_t i = 0; fits && i < values.dim(); ++i) {
    const bool last = i == values.dim() - 1;
    fits = scales.size(i) == (last ? NumGroups(values.size(i)) : values.size(i));
  }
  STD_TORCH_CHECK(fits, "dequantize_kv: scale needs one entry for each ", kGroup,
                  " values of q's last dimension; q is ", ShapeText(values), ", scale ",
                  ShapeText(scales));
}

// The inverse, in dtype.
template <typename Launch>
Tensor DequantizeKv(const Tensor& values, const Tensor& scales, ScalarType dtype,
                    const Launch& launch) {
  CheckQuantized(values, scales);
  const Tensor q = torch::stable::contiguous(values);
  const Tensor scale = torch::stable::contiguous(scales);
  const std::optional<FloatType> known = KernelFloatType(dtype);
  const ScalarType made = known ? dtype : ScalarType::Float;
  Tensor x = torch::stable::new_empty(q, q.sizes(), made);
  if (q.numel() > 0) {
    DequantizeParams params{};
    params.dtype = *KernelFloatType(made);
    params.dim = q.size(q.dim() - 1);
    params.rows = q.numel() / params.dim;
    params.groups = NumGroups(params.dim);
    params.values = static_cast<const int8_t*>(q.const_data_ptr());
    params.scales = static_cast<const uint16_t*>(scale.const_data_ptr());
    params.x = x.mutable_data_ptr();
    launch(params);
  }
  return known ? x : torch::stable::to(x, dtype);
}

}  // namespace exkv

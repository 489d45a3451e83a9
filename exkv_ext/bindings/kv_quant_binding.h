// Between torch and the kv_quant kernels: checks the tensors, makes the outputs, fills the params.
// bindings.cpp and cuda/bindings.cpp differ only in the launch that they hand in.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "binding.h"

namespace exkv {

// x (..., D) -> values int8 (..., D), scales float16 (..., ceil(D / 32)).
template <typename Launch>
std::tuple<Tensor, Tensor> QuantizeKv(const Tensor& x, const Launch& launch) {
  STD_TORCH_CHECK(x.dim() >= 1, "quantize_kv: x needs a dimension to group along; it has none");
  const Tensor input = KernelInput(x);
  const std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  std::vector<int64_t> scale_shape = shape;
  scale_shape.back() = NumGroups(shape.back());
  Tensor values = NewEmpty(input, shape, ScalarType::Char);
  Tensor scales = NewEmpty(input, scale_shape, ScalarType::Half);
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
  const Tensor q = Contiguous(values);
  const Tensor scale = Contiguous(scales);
  const std::optional<FloatType> known = KernelFloatType(dtype);
  const ScalarType made = known ? dtype : ScalarType::Float;
  Tensor x = NewEmpty(q, q.sizes(), made);
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

// What all bindings share: torch's names, tensors in words, and the checks of one tensor or two.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../params/kv_quant_params.h"

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

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::string SizesText(Sizes sizes) {
  std::string text = "(";
  for (const int64_t size : sizes) text += std::to_string(size) + ", ";
  if (text.size() > 1) text.resize(text.size() - 2);
  return text + ")";
}

inline std::string ShapeText(const Tensor& tensor) { return SizesText(tensor.sizes()); }

// A contiguous tensor of this type and shape.
inline void CheckContiguous(const char* op, const char* name, const Tensor& x, ScalarType dtype,
                            Sizes shape) {
  bool fits = x.dim() == static_cast<int64_t>(shape.size()) && x.is_contiguous() &&
              x.scalar_type() == dtype;
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = x.size(static_cast<int64_t>(i)) == shape[i];
  }
  STD_TORCH_CHECK(fits, op, ": ", name, " is ", torch::headeronly::toString(x.scalar_type()), " ",
                  ShapeText(x), x.is_contiguous() ? "" : ", not contiguous", "; it must be ",
                  torch::headeronly::toString(dtype), " ", SizesText(shape));
}

// A number for each of so many rows.
inline void CheckRowNumbers(const char* op, const char* name, const Tensor& x,
                            const char* beside_name, const Tensor& beside, int64_t rows) {
  CheckSameDevice(op, beside_name, beside, name, x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && x.dim() == 1 && x.size(0) == rows, op, ": ",
                  name, " must be int32 (", rows, ",), a number for each row; it is ",
                  torch::headeronly::toString(x.scalar_type()), " ", ShapeText(x));
}

// Of a tensor of four dimensions.
inline void CheckLastContiguous(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1, op,
                  ": the last dimension of ", name, " must be contiguous, and its stride is ",
                  x.stride(3));
}

// Asks first: torch's own function goes through the dispatcher, by the op's name, to return the
// same tensor.
inline Tensor Contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// The same, beginning at a multiple of 16 bytes, as kernels load it.
inline Tensor Aligned(const Tensor& x) {
  const Tensor lined = Contiguous(x);
  const bool aligned = reinterpret_cast<uintptr_t>(lined.const_data_ptr()) % 16 == 0;
  return aligned ? lined : torch::stable::clone(lined);
}

inline std::vector<int64_t> ContiguousStrides(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
  }
  return strides;
}

// A contiguous tensor beside another, uninitialised. torch's own function looks its op up by name
// first, which takes as long as the arithmetic of a small model's layer.
inline Tensor NewEmpty(const Tensor& beside, Sizes sizes, ScalarType dtype) {
  int32_t type = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(beside.get(), &index));
  const std::vector<int64_t> strides = ContiguousStrides(sizes);
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), code, type, index, &made));
  return Tensor(made);
}

inline Tensor NewEmpty(const Tensor& beside, Sizes sizes) {
  return NewEmpty(beside, sizes, beside.scalar_type());
}

// A contiguous tensor in another shape; the same remark.
inline Tensor InShape(const Tensor& x, Sizes sizes) {
  const std::vector<int64_t> strides = ContiguousStrides(sizes);
  int64_t offset = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(x.get(), &offset));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      x.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset, &made));
  return Tensor(made);
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

// Contiguous, and in a type that kernels know; as in the reference, any other is taken as float32.
inline Tensor KernelInput(const Tensor& x) {
  const bool known = KernelFloatType(x.scalar_type()).has_value();
  return Contiguous(known ? x : torch::stable::to(x, ScalarType::Float));
}

inline FloatType CheckFloats(const std::string& op, const char* name, ScalarType dtype) {
  const std::optional<FloatType> type = KernelFloatType(dtype);
  STD_TORCH_CHECK(type.has_value(), op, ": ", name, " is ", torch::headeronly::toString(dtype),
                  "; it must be float32, float16 or bfloat16");
  return *type;
}

// Scales that a vector of this length needs.
inline int64_t NumGroups(int64_t dim) { return (dim + kGroup - 1) / kGroup; }

// The Walsh-Hadamard transform of a vector of this length: in blocks of the largest power of two
// that divides it, each multiplied by its size^-1/2.
inline int64_t HadamardBlock(int64_t dim) { return dim & -dim; }

inline float HadamardFactor(int64_t block) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
}

}  // namespace exkv

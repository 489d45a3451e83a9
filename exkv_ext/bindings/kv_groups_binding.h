// Between torch and the kernels for packed values and for the Walsh-Hadamard transform: as
// kv_quant_binding.h. What is computed: exkv/ops/kv_formats.py.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding.h"

namespace exkv {

inline void CheckBits(int64_t bits) {
  STD_TORCH_CHECK(bits == 2 || bits == 4, "bits is ", bits,
                  ": packed values have 2 or 4 (8 bits are quantize_kv's)");
}

inline int64_t PackedBytes(int64_t dim, int64_t bits) { return (dim * bits + 7) / 8; }

inline std::vector<int64_t> WithLast(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = last;
  return shape;
}

// exkv::quantize_groups
template <typename Launch>
std::tuple<Tensor, Tensor, Tensor> QuantizeGroups(const Tensor& x, int64_t bits,
                                                  const Launch& launch) {
  CheckBits(bits);
  STD_TORCH_CHECK(x.dim() >= 1, "quantize_groups: x needs a dimension to group along; it has none");
  const Tensor input = KernelInput(x);
  PackParams params{};
  params.dtype = *KernelFloatType(input.scalar_type());
  params.bits = bits;
  params.dim = x.size(x.dim() - 1);
  params.groups = NumGroups(params.dim);
  params.bytes = PackedBytes(params.dim, bits);
  Tensor packed = NewEmpty(input, WithLast(x, params.bytes), ScalarType::Byte);
  Tensor scale = NewEmpty(input, WithLast(x, params.groups), ScalarType::Half);
  Tensor offset = NewEmpty(input, WithLast(x, params.groups), ScalarType::Half);
  if (x.numel() > 0) {
    params.rows = x.numel() / params.dim;
    params.x = input.const_data_ptr();
    params.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
    params.scales = static_cast<uint16_t*>(scale.mutable_data_ptr());
    params.offsets = static_cast<uint16_t*>(offset.mutable_data_ptr());
    launch(params);
  }
  return {packed, scale, offset};
}

inline void CheckGroups(const char* name, const Tensor& x, const Tensor& packed, int64_t dim) {
  CheckSameDevice("dequantize_groups", "packed", packed, name, x);
  const std::vector<int64_t> expected = WithLast(packed, NumGroups(dim));
  const std::vector<int64_t> found(x.sizes().begin(), x.sizes().end());
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half && found == expected,
                  "dequantize_groups: ", name, " must be float16 ", SizesText(expected),
                  ", one entry for each ", kGroup, " of ", dim, " values; it is ",
                  torch::headeronly::toString(x.scalar_type()), " ", ShapeText(x));
}

// exkv::dequantize_groups
template <typename Launch>
Tensor DequantizeGroups(const Tensor& packed, const Tensor& scale, const Tensor& offset,
                        int64_t bits, int64_t dim, ScalarType dtype, const Launch& launch) {
  CheckBits(bits);
  const int64_t bytes = PackedBytes(dim, bits);
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() >= 1 &&
                      packed.size(packed.dim() - 1) == bytes,
                  "dequantize_groups: packed must be uint8 (..., ", bytes, ") for ", dim,
                  " values of ", bits, " bits; it is ",
                  torch::headeronly::toString(packed.scalar_type()), " ", ShapeText(packed));
  CheckGroups("scale", scale, packed, dim);
  CheckGroups("offset", offset, packed, dim);
  const std::optional<FloatType> known = KernelFloatType(dtype);
  const ScalarType made = known ? dtype : ScalarType::Float;
  const Tensor values = Contiguous(packed);
  const Tensor scales = Contiguous(scale);
  const Tensor offsets = Contiguous(offset);
  Tensor x = NewEmpty(values, WithLast(packed, dim), made);
  if (x.numel() > 0) {
    UnpackParams params{};
    params.dtype = *KernelFloatType(made);
    params.bits = bits;
    params.rows = x.numel() / dim;
    params.dim = dim;
    params.groups = NumGroups(dim);
    params.bytes = bytes;
    params.packed = static_cast<const uint8_t*>(values.const_data_ptr());
    params.scales = static_cast<const uint16_t*>(scales.const_data_ptr());
    params.offsets = static_cast<const uint16_t*>(offsets.const_data_ptr());
    params.x = x.mutable_data_ptr();
    launch(params);
  }
  return known ? x : torch::stable::to(x, dtype);
}

// Of contiguous tensors of one type and shape, which may be the same.
inline HadamardParams HadamardOf(const Tensor& x, const Tensor& out) {
  HadamardParams params{};
  params.dtype = *KernelFloatType(x.scalar_type());
  params.dim = x.size(x.dim() - 1);
  params.rows = x.numel() / params.dim;
  params.block = HadamardBlock(params.dim);
  params.factor = HadamardFactor(params.block);
  params.x = x.const_data_ptr();
  params.out = out.mutable_data_ptr();
  return params;
}

// exkv::hadamard; `most` is the largest block that the kernel takes.
template <typename Launch>
Tensor HadamardTransform(const Tensor& x, const Launch& launch,
                         int64_t most = std::numeric_limits<int64_t>::max()) {
  STD_TORCH_CHECK(x.dim() >= 1, "hadamard: x needs a dimension to transform; it has none");
  const int64_t dim = x.size(x.dim() - 1), block = HadamardBlock(dim);
  STD_TORCH_CHECK(block <= most, "hadamard: ", dim, " values are transformed in blocks of ", block,
                  ", and on ", DeviceName(x), " a block has at most ", most,
                  "; transform them on the CPU");
  const Tensor input = KernelInput(x);
  Tensor out = NewEmpty(input, x.sizes(), input.scalar_type());
  if (x.numel() > 0) {
    launch(HadamardOf(input, out));
  }
  return input.scalar_type() == x.scalar_type() ? out : torch::stable::to(out, x.scalar_type());
}

}  // namespace exkv

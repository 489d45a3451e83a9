// Between torch and the kernel of the selective scan: checks the tensors, makes the output, fills
// the params.
#pragma once

#include <optional>

#include "rope_binding.h"

namespace exkv {

// x (B, T, C), b and c (B, T, N) of one dtype; dt float32 (B, T, C), a float32 (N, C), d float32
// (C,); state float32 (B, N, C), changed in place; new_lens int32 (B,) -> (B, T, C).
template <typename Launch>
Tensor SelectiveScan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                     const Tensor& c, const Tensor& d, const Tensor& state,
                     const std::optional<Tensor>& new_lens, const Launch& launch) {
  const char* op = "selective_scan";
  ScanParams params{};
  params.dtype = CheckRows(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 3 && b.dim() == 3 && b.size(0) == x.size(0) && b.size(1) == x.size(1),
                  op, ": x must be (B, T, C) and b (B, T, N); they are ", ShapeText(x), " and ",
                  ShapeText(b));
  CheckSameShape(op, "b", b, "c", c);
  CheckAlike(op, "x", x, "b", b);
  CheckAlike(op, "x", x, "c", c);
  const int64_t rows = x.size(0), length = x.size(1), channels = x.size(2), inner = b.size(2);
  const auto check = [&](const char* name, const Tensor& y, std::initializer_list<int64_t> shape) {
    CheckSameDevice(op, "x", x, name, y);
    bool same = y.dim() == static_cast<int64_t>(shape.size());
    int64_t i = 0;
    for (int64_t size : shape) same = same && y.size(i++) == size;
    STD_TORCH_CHECK(same && y.scalar_type() == ScalarType::Float, op, ": ", name,
                    " must be float32 with x's rows and channels, and b's last size; it is ",
                    torch::headeronly::toString(y.scalar_type()), " ", ShapeText(y));
  };
  check("dt", dt, {rows, length, channels});
  check("a", a, {inner, channels});
  check("d", d, {channels});
  check("state", state, {rows, inner, channels});
  STD_TORCH_CHECK(state.numel() == 0 || (state.stride(2) == 1 && state.stride(1) == channels), op,
                  ": the rows of state must be contiguous");
  if (new_lens) {
    CheckSameDevice(op, "x", x, "new_lens", *new_lens);
    STD_TORCH_CHECK(new_lens->dim() == 1 && new_lens->size(0) == rows &&
                        new_lens->scalar_type() == ScalarType::Int,
                    op, ": new_lens must be int32 (", rows, ",); it is ", ShapeText(*new_lens));
  }
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor values = Contiguous(x), inputs = Contiguous(b), outputs = Contiguous(c);
  const Tensor steps = Contiguous(dt), rates = Contiguous(a), skips = Contiguous(d);
  const std::optional<Tensor> lens = new_lens ? std::optional(Contiguous(*new_lens)) : std::nullopt;
  params.blocks = (channels + kScanChannels - 1) / kScanChannels;
  params.rows = rows * params.blocks;
  params.length = length;
  params.channels = channels;
  params.state_dim = inner;
  params.x = values.const_data_ptr();
  params.b = inputs.const_data_ptr();
  params.c = outputs.const_data_ptr();
  params.dt = static_cast<const float*>(steps.const_data_ptr());
  params.a = static_cast<const float*>(rates.const_data_ptr());
  params.d = static_cast<const float*>(skips.const_data_ptr());
  params.new_lens = lens ? static_cast<const int32_t*>(lens->const_data_ptr()) : nullptr;
  params.state = static_cast<float*>(state.mutable_data_ptr());
  params.state_row = state.stride(0);
  params.out = out.mutable_data_ptr();
  launch(params);
  return out;
}

}  // namespace exkv

// Between torch and the kernel of the selective scan: checks the tensors, makes the output, fills
// the params.
#pragma once

#include "recurrent_binding.h"

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
  CheckInputsAndOutputs(op, x, b, c);
  const int64_t rows = x.size(0), length = x.size(1), channels = x.size(2), inner = b.size(2);
  const auto check = [&](const char* name, const Tensor& y, std::initializer_list<int64_t> shape) {
    CheckFloats(op, "x", x, name, y, shape, "x's rows and channels, and b's last size");
  };
  check("dt", dt, {rows, length, channels});
  check("a", a, {inner, channels});
  check("d", d, {channels});
  check("state", state, {rows, inner, channels});
  CheckContiguousRows(op, state);
  const std::optional<Tensor> lens = CheckedLens(op, "x", x, new_lens);
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor values = Contiguous(x), inputs = Contiguous(b), outputs = Contiguous(c);
  const Tensor steps = Contiguous(dt), rates = Contiguous(a), skips = Contiguous(d);
  params.blocks = (channels + kScanChannels - 1) / kScanChannels;
  params.rows = rows * params.blocks;
  params.length = length;
  params.channels = channels;
  params.state_dim = inner;
  params.x = values.const_data_ptr();
  params.b = inputs.const_data_ptr();
  params.c = outputs.const_data_ptr();
  FillStateSpace(params, steps, rates, skips);
  FillState(params, state, lens, out);
  launch(params);
  return out;
}

}  // namespace exkv

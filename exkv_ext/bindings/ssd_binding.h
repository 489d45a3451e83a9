// Between torch and the kernel of state space duality: checks the tensors, makes the output, fills
// the params.
#pragma once

#include "recurrent_binding.h"

namespace exkv {

// x (B, T, H, P), b and c (B, T, G, N) of one dtype; dt float32 (B, T, H), a and d float32 (H,);
// state float32 (B, H, N, P), changed in place; new_lens int32 (B,) -> (B, T, H, P).
template <typename Launch>
Tensor StateSpaceDuality(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                         const Tensor& c, const Tensor& d, const Tensor& state,
                         const std::optional<Tensor>& new_lens, const Launch& launch) {
  const char* op = "ssd";
  SsdParams params{};
  params.dtype = CheckRows(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 4 && b.dim() == 4, op,
                  ": x and b must be (B, T, heads or groups, D); they are ", ShapeText(x), " and ",
                  ShapeText(b));
  CheckInputsAndOutputs(op, x, b, c);
  const int64_t rows = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  const int64_t groups = b.size(2), inner = b.size(3);
  STD_TORCH_CHECK(b.size(0) == rows && b.size(1) == length && groups > 0 && heads % groups == 0, op,
                  ": b ", ShapeText(b), " must have x's rows and tokens, and groups that its ",
                  "heads are a multiple of; x is ", ShapeText(x));
  const auto check = [&](const char* name, const Tensor& y, std::initializer_list<int64_t> shape) {
    CheckFloats(op, "x", x, name, y, shape, "x's rows and heads, and b's last size");
  };
  check("dt", dt, {rows, length, heads});
  check("a", a, {heads});
  check("d", d, {heads});
  check("state", state, {rows, heads, inner, dim});
  CheckContiguousRows(op, state);
  const std::optional<Tensor> lens = CheckedLens(op, "x", x, new_lens);
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor values = InLine(x), inputs = InLine(b), outputs = InLine(c);
  const Tensor steps = Contiguous(dt), rates = Contiguous(a), skips = Contiguous(d);
  params.rows = rows * heads;
  params.heads = heads;
  params.groups = heads / groups;
  params.length = length;
  params.state_dim = inner;
  params.head_dim = dim;
  params.x = ViewOf(values);
  params.b = ViewOf(inputs);
  params.c = ViewOf(outputs);
  FillStateSpace(params, steps, rates, skips);
  FillState(params, state, lens, out);
  launch(params);
  return out;
}

}  // namespace exkv

// Between torch and the kernel of state space duality: checks the tensors, makes the output, fills
// the params.
#pragma once

#include <optional>

#include "rope_binding.h"

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
  CheckSameShape(op, "b", b, "c", c);
  CheckAlike(op, "x", x, "b", b);
  CheckAlike(op, "x", x, "c", c);
  const int64_t rows = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  const int64_t groups = b.size(2), inner = b.size(3);
  STD_TORCH_CHECK(b.size(0) == rows && b.size(1) == length && groups > 0 && heads % groups == 0, op,
                  ": b ", ShapeText(b), " must have x's rows and tokens, and groups that its ",
                  "heads are a multiple of; x is ", ShapeText(x));
  const auto check = [&](const char* name, const Tensor& y, std::initializer_list<int64_t> shape) {
    CheckSameDevice(op, "x", x, name, y);
    bool same = y.dim() == static_cast<int64_t>(shape.size());
    int64_t i = 0;
    for (int64_t size : shape) same = same && y.size(i++) == size;
    STD_TORCH_CHECK(same && y.scalar_type() == ScalarType::Float, op, ": ", name,
                    " must be float32 with x's rows and heads, and b's last size; it is ",
                    torch::headeronly::toString(y.scalar_type()), " ", ShapeText(y));
  };
  check("dt", dt, {rows, length, heads});
  check("a", a, {heads});
  check("d", d, {heads});
  check("state", state, {rows, heads, inner, dim});
  STD_TORCH_CHECK(state.numel() == 0 || (state.stride(3) == 1 && state.stride(2) == dim &&
                                         state.stride(1) == inner * dim),
                  op, ": the rows of state must be contiguous");
  if (new_lens) {
    CheckSameDevice(op, "x", x, "new_lens", *new_lens);
    STD_TORCH_CHECK(new_lens->dim() == 1 && new_lens->size(0) == rows &&
                        new_lens->scalar_type() == ScalarType::Int,
                    op, ": new_lens must be int32 (", rows, ",); it is ", ShapeText(*new_lens));
  }
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor values = InLine(x), inputs = InLine(b), outputs = InLine(c);
  const Tensor steps = Contiguous(dt), rates = Contiguous(a), skips = Contiguous(d);
  const std::optional<Tensor> lens = new_lens ? std::optional(Contiguous(*new_lens)) : std::nullopt;
  params.rows = rows * heads;
  params.heads = heads;
  params.groups = heads / groups;
  params.length = length;
  params.state_dim = inner;
  params.head_dim = dim;
  params.x = ViewOf(values);
  params.b = ViewOf(inputs);
  params.c = ViewOf(outputs);
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

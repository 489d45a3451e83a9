// Checks and params shared by the bindings of ops over a recurrent state.
#pragma once

#include <initializer_list>
#include <optional>

#include "rope_binding.h"

namespace exkv {

// Checks for a float32 tensor of this shape on the device of `x`, the argument called `first`;
// `like` describes its sizes.
inline void CheckFloats(const char* op, const char* first, const Tensor& x, const char* name,
                        const Tensor& y, std::initializer_list<int64_t> shape, const char* like) {
  CheckSameDevice(op, first, x, name, y);
  bool same = y.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t size : shape) same = same && y.size(i++) == size;
  STD_TORCH_CHECK(same && y.scalar_type() == ScalarType::Float, op, ": ", name,
                  " must be float32 with ", like, "; it is ",
                  torch::headeronly::toString(y.scalar_type()), " ", ShapeText(y));
}

// Rows may be apart, as in a cache with more of them.
inline void CheckContiguousRows(const char* op, const Tensor& state) {
  if (state.numel() == 0) return;
  int64_t stride = 1;
  bool contiguous = true;
  for (int64_t i = state.dim() - 1; i > 0; stride *= state.size(i--)) {
    contiguous = contiguous && state.stride(i) == stride;
  }
  STD_TORCH_CHECK(contiguous, op, ": the rows of state must be contiguous");
}

// `new_lens` of as many rows as `x` has, contiguous.
inline std::optional<Tensor> CheckedLens(const char* op, const char* first, const Tensor& x,
                                         const std::optional<Tensor>& new_lens) {
  if (!new_lens) return std::nullopt;
  CheckRowNumbers(op, "new_lens", *new_lens, first, x, x.size(0));
  return Contiguous(*new_lens);
}

// The inputs and outputs of a state space, b and c, are alike, and of x's dtype and device.
inline void CheckInputsAndOutputs(const char* op, const Tensor& x, const Tensor& b,
                                  const Tensor& c) {
  CheckSameShape(op, "b", b, "c", c);
  CheckAlike(op, "x", x, "b", b);
  CheckAlike(op, "x", x, "c", c);
}

inline const float* FloatsOf(const Tensor& x) {
  return static_cast<const float*>(x.const_data_ptr());
}

template <typename Params>
void FillStateSpace(Params& params, const Tensor& dt, const Tensor& a, const Tensor& d) {
  params.dt = FloatsOf(dt);
  params.a = FloatsOf(a);
  params.d = FloatsOf(d);
}

template <typename Params>
void FillState(Params& params, const Tensor& state, const std::optional<Tensor>& lens,
               Tensor& out) {
  params.new_lens = lens ? static_cast<const int32_t*>(lens->const_data_ptr()) : nullptr;
  params.state = static_cast<float*>(state.mutable_data_ptr());
  params.state_row = state.stride(0);
  params.out = out.mutable_data_ptr();
}

}  // namespace exkv

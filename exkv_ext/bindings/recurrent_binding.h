// What the bindings of ops over a recurrent state check alike.
#pragma once

#include <initializer_list>
#include <optional>

#include "rope_binding.h"

namespace exkv {

// A float32 tensor of this shape on the device of `x`, the argument called `first`; `like` says in
// words what its sizes are.
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

// Rows may lie apart, as in a cache that has more of them.
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

}  // namespace exkv

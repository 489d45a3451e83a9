// The ops that are made of others, exkv/ops/layer.py's, with one call from Python for all of them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <vector>

#include "binding.h"

namespace exkv {

// (B, T, N) -> (B, T, N / head_dim, head_dim).
inline Tensor InHeads(const Tensor& x, int64_t head_dim) {
  const std::array<int64_t, 4> shape{x.size(0), x.size(1), x.size(2) / head_dim, head_dim};
  return InShape(x, {shape.data(), shape.size()});
}

// (B, T, H, D) -> (B, T, H * D).
inline Tensor OutOfHeads(const Tensor& x) {
  const std::array<int64_t, 3> shape{x.size(0), x.size(1), x.size(2) * x.size(3)};
  return InShape(x, {shape.data(), shape.size()});
}

inline void CheckHeadsWanted(const Tensor& x, const std::vector<Tensor>& weights,
                             int64_t head_dim) {
  STD_TORCH_CHECK(x.dim() == 3, "attention_heads: x must be (B, T, hidden); it is ", ShapeText(x));
  STD_TORCH_CHECK(weights.size() == 3, "attention_heads: weights are ", weights.size(),
                  ", and must be those of queries, keys and values");
  for (const Tensor& weight : weights) {
    STD_TORCH_CHECK(head_dim > 0 && weight.dim() == 2 && weight.size(0) % head_dim == 0,
                    "attention_heads: weight ", ShapeText(weight), " is not of heads of ",
                    head_dim);
  }
}

// Which of the two activations that the ops for whole networks know.
inline bool IsGelu(const char* op, const std::string& act) {
  const bool gelu = act == "gelu_pytorch_tanh";
  STD_TORCH_CHECK(gelu || act == "silu", op, ": act is ", act,
                  "; it must be silu or gelu_pytorch_tanh");
  return gelu;
}

inline void CheckNetwork(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  STD_TORCH_CHECK(weights.size() == 3, "add_network: weights are ", weights.size(),
                  ", and must be those of gate, up and down");
  STD_TORCH_CHECK(biases.empty() || biases.size() == 3, "add_network: ", biases.size(),
                  " biases for 3 weights; give one for each, or none");
}

inline Tensor FirstRows(const Tensor& x, int64_t rows) {
  return x.size(0) == rows ? x : torch::stable::narrow(const_cast<Tensor&>(x), 0, 0, rows);
}

// The ops for plain caches are told twice where their new tokens end: by `kv_len` for all rows, and
// by a number for each.
inline void CheckEnds(const char* op, const Tensor& x, const Tensor& past_lens, int64_t kv_len) {
  CheckSameDevice(op, "x or q", x, "past_lens", past_lens);
  STD_TORCH_CHECK(past_lens.scalar_type() == ScalarType::Int && past_lens.dim() == 1 &&
                      past_lens.size(0) == x.size(0),
                  op, ": past_lens must be int32 (", x.size(0), "), a number for each row; it is ",
                  torch::headeronly::toString(past_lens.scalar_type()), " ", ShapeText(past_lens));
  const Tensor lens = Contiguous(past_lens);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const int64_t past = lens.const_data_ptr<int32_t>()[row];
    STD_TORCH_CHECK(past >= 0 && past + x.size(1) == kv_len, op, ": row ", row, " has ", past,
                    " tokens and gets ", x.size(1), ", but kv_len is ", kv_len);
  }
}

}  // namespace exkv

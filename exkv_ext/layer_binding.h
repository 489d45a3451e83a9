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
  return torch::stable::view(x, {shape.data(), shape.size()});
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

inline void CheckNetwork(const std::vector<Tensor>& weights, const std::vector<Tensor>& biases) {
  STD_TORCH_CHECK(weights.size() == 3, "add_network: weights are ", weights.size(),
                  ", and must be those of gate, up and down");
  STD_TORCH_CHECK(biases.empty() || biases.size() == 3, "add_network: ", biases.size(),
                  " biases for 3 weights; give one for each, or none");
}

}  // namespace exkv

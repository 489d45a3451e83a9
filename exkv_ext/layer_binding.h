// The ops that are made of others, exkv/ops/layer.py's, with one call from Python for all of them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstring>
#include <vector>

#include "binding.h"

namespace exkv {

// (B, T, N) -> (B, T, N / head_dim, head_dim).
inline Tensor InHeads(const Tensor& x, int64_t head_dim) {
  const std::array<int64_t, 4> shape{x.size(0), x.size(1), x.size(2) / head_dim, head_dim};
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

// What is stored, (B or more, S, H, D), must have room for the new tokens, (B, T, H, D), where
// `kv_len` ends.
inline void CheckRoom(const char* op, const char* name, const Tensor& stored, const Tensor& tokens,
                      int64_t kv_len) {
  const auto fits = [&](int64_t dim) { return stored.size(dim) == tokens.size(dim); };
  STD_TORCH_CHECK(stored.dim() == 4 && tokens.dim() == 4 && fits(2) && fits(3) &&
                      stored.size(0) >= tokens.size(0) && stored.size(1) >= kv_len &&
                      kv_len >= tokens.size(1) && stored.scalar_type() == tokens.scalar_type(),
                  op, ": ", name, " ", ShapeText(stored), " has no room for ", ShapeText(tokens),
                  " of its dtype at the end of ", kv_len, " tokens");
  CheckSameDevice(op, name, stored, "new tokens", tokens);
  STD_TORCH_CHECK(stored.size(3) <= 1 || stored.stride(3) == 1, op, ": ", name,
                  " must have a head's values beside each other");
}

// Writes the new tokens where there is room for them; returns the stored rows, as many as theirs.
inline Tensor PutTokens(const Tensor& stored, const Tensor& tokens, int64_t kv_len) {
  const Tensor rows = FirstRows(stored, tokens.size(0));
  const Tensor given = Contiguous(tokens);
  const int64_t bytes = given.element_size() * given.size(3);
  const auto* from = static_cast<const char*>(given.const_data_ptr());
  auto* to = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t row = 0; row < given.size(0); ++row) {
    for (int64_t token = 0; token < given.size(1); ++token) {
      const int64_t place =
          row * rows.stride(0) + (kv_len - given.size(1) + token) * rows.stride(1);
      for (int64_t head = 0; head < given.size(2); ++head, from += bytes) {
        std::memcpy(to + (place + head * rows.stride(2)) * given.element_size(), from, bytes);
      }
    }
  }
  return rows;
}

}  // namespace exkv

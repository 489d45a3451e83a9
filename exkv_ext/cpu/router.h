// Which experts each token takes, and with which weights: see exkv/ops/routing.py.
#pragma once

#include "../params/kv_quant_params.h"

namespace exkv {

// All tensors are contiguous; experts of a token come with the best first.
struct RouterParams {
  FloatType dtype;          // of the logits
  int64_t experts;          // E
  const void* logits;       // (N, E)
  const float* correction;  // (E), or null
  int64_t top_k;            // K
  bool sigmoid;             // scores, which are else the softmax of all
  bool normalize;           // weights by their sum, or `min_sum`, whichever is larger
  float min_sum;
  int64_t groups;  // of E / groups consecutive experts
  int64_t top_k_groups;
  int64_t best_of_group;
  float scale;
  int64_t* chosen;  // (N, K)
  float* weights;   // (N, K)
};

// Tokens [begin, end).
void RouteTokens(const RouterParams& params, int64_t begin, int64_t end);

// x becomes 1 / (1 + e^-x), in float32.
float SigmoidOf(float x);

// The i-th value of a tensor, and a value in its place, rounded.
float WideAt(const void* values, FloatType dtype, int64_t i);
void NarrowAt(float value, FloatType dtype, void* values, int64_t i);

}  // namespace exkv

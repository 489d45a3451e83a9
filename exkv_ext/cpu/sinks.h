// Attention's sinks: a score of each head that takes its share of the softmax, and has no value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace exkv {

// A head's output over its keys (dim), whose scores' log-sum-exp is `lse`, beside a sink.
inline void ShareWithSink(float* out, int64_t dim, float lse, float sink) {
  const float peak = std::max(lse, sink);
  const float own = std::exp(lse - peak), total = own + std::exp(sink - peak);
  for (int64_t i = 0; i < dim; ++i) out[i] = out[i] * own / total;
}

}  // namespace exkv

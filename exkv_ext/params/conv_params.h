// The arguments of a causal convolution of each channel: exkv/ops/recurrent.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

struct ConvParams {
  FloatType dtype;
  int64_t rows;             // B
  int64_t length;           // T
  int64_t channels;         // C
  int64_t taps;             // K, inputs that an output is made of
  const void* x;            // (B, T, C), whose channels are neighbours
  int64_t x_row;            // values from a row to the next
  int64_t x_token;          // likewise
  const void* weight;       // (C, K), the newest input's factor last
  const void* bias;         // (C), or null
  const int32_t* new_lens;  // (B,), real tokens; null for all
  void* state;              // (B, K - 1, C), the inputs before
  int64_t state_row;        // values from a sequence's state to the next
  void* out;                // (B, T, C)
};

}  // namespace exkv

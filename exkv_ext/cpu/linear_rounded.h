// Linear layers for many rows of x, quantized to 8 or 16 bits (byte_panels.inc).
#pragma once

#include <cstdint>

#include "../params/kv_quant_params.h"

namespace exkv {

inline constexpr int64_t kRoundedTile = 16;  // outputs; threads are given whole tiles

// x to quantize; its inputs are taken in `order` unless that is null.
struct RoundedInput {
  FloatType dtype;
  int64_t rows;
  int64_t inputs;
  const void* x;  // (rows, inputs) contiguous
  const int32_t* order;
  bool words;  // to 16 bits, not 8
};

// A product.
struct RoundedCall {
  FloatType dtype;  // of bias and out
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  const char* input;  // what `round` made of x
  const void* bias;   // (outputs), or null
  void* out;          // (rows, outputs)
  bool words;
};

// One instruction set's functions for all formats; null if it has none, and then the ops'
// references run.
struct RoundedKernels {
  // Bytes of quantized x (rows, inputs).
  int64_t (*bytes)(int64_t rows, int64_t inputs, bool words);
  // Rows [begin, end) of x -> their place in `space`.
  void (*round)(const RoundedInput& input, char* space, int64_t begin, int64_t end);
};

}  // namespace exkv

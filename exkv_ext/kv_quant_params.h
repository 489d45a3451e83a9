// What a kv_quant kernel is told, on any device. Free of torch, so that kernels stay so too.
//
// The format is exkv/ops/kv_quant.py's, and so is every rounding: results are bit-identical to
// that reference on the CPU.
#pragma once

#include <cstdint>

namespace exkv {

inline constexpr int64_t kGroup = 32;         // values that share a scale
inline constexpr float kLevels = 127.0f;      // the largest int8 magnitude in use
inline constexpr float kMaxScale = 65504.0f;  // float16's largest number

enum class FloatType { kFloat32, kFloat16, kBFloat16 };

// All tensors are contiguous; a float16 scale is passed by its bits.
struct QuantizeParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t groups;    // scales of a row: ceil(dim / kGroup)
  const void* x;     // (rows, dim) of dtype
  int8_t* values;    // (rows, dim)
  uint16_t* scales;  // (rows, groups)
};

struct DequantizeParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t groups;
  const int8_t* values;    // (rows, dim)
  const uint16_t* scales;  // (rows, groups)
  void* x;                 // (rows, dim) of dtype
};

}  // namespace exkv

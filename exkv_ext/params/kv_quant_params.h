// The arguments of kv_quant kernels, on any device. Free of torch, so that kernels stay so too.
//
// The formats are those of exkv/ops/kv_quant.py and exkv/ops/kv_formats.py, and so is every
// rounding: results are bit-identical to these references on the CPU.
#pragma once

#include <cstdint>

namespace exkv {

inline constexpr int64_t kGroup = 32;         // values that share a scale
inline constexpr float kLevels = 127.0f;      // the largest int8 magnitude in use
inline constexpr float kMaxScale = 65504.0f;  // float16's largest number

enum class FloatType { kFloat32, kFloat16, kBFloat16 };

// Rows of values in groups that share a scale. All tensors are contiguous; a float16 scale is
// passed by its bits.
struct GroupedRows {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t groups;  // scales of a row: ceil(dim / kGroup)
};

struct QuantizeParams : GroupedRows {
  const void* x;     // (rows, dim) of dtype
  int8_t* values;    // (rows, dim)
  uint16_t* scales;  // (rows, groups)
};

struct DequantizeParams : GroupedRows {
  const int8_t* values;    // (rows, dim)
  const uint16_t* scales;  // (rows, groups)
  void* x;                 // (rows, dim) of dtype
};

// Values of 4 or 2 bits, with an offset for each group beside its scale.
struct PackedRows : GroupedRows {
  int64_t bits;
  int64_t bytes;  // of a row: ceil(dim * bits / 8)
};

struct PackParams : PackedRows {
  const void* x;      // (rows, dim) of dtype
  uint8_t* packed;    // (rows, bytes)
  uint16_t* scales;   // (rows, groups)
  uint16_t* offsets;  // (rows, groups)
};

struct UnpackParams : PackedRows {
  const uint8_t* packed;    // (rows, bytes)
  const uint16_t* scales;   // (rows, groups)
  const uint16_t* offsets;  // (rows, groups)
  void* x;                  // (rows, dim) of dtype
};

struct HadamardParams {
  FloatType dtype;
  int64_t rows;
  int64_t dim;
  int64_t block;  // the largest power of two that divides dim
  float factor;   // block^-1/2
  const void* x;  // (rows, dim) of dtype
  void* out;
};

}  // namespace exkv

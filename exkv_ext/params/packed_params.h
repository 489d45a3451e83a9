// A weight matrix whose rows are packed as a checkpoint has them: ggml's blocks, floats of 8 or 4
// bits, or indices into a table of 16 values. How they lie: exkv/weights/gguf.py, fp8.py, mxfp4.py,
// bitsandbytes.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int64_t kPackedChunk = 32;  // inputs, of which a row has a multiple

// What the first number of a layout says: -1 for the first, and so on (exkv/weights/tiles.py).
// kSections are a GroupsMatrix.
enum class Packing { kGgml, kFloat8, kTable, kSections, kFloat4 };

// ggml's types that have kernels, by ggml's own numbers.
enum class GgmlType {
  kQ2K = 10,
  kQ3K,
  kQ4K,
  kQ5K,
  kQ6K,
  kIq2Xxs = 16,
  kIq2Xs,
  kIq3Xxs,
  kIq1S,
  kIq4Nl,
  kIq3S,
  kIq2S,
  kIq4Xs,
  kIq1M = 29
};

// Whether only the CPU has kernels for the type.
inline bool IsOfPoints(GgmlType type) {
  return type >= GgmlType::kIq2Xxs && type != GgmlType::kIq4Nl && type != GgmlType::kIq4Xs;
}

struct GgmlSize {
  int64_t weights;  // of a block
  int64_t bytes;
};

inline GgmlSize SizeOf(GgmlType type) {
  switch (type) {
    case GgmlType::kQ2K:
      return {256, 84};
    case GgmlType::kQ3K:
      return {256, 110};
    case GgmlType::kQ4K:
      return {256, 144};
    case GgmlType::kQ5K:
      return {256, 176};
    case GgmlType::kQ6K:
      return {256, 210};
    case GgmlType::kIq2Xxs:
      return {256, 66};
    case GgmlType::kIq2Xs:
      return {256, 74};
    case GgmlType::kIq2S:
      return {256, 82};
    case GgmlType::kIq3Xxs:
      return {256, 98};
    case GgmlType::kIq3S:
      return {256, 110};
    case GgmlType::kIq1S:
      return {256, 50};
    case GgmlType::kIq1M:
      return {256, 56};
    case GgmlType::kIq4Nl:
      return {32, 18};
    case GgmlType::kIq4Xs:
      return {256, 136};
  }
  return {0, 0};
}

enum class ScaleType { kFloat32, kFloat16, kBFloat16, kPowers };  // kPowers: 2^(byte - 127)

struct PackedMatrix {
  Packing packing;
  GgmlType type;  // of ggml's blocks
  int64_t inputs;
  int64_t outputs;
  int64_t row_bytes;
  const uint8_t* rows;  // (outputs, row_bytes)

  // 8-bit floats, e4m3: (ceil(outputs / high), ceil(inputs / wide)) scales. 4-bit ones, e2m1, the
  // first of two in a byte's lower half: (outputs, inputs / kPackedChunk), kPowers.
  int64_t high;
  int64_t wide;  // a multiple of kPackedChunk, or inputs
  ScaleType scale_type;
  const void* scale;

  // Of a table's indices, the first of two in a byte's upper half: each block of weights, row after
  // row, has a largest magnitude; where it is quantized, it is nested_table[magnitude] *
  // nested[block of 256 blocks] + offset.
  int64_t block;              // a power of two, 32 or more
  const float* table;         // (16)
  const void* magnitudes;     // float, or uint8 where they are nested
  const float* nested;        // or null
  const float* nested_table;  // (256)
  const float* offset;        // (1)

  int64_t chunks() const { return inputs / kPackedChunk; }
};

}  // namespace exkv

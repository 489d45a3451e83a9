// A weight matrix whose rows are packed as a checkpoint has them: ggml's blocks, floats of 8 or 4
// bits, indices into a table of 16 values, or tiles of trellis codes. How they lie:
// exkv/weights/gguf.py, fp8.py, mxfp4.py, bitsandbytes.py, exl3.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int64_t kPackedChunk = 32;  // inputs, of which a row has a multiple

// What the first number of a layout says: -1 for the first, and so on (exkv/weights/tiles.py).
// kSections are a GroupsMatrix.
enum class Packing { kGgml, kFloat8, kTable, kSections, kFloat4, kTrellis };

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

// What the 16 bits of a trellis' states stand for, in the order of exkv.weights.exl3.CODEBOOKS.
enum class Codebook { k3Inst, kMcg, kMul1 };

inline constexpr int64_t kTrellisTile = 16;  // inputs, and outputs

// state * factor + addend, of 32 bits, is what values are made of.
inline constexpr uint32_t kTrellisFactors[] = {89226354u, 0xcbac1fedu, 0x83dcd12du};
inline constexpr uint32_t kTrellisAddend = 64248484u;  // of k3Inst only
// Of the others but kMul1 the two halves, with these bits and these ones turned, are added up.
inline constexpr uint32_t kTrellisMask = 0x8fff8fffu, kTrellisTurned = 0x3b603b60u;
// kMul1: (1024 + the sum of the four bytes) * step + least, rounded to a float16.
inline constexpr float kTrellisStep = 1774 * 0x1p-18f, kTrellisLeast = -1329 * 0x1p-7f;

// The last bit, and one, of the place of a tile's ring: those of half a bit more have another one
// in each second place.
inline int64_t TrellisEnd(int64_t words, int64_t place) {
  return (place + 1) * (words / 16) + (place + 1) / 2 * (words / 8 % 2);
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

  // Of a trellis: (outputs / 16, inputs / 16, words) of 16 bits, from `rows` on.
  int64_t words;  // of a tile
  Codebook codebook;

  int64_t chunks() const { return inputs / kPackedChunk; }
  int64_t tiles() const { return inputs / kTrellisTile; }  // of a trellis' outputs
};

}  // namespace exkv

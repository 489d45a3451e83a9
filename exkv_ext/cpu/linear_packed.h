// Linear layers of a few rows whose weights are packed as a checkpoint has them: one table of
// kernels for each instruction set.
#pragma once

#include <cstddef>

#include "../params/packed_params.h"
#include "linear_rounded.h"

namespace exkv {

struct PackedParams {
  PackedMatrix matrix;
  FloatType dtype;  // of x, bias and out
  int64_t rows;
  const char* input;  // what `prepare` made of x
  const void* bias;   // (outputs), or null
  void* out;          // (rows, outputs)
};

// How x is prepared, which matrices may share: integers by blocks of 256 inputs, or by chunks of
// 32, or floats.
enum class PackedInput { kBlocks, kChunks, kFloats };
inline constexpr size_t kPackedInputs = 3;

struct PackedKernels {
  PackedInput (*input_of)(const PackedMatrix& matrix);
  // Bytes that x (rows, inputs) takes as the kernel multiplies it.
  int64_t (*input_bytes)(PackedInput kind, FloatType dtype, int64_t rows, int64_t inputs);
  // x (rows, inputs) contiguous -> input.
  void (*prepare)(PackedInput kind, FloatType dtype, int64_t rows, int64_t inputs, const void* x,
                  char* input);
  // Computes outputs [begin, end) of every row. An output's sum is taken in one order, whatever the
  // range and the other rows.
  void (*run)(const PackedParams& params, int64_t begin, int64_t end);
  // Rows [begin, end) of the matrix in `dtype`, contiguous; float32 ones as ggml has them, to the
  // bit.
  void (*dequantize)(const PackedMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                     void* out);
  // Of rounded x: ggml's types and floats of 4 bits only. Outputs [begin, end) of every row, of
  // which the first is a multiple of kRoundedTile; sums in one order, too.
  RoundedKernels rounded;
  void (*run_rounded)(const PackedMatrix& matrix, const RoundedCall& call, int64_t begin,
                      int64_t end);
};

extern const PackedKernels kPackedPortable;
#if defined(__x86_64__)
extern const PackedKernels kPackedAvx2;
extern const PackedKernels kPackedVnni;
#endif

}  // namespace exkv

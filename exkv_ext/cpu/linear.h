// linear on the CPU for a few rows: one table of kernels for each instruction set. The blocking
// is in linear.inc, which each instruction set's file compiles once.
#pragma once

#include "../params/kv_quant_params.h"

namespace exkv {

// Weight rows that are read side by side; threads are given whole blocks of them.
inline constexpr int64_t kLinearBlock = 4;

inline constexpr int64_t kAllRows = INT64_MAX;
inline constexpr int64_t kAllInputs = INT64_MAX;

// All tensors are contiguous and of dtype; sums are float32.
struct LinearParams {
  FloatType dtype;
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  const void* x;       // (rows, inputs)
  const void* weight;  // (outputs, inputs), as checkpoints store it
  const void* bias;    // (outputs), or null
  void* out;           // (rows, outputs)
  // x as `widen` makes it, for calls of `run` for several ranges of outputs; or null.
  const float* wide = nullptr;
};

struct LinearKernels {
  // Computes outputs [begin, end) of every row. An output's sum runs over the inputs in one order,
  // whatever the range, the other rows and the machine's load.
  void (*run)(const LinearParams& params, int64_t begin, int64_t end);
  // Floats that x takes where it is widened before it is multiplied, and makes them, unless `to` is
  // null; 0 where `run` doesn't want that, or has to do it piece by piece.
  int64_t (*widen)(const LinearParams& params, float* to);
  // More rows than this are torch's own, whose kernels are faster there as far as was measured
  // (with torch capped to the same instructions): python -m tests.bench kernels.
  int64_t (*max_rows)(FloatType dtype);
};

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAvx512Bf16;
#endif

}  // namespace exkv

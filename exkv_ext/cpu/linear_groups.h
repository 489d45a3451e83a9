// Linear layers of a few rows whose weights are integers in groups: one table of kernels for each
// instruction set. The arithmetic is in linear_groups.inc, which each one's file compiles once.
#pragma once

#include "../params/groups_params.h"
#include "linear_rounded.h"

namespace exkv {

struct GroupsParams {
  GroupsMatrix matrix;
  FloatType dtype;  // of x, bias and out
  int64_t rows;
  const char* input;  // what `prepare` made of x
  const void* bias;   // (outputs), or null
  void* out;          // (rows, outputs)
};

struct GroupsKernels {
  // Bytes that x (rows, inputs) takes as the kernel multiplies it.
  int64_t (*input_bytes)(FloatType dtype, int64_t rows, int64_t inputs);
  // x (rows, inputs) contiguous, its inputs in `order` where that is not null -> input.
  void (*prepare)(FloatType dtype, int64_t rows, int64_t inputs, const void* x,
                  const int32_t* order, char* input);
  // Computes outputs [begin, end) of every row; begin is a multiple of kGroupsBlock. An output's
  // sum is taken in one order, whatever the range and the other rows.
  void (*run)(const GroupsParams& params, int64_t begin, int64_t end);
  // Rows [begin, end) of the matrix in `dtype`, contiguous; begin as above. Columns stay in order.
  void (*dequantize)(const GroupsMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                     void* out);
  // Of rounded x, of a matrix without sections. Outputs [begin, end) of every row, of which the
  // first is a multiple of kRoundedTile; sums in one order, too.
  RoundedKernels rounded;
  void (*run_rounded)(const GroupsMatrix& matrix, const RoundedCall& call, int64_t begin,
                      int64_t end);
};

extern const GroupsKernels kGroupsPortable;
#if defined(__x86_64__)
extern const GroupsKernels kGroupsAvx2;
extern const GroupsKernels kGroupsVnni;
#endif

}  // namespace exkv

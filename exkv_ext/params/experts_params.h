// Products of a few rows with the experts that each of them chose: exkv/ops/experts.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int kMostExperts = 512;  // whose addresses a launch can hold

struct ExpertsParams {
  FloatType dtype;
  int64_t pairs;     // rows times choices
  int64_t taken;     // choices of a row
  int64_t x_row;     // values from a row's input to the next, and
  int64_t x_choice;  // from one choice's to the next: 0 where they share it
  int64_t inputs;
  int64_t outputs;
  int64_t experts;
  const int64_t* chosen;  // (rows, taken)
  const void* x;
  void* out;                         // (rows, taken, outputs)
  const void* weight[kMostExperts];  // (outputs, inputs) each
  const void* bias[kMostExperts];    // (outputs) each, or null
};

inline constexpr int kMatrixParts = 4;  // tensors of a matrix of few bits
inline constexpr int kChosenRows = 8;   // that one reading of a matrix serves

// The matrix of some pairs of a row and a choice, as a kernel finds it on the device.
struct ChosenMatrix {
  const void* parts[kMatrixParts];
  const void* bias;  // or null
  int count;         // of its pairs; 0 where an earlier pair's reading serves them
  int pairs[kChosenRows];
};
static_assert(sizeof(ChosenMatrix) == 80, "as exkv/planning/kernel_uses.py has it");

struct ChoiceParams {
  FloatType dtype;
  int64_t pairs;
  int64_t outputs;
  int64_t experts;
  const int64_t* chosen;  // (pairs)
  void* out;              // (pairs, outputs)
  ChosenMatrix* found;    // (pairs)
  const void* parts[kMostExperts][kMatrixParts];
  const void* bias[kMostExperts];
};

// What a launch for one matrix needs to know to run for chosen ones in its place.
struct ChosenCall {
  const ChosenMatrix* found = nullptr;
  int64_t pairs = 0;
  int64_t taken = 1;  // choices that share a row of x
};

}  // namespace exkv

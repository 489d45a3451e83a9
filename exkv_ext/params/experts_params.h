// Products of a few rows with the experts that each of them chose: exkv/ops/experts.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int kMostExperts = 128;  // whose addresses a launch can hold

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
};

}  // namespace exkv

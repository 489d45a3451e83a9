// linear_packed for any processor: a row of weights becomes floats, then meets every row of x.
#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "gguf_grids.h"
#include "half.inc"
#include "linear_packed.h"
#include "scratch.h"
#include "simd_portable.inc"
// Written in those vectors:
#include "packed_values.inc"

namespace exkv {
namespace {

PackedInput InputOf(const PackedMatrix&) { return PackedInput::kFloats; }

int64_t InputBytes(PackedInput, FloatType, int64_t rows, int64_t inputs) {
  return rows * inputs * int64_t{sizeof(float)};
}

void Prepare(PackedInput, FloatType dtype, int64_t rows, int64_t inputs, const void* x,
             char* space) {
  PrepareFloats(dtype, rows, inputs, x, space);
}

void Run(const PackedParams& p, int64_t begin, int64_t end) {
  thread_local Scratch memory;
  const int64_t inputs = p.matrix.inputs;
  float* weights = memory.Get(inputs);
  for (int64_t output = begin; output < end; ++output) {
    RowValues(p.matrix, output, weights);
    for (int64_t row = 0; row < p.rows; ++row) {
      const float* x = reinterpret_cast<const float*>(p.input) + row * inputs;
      Vec sums[2] = {};
      for (int64_t i = 0; i < inputs; i += 2 * kLanes) {
        sums[0] = MulAdd(Load(weights + i), Load(x + i), sums[0]);
        sums[1] = MulAdd(Load(weights + i + kLanes), Load(x + i + kLanes), sums[1]);
      }
      StoreOne(p, row, output, SumOf(sums[0] + sums[1]));
    }
  }
}

}  // namespace

const PackedKernels kPackedPortable = {InputOf,    InputBytes,         Prepare, Run,
                                       Dequantize, {nullptr, nullptr}, nullptr};
}  // namespace exkv

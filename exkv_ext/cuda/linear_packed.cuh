// Linear layers of a few rows whose weights are packed as a checkpoint has them, on CUDA: what the
// bindings call. Free of torch; see ../params/packed_params.h.
#pragma once

#include "../cpu/linear_packed.h"
#include "../params/experts_params.h"
#include "launch.cuh"

namespace exkv {

// Bytes of which the address of the matrix's rows, and of each row, must be a multiple.
inline int64_t AlignmentOf(const PackedMatrix& matrix) {
  if (matrix.packing != Packing::kGgml) return 16;
  const int64_t bytes = SizeOf(matrix.type).bytes;
  return bytes & -bytes;
}

// x (rows, inputs), contiguous, at a multiple of 16 bytes; `input` of the params is not used. Only
// enqueues work.
void LaunchLinearPacked(const PackedParams& params, const void* x, cudaStream_t stream);

// By tensor cores, which take x of 16 bits, and some types of matrices; LaunchLinearPacked chooses.
// Where matrices are chosen on the device (experts.cuh), `params` has any one of them.
bool PackedFitsTensorCores(const PackedParams& params);
void LaunchPackedOnTensorCores(const PackedParams& params, const void* x, const ChosenCall& chosen,
                               cudaStream_t stream);

// Tiles of trellis codes; the others choose.
void LaunchLinearTrellis(const PackedParams& params, const void* x, cudaStream_t stream);
void LaunchDequantizeTrellis(const PackedMatrix& matrix, FloatType dtype, int64_t begin,
                             int64_t end, void* out, cudaStream_t stream);

// Rows [begin, end) of the matrix in `dtype`, contiguous.
void LaunchDequantizePacked(const PackedMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                            void* out, cudaStream_t stream);

}  // namespace exkv

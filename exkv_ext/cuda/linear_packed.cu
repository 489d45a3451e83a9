// Linear layers for a few rows by weights that are packed as a checkpoint has them, and such
// weights as floats. A warp takes two outputs; its lanes take turns at the chunks of 32 inputs, of
// which each is unpacked in registers once, for all rows of x that the block has. Sums are of
// float32, in an order that depends on the shape alone.
#include "packed_chunk.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarps = 4;    // of a block
constexpr int kOutputs = 2;  // of a warp
constexpr int kOctet = 8;    // inputs that are multiplied at once
constexpr int kThreads = kWarps * kWarp;

struct Call {
  PackedMatrix m;
  FloatType dtype;
  int rows;
  const void* x;
  const void* bias;
  void* out;
  int chunks;
};

template <typename T>
struct alignas(16) Piece {
  T at[16 / sizeof(T)];
};

template <typename T>
__device__ __forceinline__ void LoadOctet(const T* from, float (&to)[kOctet]) {
  constexpr int kOnce = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int first = 0; first < kOctet; first += kOnce) {
    const auto piece = *reinterpret_cast<const Piece<T>*>(from + first);
#pragma unroll
    for (int i = 0; i < kOnce; ++i) to[first + i] = ToFloat(piece.at[i]);
  }
}

template <typename T>
__device__ __forceinline__ void StoreOctet(const float (&from)[kOctet], T* to) {
  constexpr int kOnce = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int first = 0; first < kOctet; first += kOnce) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) piece.at[i] = FromFloat<T>(from[first + i]);
    *reinterpret_cast<Piece<T>*>(to + first) = piece;
  }
}

// Calls with a null pointer to the type.
template <typename Then>
__device__ __forceinline__ void WithType(FloatType dtype, const Then& then) {
  switch (dtype) {
    case FloatType::kFloat32:
      return then(static_cast<float*>(nullptr));
    case FloatType::kFloat16:
      return then(static_cast<__half*>(nullptr));
    case FloatType::kBFloat16:
      return then(static_cast<__nv_bfloat16*>(nullptr));
  }
}

// Adds a chunk's part of every output and row.
template <typename Chunk, int kRows>
__device__ __forceinline__ void AddChunk(const Call& p, const Chunk (&chunks)[kOutputs],
                                         const int64_t (&rows)[kRows], int64_t first,
                                         float (&sums)[kRows][kOutputs]) {
#pragma unroll
  for (int at = 0; at < kChunkInputs; at += kOctet) {
    float weights[kOutputs][kOctet];
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) weights[n][i] = chunks[n].Value(at + i);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[kOctet];
      WithType(p.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        LoadOctet(static_cast<const T*>(p.x) + rows[r] * p.m.inputs + first + at, x);
      });
#pragma unroll
      for (int n = 0; n < kOutputs; ++n) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) sums[r][n] = fmaf(weights[n][i], x[i], sums[r][n]);
      }
    }
  }
}

__device__ __forceinline__ void StoreSum(const Call& p, int64_t row, int64_t output, float sum) {
  WithType(p.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (p.bias != nullptr) sum += ToFloat(static_cast<const T*>(p.bias)[output]);
    static_cast<T*>(p.out)[row * p.m.outputs + output] = FromFloat<T>(sum);
  });
}

// Grid: the outputs of a block's warps, and kRows rows of x. What is not there repeats the last
// one.
template <typename Chunk, int kRows>
__global__ void __launch_bounds__(kThreads, 2) LinearPackedKernel(Call p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kOutputs;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  int64_t rows[kRows], outputs[kOutputs];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = min(first_row + r, p.rows - 1);
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) outputs[n] = min(first + n, p.m.outputs - 1);
  float sums[kRows][kOutputs] = {};
  for (int chunk = lane; chunk < p.chunks; chunk += kWarp) {
    Chunk chunks[kOutputs];
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) chunks[n].LoadFrom(p.m, outputs[n], chunk);
    AddChunk<Chunk, kRows>(p, chunks, rows, int64_t{chunk} * kChunkInputs, sums);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
      float sum = sums[r][n];
      for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      const bool is_there = first_row + r < p.rows && first + n < p.m.outputs;
      if (lane == 0 && is_there) StoreSum(p, first_row + r, first + n, sum);
    }
  }
}

template <typename Chunk, int kRows>
void Launch(const Call& p, cudaStream_t stream) {
  constexpr int kBlock = kWarps * kOutputs;
  const dim3 grid(static_cast<unsigned>((p.m.outputs + kBlock - 1) / kBlock),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  const auto kernel = LinearPackedKernel<Chunk, kRows>;
  EXKV_LAUNCH(kernel, grid, kThreads, 0, stream, p);
}

// A thread takes a chunk.
template <typename Chunk>
__global__ void __launch_bounds__(kThreads) DequantizePackedKernel(Call p, int64_t begin) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = index / p.chunks, at = index % p.chunks;
  if (row >= p.rows) return;
  Chunk chunk;
  chunk.LoadFrom(p.m, begin + row, at);
#pragma unroll
  for (int first = 0; first < kChunkInputs; first += kOctet) {
    float values[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = chunk.Value(first + i);
    WithType(p.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      StoreOctet(values, static_cast<T*>(p.out) + index * kChunkInputs + first);
    });
  }
}

}  // namespace

void LaunchLinearPacked(const PackedParams& params, const void* x, cudaStream_t stream) {
  if (params.matrix.packing == Packing::kTrellis) return LaunchLinearTrellis(params, x, stream);
  if (PackedFitsTensorCores(params)) return LaunchPackedOnTensorCores(params, x, {}, stream);
  const PackedMatrix& m = params.matrix;
  const Call p{m,           params.dtype, static_cast<int>(params.rows), x,
               params.bias, params.out,   static_cast<int>(m.chunks())};
  WithChunk(m, [&](auto chunk) {
    using Chunk = decltype(chunk);
    return p.rows == 1 ? Launch<Chunk, 1>(p, stream) : Launch<Chunk, 4>(p, stream);
  });
}

void LaunchDequantizePacked(const PackedMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                            void* out, cudaStream_t stream) {
  if (matrix.packing == Packing::kTrellis) {
    return LaunchDequantizeTrellis(matrix, dtype, begin, end, out, stream);
  }
  const Call p{matrix,  dtype, static_cast<int>(end - begin),    nullptr,
               nullptr, out,   static_cast<int>(matrix.chunks())};
  const int64_t blocks = ((end - begin) * matrix.chunks() + kThreads - 1) / kThreads;
  WithChunk(matrix, [&](auto chunk) {
    const auto kernel = DequantizePackedKernel<decltype(chunk)>;
    EXKV_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, p, begin);
  });
}

}  // namespace exkv

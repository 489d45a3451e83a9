// What the linear kernels on tensor cores (mma.cuh) share that read weights of few bits: 16 outputs
// are the rows of a first factor, eight rows of x the columns of the second. A block has one such
// tile, whose inputs its warps take turns at; what they find is added up in their order, so that a
// sum depends on the shape alone. Where rows choose among matrices, a tile is of one of these, and
// has rows that chose it.
#pragma once

#include "../params/experts_params.h"
#include "floats.cuh"
#include "mma.cuh"

namespace exkv {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // of a block
constexpr int kOutputs = 16;
constexpr int kColumns = 8;  // rows of x
static_assert(kColumns == kChosenRows, "a tile has the rows that one reading serves");

struct TileCall {
  int64_t inputs;
  int64_t outputs;
  int rows;
  unsigned row_blocks;  // of kColumns
  const void* x;
  const void* bias;
  void* out;
  const ChosenMatrix* chosen;  // of each row block, in place of the one matrix; or null
  int taken;                   // choices that share a row of x
};

template <typename Params>
TileCall TileCallOf(const Params& params, const void* x, const ChosenCall& chosen = {}) {
  const int64_t blocks = chosen.found ? chosen.pairs : (params.rows + kColumns - 1) / kColumns;
  return {params.matrix.inputs,
          params.matrix.outputs,
          static_cast<int>(params.rows),
          static_cast<unsigned>(blocks),
          x,
          params.bias,
          params.out,
          chosen.found,
          static_cast<int>(chosen.taken)};
}

// A pointer to global memory as a value of its own. Else the compiler adds up anew what led to it,
// with the index, at each load.
template <typename V>
__device__ __forceinline__ const V* Pinned(const V* pointer) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Which outputs and rows a block has. Blocks of the same outputs are neighbours in the grid, so
// that all but the first find their codes in the L2 cache.
struct Tile {
  int64_t first;
  int first_row;
  int rows;                    // 0 of a choice that another block serves
  const ChosenMatrix* chosen;  // or null
};

__device__ __forceinline__ Tile FindTile(const TileCall& p) {
  const unsigned block = blockIdx.x % p.row_blocks;
  const int64_t first = int64_t{blockIdx.x / p.row_blocks} * kOutputs;
  if (p.chosen != nullptr) return {first, 0, p.chosen[block].count, p.chosen + block};
  const int row = static_cast<int>(block) * kColumns;
  return {first, row, min(p.rows - row, kColumns), nullptr};
}

// The row of the output that a tile's row is.
__device__ __forceinline__ int OutputRow(const Tile& tile, int row) {
  return tile.chosen == nullptr ? tile.first_row + row : tile.chosen->pairs[row];
}

template <typename Kernel, typename Call>
void LaunchTiles(const Kernel& kernel, const Call& p, cudaStream_t stream) {
  const int64_t tiles = (p.outputs + kOutputs - 1) / kOutputs;
  constexpr size_t kBytes = sizeof(float) * kWarps * kOutputs * kColumns;
  const dim3 grid(static_cast<unsigned>(tiles * p.row_blocks));
  EXKV_LAUNCH(kernel, grid, kWarp * kWarps, kBytes, stream, p);
}

// Row l / 4 of a tile, for lane l. A row that is not there repeats the last one.
__device__ __forceinline__ const uint16_t* RowOfLane(const TileCall& p, const Tile& tile) {
  const int row = OutputRow(tile, min(static_cast<int>(threadIdx.x) % kWarp / 4, tile.rows - 1));
  const int64_t of_x = tile.chosen == nullptr ? row : row / p.taken;
  return static_cast<const uint16_t*>(p.x) + of_x * p.inputs;
}

// The bits of a word from `at` on, or from before its first one.
__device__ __forceinline__ uint32_t ShiftDown(uint32_t word, int at) {
  return at >= 0 ? word >> at : word << -at;
}

// Two floats whose lowest bits a code of up to seven bits becomes: 1024 in float16, 128 in
// bfloat16.
template <typename T>
constexpr uint32_t kBase = std::is_same<T, __half>::value ? 0x64006400u : 0x43004300u;

// Adds x, as Multiply has it, to its sums.
template <typename T>
__device__ __forceinline__ void AddInputs(uint32_t low, uint32_t high, float (&inputs)[4]) {
  constexpr uint32_t kOne = std::is_same<T, __half>::value ? 0x3c003c00u : 0x3f803f80u;
  const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
  Multiply<T>(inputs, ones, low, high);
}

// Adds up what a block's warps have found. `own`: a lane's two outputs of the tile, which is looked
// up once more: it would take registers in the meantime.
template <typename T>
__device__ __forceinline__ void StoreTile(const TileCall& p, const int (&own)[2],
                                          const float (&sums)[4]) {
  EXKV_DYNAMIC_SHARED(float, partial);  // (warps, outputs, rows)
  const int i = static_cast<int>(threadIdx.x), warp = i / kWarp, place = i % 4;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    partial[(warp * kOutputs + own[c / 2]) * kColumns + place * 2 + c % 2] = sums[c];
  }
  __syncthreads();
  const Tile tile = FindTile(p);
  const int64_t output = tile.first + i % kOutputs;
  if (i / kOutputs >= tile.rows || output >= p.outputs) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    sum += partial[(w * kOutputs + i % kOutputs) * kColumns + i / kOutputs];
  }
  const void* bias = tile.chosen == nullptr ? p.bias : tile.chosen->bias;
  if (bias != nullptr) sum += ToFloat(static_cast<const T*>(bias)[output]);
  const int64_t row = OutputRow(tile, i / kOutputs);
  static_cast<T*>(p.out)[row * p.outputs + output] = FromFloat<T>(sum);
}

}  // namespace exkv

// Linear layers for a few rows by codes as they lie, on tensor cores: what linear_groups_tensor.cu
// has no kernel for, codes in planes or of 2 bits, and inputs that were sorted. A block's warps
// take turns at the chunks; what a matrix has is looked up at each.
#include "groups_tensor.cuh"

namespace exkv {
namespace {

template <int kBits>
struct Chunk {
  Octet<kBits> octets[kBlocks];
  uint32_t x[kOctet / 2];  // of row l / 4
};

// Zeros where there is no such row.
__device__ __forceinline__ void LoadInputs(const GroupsTensorCall& p, int row, int64_t first,
                                           uint32_t (&to)[kOctet / 2]) {
#pragma unroll
  for (uint32_t& pair : to) pair = 0;
  if (row >= p.rows) return;
  const auto* x = static_cast<const uint16_t*>(p.x) + row * p.m.inputs;
  if (p.m.order != nullptr) {
    const int32_t* order = p.m.order + first;
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) {
      to[i] = uint32_t{x[order[2 * i]]} | uint32_t{x[order[2 * i + 1]]} << 16;
    }
  } else {
    struct alignas(16) Four {
      uint32_t at[kOctet / 2];
    };
    const Four four = *reinterpret_cast<const Four*>(x + first);
#pragma unroll
    for (int i = 0; i < kOctet / 2; ++i) to[i] = four.at[i];
  }
}

// Adds one chunk's part.
template <typename T, int kBits>
__device__ __forceinline__ void AddChunk(const GroupsMatrix& m, const Chunk<kBits>& chunk,
                                         int place, float (&sums)[4]) {
  float products[4] = {};
#pragma unroll
  for (int i = 0; i < kOctet / 2; i += 2) {
    uint32_t a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[j] = Centered<T, kBits>(CodePair(chunk.octets[j % 2], m.bits, place, i + j / 2), m.bits);
    }
    Multiply<T>(products, a, chunk.x[i], chunk.x[i + 1]);
  }
  const ScaleAndOffset scales[2] = {ScaleOf(m, chunk.octets[0]), ScaleOf(m, chunk.octets[1])};
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[c] = fmaf(scales[c / 2].scale, products[c], sums[c]);
  if (m.beside == GroupsShift::kSymmetric) return;
  float inputs[4] = {};
#pragma unroll
  for (int i = 0; i < kOctet / 2; i += 2) AddInputs<T>(chunk.x[i], chunk.x[i + 1], inputs);
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[c] = fmaf(scales[c / 2].offset, inputs[c], sums[c]);
}

template <typename T, int kBits>
__device__ __forceinline__ void AddTile(const GroupsTensorCall& p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, place = lane % 4;
  const Tile tile = FindTile(p);
  const int64_t block = tile.first / kGroupsBlock;
  // A block of outputs that is not there repeats the last one.
  const int64_t last = (p.m.outputs - 1) / kGroupsBlock;
  const Output outputs[kBlocks] = {FindOutput<kBits>(p, block, lane),
                                   FindOutput<kBits>(p, min(block + 1, last), lane)};
  float sums[4] = {};
  for (int chunk = warp; chunk < p.chunks; chunk += kWarps * kDeep) {
    Chunk<kBits> chunks[kDeep];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      // What is not there is multiplied by inputs that are zero.
      const int at = min(chunk + i * kWarps, p.chunks - 1);
      const int row = chunk + i * kWarps < p.chunks ? tile.first_row + lane / 4 : p.rows;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        chunks[i].octets[b] = LoadOctet<kBits>(p, outputs[b], at);
      }
      LoadInputs(p, row, int64_t{at} * kGroupsChunk + place * kOctet, chunks[i].x);
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) AddChunk<T, kBits>(p.m, chunks[i], place, sums);
  }
  StoreTile<T>(p, tile, {lane / 4, lane / 4 + 8}, sums);
}

template <typename T, int kBits>
__global__ void __launch_bounds__(kWarp* kWarps, 2) GroupsPlanesKernel(GroupsTensorCall p) {
  if (kForTensorCores) AddTile<T, kBits>(p);
}

template <typename T>
void LaunchBits(const GroupsTensorCall& p, cudaStream_t stream) {
  switch (p.m.bits) {
    case 8:
      return LaunchTiles(GroupsPlanesKernel<T, 8>, p, stream);
    case 4:
      return LaunchTiles(GroupsPlanesKernel<T, 4>, p, stream);
    default:
      return LaunchTiles(GroupsPlanesKernel<T, 0>, p, stream);
  }
}

}  // namespace

void LaunchGroupsInPlanes(const GroupsTensorCall& p, FloatType dtype, cudaStream_t stream) {
  return dtype == FloatType::kFloat16 ? LaunchBits<__half>(p, stream)
                                      : LaunchBits<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

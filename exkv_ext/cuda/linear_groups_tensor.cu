// Linear layers for a few rows by codes as they lie, on tensor cores, for x of 16 bits: a block's
// warps take turns at the chunks of 16 outputs, which are the rows of a first factor, and eight
// rows of x the columns of the second (mma.cuh). Codes become 16-bit floats exactly, less the
// middle of their range; a chunk's products are scaled in float32, and what a weight's offset adds
// is multiplied by the chunk's sum of x, a product with ones. Sums run in an order that depends on
// the shape alone.
//
// An H100 reads codes of 4 bits at 0.4 of a copy's bandwidth, of 8 at 0.6. Neither more loads under
// way nor fewer scales made it faster: what counts is instructions for each chunk of 32 inputs.
#include "groups_codes.cuh"
#include "mma.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;   // of a block
constexpr int kBlocks = 2;  // of eight outputs, of a block of threads
constexpr int kOutputs = kBlocks * static_cast<int>(kGroupsBlock);
constexpr int kColumns = 8;  // rows of x
constexpr int kDeep = 4;     // chunks that a warp has under way

// Blocks of a multiprocessor, for which there are registers: the compiler takes more of them
// from 10.0 on, and without tensor cores, where this is never launched.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000)
template <int kBits, bool kOrdered>
constexpr int kBlocksAtOnce = 2;
#else
template <int kBits, bool kOrdered>
constexpr int kBlocksAtOnce = kBits == 4 && !kOrdered ? 3 : 2;
#endif

struct Call : GroupsCall {
  int rows;
  const void* x;
  const void* bias;
  void* out;
};

template <int kBits>
struct Chunk {
  Octet<kBits> octets[kBlocks];
  uint32_t x[kOctet / 2];  // of row l / 4
};

// Zeros where there is no such row.
template <typename T, bool kOrdered>
__device__ __forceinline__ void LoadInputs(const Call& p, int row, int64_t first,
                                           uint32_t (&to)[kOctet / 2]) {
#pragma unroll
  for (uint32_t& pair : to) pair = 0;
  if (row >= p.rows) return;
  const auto* x = static_cast<const uint16_t*>(p.x) + row * p.m.inputs;
  if constexpr (kOrdered) {
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

// Two codes less the middle of their range.
template <typename T, int kBits>
__device__ __forceinline__ uint32_t Centered(uint32_t codes, int64_t bits) {
  constexpr bool kIsHalf = std::is_same<T, __half>::value;
  if constexpr (kBits == 8 && !kIsHalf) {
    // 128 + the lower seven bits, less 128 where there is an eighth, or 256.
    return SubtractPairs<T>((codes & 0x007f007fu) | 0x43004300u,
                            (codes & 0x00800080u) ^ 0x43804380u);
  } else {
    // The lowest bits of 1024, or of 128.
    constexpr uint32_t kBase = kIsHalf ? 0x64006400u : 0x43004300u;
    const uint32_t middle = kBits > 0 ? (1u << kBits) / 2 : 1u << (bits - 1);
    return SubtractPairs<T>(codes | kBase, kBase + middle * 0x10001u);
  }
}

template <typename T>
constexpr uint32_t kOnes = std::is_same<T, __half>::value ? 0x3c003c00u : 0x3f803f80u;

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
  const uint32_t ones[4] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
#pragma unroll
  for (int i = 0; i < kOctet / 2; i += 2) Multiply<T>(inputs, ones, chunk.x[i], chunk.x[i + 1]);
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[c] = fmaf(scales[c / 2].offset, inputs[c], sums[c]);
}

// Grid: 16 outputs, and eight rows, a block.
template <typename T, int kBits, bool kOrdered>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksAtOnce<kBits, kOrdered>)
    TensorGroupsKernel(Call p) {
  EXKV_DYNAMIC_SHARED(float, partial);  // (warps, outputs, rows)
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, place = lane % 4;
  const int first_row = static_cast<int>(blockIdx.y) * kColumns;
  const int64_t first = int64_t{blockIdx.x} * kOutputs;
  // A block of outputs that is not there repeats the last one.
  const int64_t last = (p.m.outputs - 1) / kGroupsBlock;
  const Output outputs[kBlocks] = {FindOutput<kBits>(p, first / kGroupsBlock, lane),
                                   FindOutput<kBits>(p, min(first / kGroupsBlock + 1, last), lane)};
  float sums[4] = {};
  for (int chunk = warp; chunk < p.chunks; chunk += kWarps * kDeep) {
    Chunk<kBits> chunks[kDeep];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      // What is not there is multiplied by inputs that are zero.
      const int at = min(chunk + i * kWarps, p.chunks - 1);
      const int row = chunk + i * kWarps < p.chunks ? first_row + lane / 4 : p.rows;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        chunks[i].octets[b] = LoadOctet<kBits>(p, outputs[b], at);
      }
      LoadInputs<T, kOrdered>(p, row, int64_t{at} * kGroupsChunk + place * kOctet, chunks[i].x);
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) AddChunk<T, kBits>(p.m, chunks[i], place, sums);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int output = lane / 4 + c / 2 * 8, row = place * 2 + c % 2;
    partial[(warp * kOutputs + output) * kColumns + row] = sums[c];
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x), row = first_row + i / kOutputs;
  const int64_t output = first + i % kOutputs;
  if (i >= kOutputs * kColumns || row >= p.rows || output >= p.m.outputs) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) {
    sum += partial[(w * kOutputs + i % kOutputs) * kColumns + i / kOutputs];
  }
  if (p.bias != nullptr) sum += ToFloat(static_cast<const T*>(p.bias)[output]);
  static_cast<T*>(p.out)[row * p.m.outputs + output] = FromFloat<T>(sum);
}

template <typename T, int kBits>
void Launch(const Call& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.m.outputs + kOutputs - 1) / kOutputs),
                  static_cast<unsigned>((p.rows + kColumns - 1) / kColumns));
  constexpr size_t kBytes = sizeof(float) * kWarps * kOutputs * kColumns;
  const auto kernel = p.m.order == nullptr ? TensorGroupsKernel<T, kBits, false>
                                           : TensorGroupsKernel<T, kBits, true>;
  EXKV_LAUNCH(kernel, grid, kWarp * kWarps, kBytes, stream, p);
}

template <typename T>
void LaunchBits(const Call& p, cudaStream_t stream) {
  switch (p.m.bits) {
    case 8:
      return Launch<T, 8>(p, stream);
    case 4:
      return Launch<T, 4>(p, stream);
    default:
      return Launch<T, 0>(p, stream);
  }
}

}  // namespace

bool GroupsFitTensorCores(const GroupsParams& params, const void* x) {
  return params.dtype != FloatType::kFloat32 && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
         HasTensorCores();
}

void LaunchGroupsOnTensorCores(const GroupsParams& params, const void* x, cudaStream_t stream) {
  Call p{};
  static_cast<GroupsCall&>(p) = CallOf(params.matrix);
  p.rows = static_cast<int>(params.rows);
  p.x = x;
  p.bias = params.bias;
  p.out = params.out;
  return params.dtype == FloatType::kFloat16 ? LaunchBits<__half>(p, stream)
                                             : LaunchBits<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

// Linear layers for a few rows by codes as they lie (exkv/ops/weight_groups.py), for x of 32 bits
// and for GPUs without tensor cores; linear_groups_tensor.cu has the others. The warps of a block
// share eight outputs; a pair of lanes takes a chunk of 32 inputs, four outputs each, so that both
// read whole sectors of codes. A chunk's products are summed as codes times x, in float32, then
// scaled; an offset is multiplied by the chunk's sum of x. Sums run in an order that depends on the
// shape alone.
#include "floats.cuh"
#include "linear_groups.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarps = 4;    // of a block
constexpr int kOutputs = 4;  // of a lane: half of those whose codes lie together
constexpr int kPairs = kGroupsChunk / 2;
constexpr int kVectorWords = kGroupsBlock;   // of 32 bits: an output's even and odd input
constexpr int kAtOnce = kWarps * kWarp / 2;  // chunks

struct Call {
  GroupsMatrix m;
  int rows;
  const void* x;
  const void* bias;
  void* out;
  int64_t chunks;  // what the matrix tells on the host only
  int64_t block_bytes;
  int64_t zero_bytes;
};

__device__ __forceinline__ float FloatAt(const void* values, FloatType type, int64_t at) {
  switch (type) {
    case FloatType::kFloat32:
      return static_cast<const float*>(values)[at];
    case FloatType::kFloat16:
      return ToFloat(static_cast<const __half*>(values)[at]);
    default:
      return ToFloat(static_cast<const __nv_bfloat16*>(values)[at]);
  }
}

// An output's scale for a group, and what is added to scale * code.
__device__ __forceinline__ void ScaleAndOffset(const Call& p, int64_t output, int64_t group,
                                               float* scale, float* offset) {
  const GroupsMatrix& m = p.m;
  *scale = FloatAt(m.scale, m.scale_type, output * m.groups + group);
  if (m.beside == GroupsShift::kOffset) {
    *offset = FloatAt(m.shift, m.scale_type, output * m.groups + group);
    return;
  }
  int zero = 1 << (m.bits - 1);
  if (m.beside == GroupsShift::kZero) {
    const auto* row = static_cast<const uint8_t*>(m.shift) + output * p.zero_bytes;
    zero = m.bits > 4 ? row[group] : row[group / 2] >> (group % 2 * 4) & 15;
  }
  *offset = -static_cast<float>(zero) * *scale;
}

struct alignas(16) FourWords {
  uint32_t at[kOutputs];
};

// The codes of one pair of inputs in words of two 16-bit halves, of 4 outputs; `codes` is their
// half of a chunk's first vector. kBits 0 stands for codes in planes, or of 2 bits.
template <int kBits>
__device__ __forceinline__ FourWords CodesOf(const uint32_t* codes, int bits, int pair,
                                             FourWords* vector) {
  FourWords found;
  if constexpr (kBits > 0) {
    constexpr int kFields = 16 / kBits;
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x10001u;
    if (pair % kFields == 0) {
      *vector = *reinterpret_cast<const FourWords*>(codes + pair / kFields * kVectorWords);
    }
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
      found.at[n] = vector->at[n] >> (pair % kFields * kBits) & kMask;
    }
  } else {
    const int low = bits >= 4 ? 4 : 2, high = bits - low;
    for (int n = 0; n < kOutputs; ++n) {
      const uint32_t word = codes[pair / (16 / low) * kVectorWords + n];
      found.at[n] = word >> (pair % (16 / low) * low) & ((1u << low) - 1) * 0x10001u;
      if (high == 0) continue;
      const uint32_t above = codes[(low + pair / (16 / high)) * kVectorWords + n];
      found.at[n] |= (above >> (pair % (16 / high) * high) & ((1u << high) - 1) * 0x10001u) << low;
    }
  }
  return found;
}

// Adds one chunk's part of 4 outputs, from `first` on, of kRows rows.
template <typename T, int kRows, int kBits>
__device__ void AddChunk(const Call& p, const T* const (&x)[kRows], int64_t first, int half,
                         int64_t chunk, float (&sums)[kRows][kOutputs]) {
  const GroupsMatrix& m = p.m;
  const uint8_t* bytes =
      m.codes + first / kGroupsBlock * p.block_bytes + chunk * (kGroupsChunk * m.bits);
  const auto* codes = reinterpret_cast<const uint32_t*>(bytes) + half * kOutputs;
  float products[kRows][kOutputs] = {}, inputs[kRows] = {};
  FourWords vector;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const FourWords words = CodesOf<kBits>(codes, static_cast<int>(m.bits), pair, &vector);
    const int64_t k = chunk * kGroupsChunk + 2 * pair;
    const int64_t even = m.order == nullptr ? k : m.order[k];
    const int64_t odd = m.order == nullptr ? k + 1 : m.order[k + 1];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float a = ToFloat(x[r][even]), b = ToFloat(x[r][odd]);
      inputs[r] += a + b;
#pragma unroll
      for (int n = 0; n < kOutputs; ++n) {
        const float both = fmaf(static_cast<float>(words.at[n] >> 16), b, products[r][n]);
        products[r][n] = fmaf(static_cast<float>(words.at[n] & 0xffffu), a, both);
      }
    }
  }
  const int64_t group = chunk * kGroupsChunk / m.group;
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    const int64_t output = first + half * kOutputs + n;
    float scale, offset;  // an output that is not there repeats the last one
    ScaleAndOffset(p, output < m.outputs ? output : m.outputs - 1, group, &scale, &offset);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r][n] = fmaf(offset, inputs[r], fmaf(scale, products[r][n], sums[r][n]));
    }
  }
}

// Blocks that a multiprocessor is to have room for. Left to itself (0) the compiler saves registers
// for 4 bits until some are spilled: one row's on 8.6, four rows' on 10.0.
template <int kRows, int kBits>
constexpr int kBlocksOf = kBits == 4 ? (kRows == 1 ? 6 : 1) : 0;

// Grid: blocks of outputs, and of kRows rows.
template <typename T, int kRows, int kBits>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksOf<kRows, kBits>)
    LinearGroupsKernel(Call p) {
  if (!std::is_same<T, float>::value && !kForOthers) return;
  EXKV_DYNAMIC_SHARED(float, partial);  // (warps, rows, outputs of a block)
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, half = lane % 2;
  const int64_t first = int64_t{blockIdx.x} * kGroupsBlock;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const T* x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // a row that is not there repeats the last one
    x[r] = static_cast<const T*>(p.x) + int64_t{min(first_row + r, p.rows - 1)} * p.m.inputs;
  }
  float sums[kRows][kOutputs] = {};
  for (int64_t chunk = warp * (kWarp / 2) + lane / 2; chunk < p.chunks; chunk += kAtOnce) {
    AddChunk<T, kRows, kBits>(p, x, first, half, chunk, sums);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
      float sum = sums[r][n];
      for (int step = kWarp / 2; step > 1; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      if (lane < 2) partial[(warp * kRows + r) * kGroupsBlock + half * kOutputs + n] = sum;
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) / kGroupsBlock;
  const int n = static_cast<int>(threadIdx.x) % kGroupsBlock;
  if (r >= kRows || first_row + r >= p.rows || first + n >= p.m.outputs) return;
  float sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += partial[(i * kRows + r) * kGroupsBlock + n];
  if (p.bias != nullptr) sum += ToFloat(static_cast<const T*>(p.bias)[first + n]);
  static_cast<T*>(p.out)[(first_row + r) * p.m.outputs + first + n] = FromFloat<T>(sum);
}

template <typename T, int kRows, int kBits>
void Launch(const Call& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.m.blocks()),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  constexpr size_t kBytes = sizeof(float) * kWarps * kRows * kGroupsBlock;
  const auto kernel = LinearGroupsKernel<T, kRows, kBits>;
  EXKV_LAUNCH(kernel, grid, kWarp * kWarps, kBytes, stream, p);
}

template <typename T, int kRows>
void LaunchBits(const Call& p, cudaStream_t stream) {
  switch (p.m.bits) {
    case 8:
      return Launch<T, kRows, 8>(p, stream);
    case 4:
      return Launch<T, kRows, 4>(p, stream);
    default:
      return Launch<T, kRows, 0>(p, stream);
  }
}

template <typename T>
void LaunchRows(const Call& p, cudaStream_t stream) {
  return p.rows == 1 ? LaunchBits<T, 1>(p, stream) : LaunchBits<T, 4>(p, stream);
}

}  // namespace

void LaunchLinearGroups(const GroupsParams& params, const void* x, cudaStream_t stream) {
  if (GroupsFitTensorCores(params)) return LaunchGroupsOnTensorCores(params, x, {}, stream);
  const Call p{params.matrix,
               static_cast<int>(params.rows),
               x,
               params.bias,
               params.out,
               params.matrix.chunks(),
               params.matrix.block_bytes(),
               params.matrix.zero_bytes()};
  switch (params.dtype) {
    case FloatType::kFloat32:
      return LaunchRows<float>(p, stream);
    case FloatType::kFloat16:
      return LaunchRows<__half>(p, stream);
    case FloatType::kBFloat16:
      return LaunchRows<__nv_bfloat16>(p, stream);
  }
}

}  // namespace exkv

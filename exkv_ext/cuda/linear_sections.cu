// Linear layers for a few rows by matrices in sections of inputs of unlike bits, and such weights
// as floats: EXL2 (exkv/weights/exl2.py). The warps of a block share 16 outputs and take turns at
// the chunks of 32 inputs, from one section into the next; a lane has the codes that
// groups_codes.cuh says. Codes less the middle of their range are multiplied by the inputs that
// they stand for and summed in float32, then scaled, in an order that depends on the shape alone.
#include "groups_codes.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarps = 8;   // of a block
constexpr int kBlocks = 2;  // of eight outputs, of a block of threads
constexpr int kOutputs = kBlocks * static_cast<int>(kGroupsBlock);
constexpr int kDeep = 2;  // chunks that a warp has under way
constexpr int kThreads = kWarps * kWarp;

struct Section {
  const uint8_t* codes;
  const uint32_t* nibbles;
  const uint16_t* largest;
  const int32_t* order;
  int bits;
  int first;  // chunk, of the matrix
  int chunks;
  uint32_t inverse;  // as GroupsCall has it
};

struct Call {
  Section sections[kMostSections];
  int count;
  int chunks;
  int64_t inputs;
  int64_t outputs;
  int64_t block_bytes;
  int64_t nibble_words;
  int64_t begin;  // of the rows of the matrix that are wanted
  int64_t rows;   // of x, or of the matrix
  const void* x;
  const void* bias;
  void* out;
};

// Where a thread is in its warp, and its warp in the block.
struct Place {
  int warp = static_cast<int>(threadIdx.x) / kWarp;
  int own = static_cast<int>(threadIdx.x) % kWarp / 4;  // of eight outputs
  int place = static_cast<int>(threadIdx.x) % 4;        // of an output's lanes
};

// The codes and the scale of a lane's output in block `block`.
template <int kBits>
__device__ __forceinline__ Octet<kBits> LoadPlace(const Call& p, const Section& s, const Place& at,
                                                  int64_t block, int chunk) {
  const auto [first, second] = VectorsOf<kBits>(s.bits, at.place);
  const uint8_t* codes = s.codes + block * p.block_bytes + int64_t{chunk} * kGroupsChunk * s.bits;
  const int group = GroupOf(s.inverse, chunk);
  Octet<kBits> octet = {};
  LoadCodes(codes + first * kVectorBytes + at.own * 4, (second - first) * kVectorBytes, s.bits,
            &octet);
  octet.scale = s.nibbles[group * p.nibble_words + block];
  octet.shift = s.largest[group];
  return octet;
}

// Of a weight, per code: (nibble + 1)^2 * largest / 256.
template <int kBits>
__device__ __forceinline__ float FactorOf(const Octet<kBits>& octet, const Place& at) {
  const auto root = static_cast<float>((octet.scale >> (4 * at.own) & 15u) + 1);
  return root * root * (FloatOfStored(octet.shift, FloatType::kFloat16) * (1.0f / 256.0f));
}

// A code less the middle of its range: the lowest bits of 2^23, less that and the middle.
__device__ __forceinline__ float Centered(uint32_t code, int bits) {
  return __uint_as_float(0x4b000000u | code) - static_cast<float>((1 << 23) + (1 << (bits - 1)));
}

struct alignas(16) FourInputs {
  int32_t at[4];
};

// Adds one chunk's part of a lane's outputs, of kRows rows.
template <typename T, int kRows, int kBits>
__device__ __forceinline__ void AddChunk(const Section& s, const Place& at,
                                         const T* const (&x)[kRows], int chunk,
                                         const Octet<kBits> (&octets)[kBlocks],
                                         float (&sums)[kRows][kBlocks]) {
  const auto* order = reinterpret_cast<const FourInputs*>(s.order + int64_t{chunk} * kGroupsChunk +
                                                          at.place * kOctet);
  const FourInputs inputs[2] = {order[0], order[1]};
  float products[kRows][kBlocks] = {};
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const int even = inputs[i / 2].at[i % 2 * 2], odd = inputs[i / 2].at[i % 2 * 2 + 1];
    float weights[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t pair = CodePair(octets[b], s.bits, at.place, i);
      weights[b][0] = Centered(pair & 0xffffu, s.bits);
      weights[b][1] = Centered(pair >> 16, s.bits);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float first = ToFloat(x[r][even]), second = ToFloat(x[r][odd]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float both = fmaf(weights[b][1], second, products[r][b]);
        products[r][b] = fmaf(weights[b][0], first, both);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float factor = FactorOf(octets[b], at);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r][b] = fmaf(factor, products[r][b], sums[r][b]);
  }
}

template <typename T, int kRows, int kBits>
__device__ __forceinline__ void AddSection(const Call& p, const Section& s, const Place& at,
                                           const T* const (&x)[kRows],
                                           float (&sums)[kRows][kBlocks]) {
  // A block of outputs that is not there repeats the last one.
  const int64_t last = (p.outputs - 1) / kGroupsBlock;
  const int64_t block = int64_t{blockIdx.x} * kBlocks;
  int chunk = (at.warp + kWarps - s.first % kWarps) % kWarps;
  for (; chunk < s.chunks; chunk += kWarps * kDeep) {
    Octet<kBits> octets[kDeep][kBlocks];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int there = min(chunk + i * kWarps, s.chunks - 1);
        octets[i][b] = LoadPlace<kBits>(p, s, at, min(block + b, last), there);
      }
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      if (chunk + i * kWarps >= s.chunks) break;
      AddChunk<T, kRows, kBits>(s, at, x, chunk + i * kWarps, octets[i], sums);
    }
  }
}

// Adds up what a block's threads have found.
template <typename T, int kRows>
__device__ __forceinline__ void StoreSums(const Call& p, const Place& at, int first_row,
                                          const float (&sums)[kRows][kBlocks]) {
  EXKV_DYNAMIC_SHARED(float, partial);  // (warps, rows, outputs)
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sum = sums[r][b];
      for (int step = 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
      const int output = b * static_cast<int>(kGroupsBlock) + at.own;
      if (at.place == 0) partial[(at.warp * kRows + r) * kOutputs + output] = sum;
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) / kOutputs;
  const int n = static_cast<int>(threadIdx.x) % kOutputs;
  const int64_t output = int64_t{blockIdx.x} * kOutputs + n;
  if (r >= kRows || first_row + r >= p.rows || output >= p.outputs) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[(w * kRows + r) * kOutputs + n];
  if (p.bias != nullptr) sum += ToFloat(static_cast<const T*>(p.bias)[output]);
  static_cast<T*>(p.out)[(first_row + r) * p.outputs + output] = FromFloat<T>(sum);
}

// Grid: 16 outputs, and kRows rows, a block.
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads) LinearSectionsKernel(Call p) {
  const Place at;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const T* x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // a row that is not there repeats the last one
    x[r] = static_cast<const T*>(p.x) + min(int64_t{first_row + r}, p.rows - 1) * p.inputs;
  }
  float sums[kRows][kBlocks] = {};
  for (int i = 0; i < p.count; ++i) {
    const Section& s = p.sections[i];
    switch (s.bits) {
      case 8:
        AddSection<T, kRows, 8>(p, s, at, x, sums);
        break;
      case 4:
        AddSection<T, kRows, 4>(p, s, at, x, sums);
        break;
      default:
        AddSection<T, kRows, 0>(p, s, at, x, sums);
    }
  }
  StoreSums<T, kRows>(p, at, first_row, sums);
}

// A chunk's values of a lane's output go where the model has their inputs.
template <typename T, int kBits>
__device__ __forceinline__ void PutChunk(const Call& p, const Section& s, const Place& at,
                                         int64_t block, int chunk) {
  const int64_t row = block * kGroupsBlock + at.own - p.begin;
  const Octet<kBits> octet = LoadPlace<kBits>(p, s, at, block, chunk);
  if (row < 0 || row >= p.rows) return;
  const float factor = FactorOf(octet, at);
  const int32_t* order = s.order + int64_t{chunk} * kGroupsChunk + at.place * kOctet;
  T* out = static_cast<T*>(p.out) + row * p.inputs;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const uint32_t pair = CodePair(octet, s.bits, at.place, i);
    out[order[2 * i]] = FromFloat<T>(Centered(pair & 0xffffu, s.bits) * factor);
    out[order[2 * i + 1]] = FromFloat<T>(Centered(pair >> 16, s.bits) * factor);
  }
}

// Grid: blocks of eight outputs, and chunks, one for each warp.
template <typename T>
__global__ void __launch_bounds__(kThreads) DequantizeSectionsKernel(Call p) {
  const Place at;
  const int64_t block = p.begin / kGroupsBlock + blockIdx.x;
  const int step = static_cast<int>(gridDim.y) * kWarps;
  for (int chunk = static_cast<int>(blockIdx.y) * kWarps + at.warp; chunk < p.chunks;
       chunk += step) {
    int i = 0;
    while (i + 1 < p.count && chunk >= p.sections[i + 1].first) ++i;
    const Section& s = p.sections[i];
    switch (s.bits) {
      case 8:
        PutChunk<T, 8>(p, s, at, block, chunk - s.first);
        break;
      case 4:
        PutChunk<T, 4>(p, s, at, block, chunk - s.first);
        break;
      default:
        PutChunk<T, 0>(p, s, at, block, chunk - s.first);
    }
  }
}

Call CallOfSections(const GroupsMatrix& m) {
  Call p{};
  p.count = static_cast<int>(m.section_count);
  p.chunks = static_cast<int>(m.chunks());
  p.inputs = m.inputs;
  p.outputs = m.outputs;
  p.block_bytes = m.block_bytes();
  p.nibble_words = m.nibble_words;
  for (int i = 0; i < p.count; ++i) {
    int64_t first = 0;
    const GroupsMatrix part = m.Section(i, &first);
    p.sections[i] = {part.codes,
                     part.nibbles,
                     part.largest,
                     m.order + first,
                     static_cast<int>(part.bits),
                     static_cast<int>(first / kGroupsChunk),
                     static_cast<int>(part.chunks()),
                     InverseOf(part.group)};
  }
  return p;
}

template <typename T, int kRows>
void Launch(const Call& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.outputs + kOutputs - 1) / kOutputs),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  constexpr size_t kBytes = sizeof(float) * kWarps * kRows * kOutputs;
  const auto kernel = LinearSectionsKernel<T, kRows>;
  EXKV_LAUNCH(kernel, grid, kThreads, kBytes, stream, p);
}

template <typename T>
void LaunchRows(const Call& p, cudaStream_t stream) {
  return p.rows == 1 ? Launch<T, 1>(p, stream) : Launch<T, 4>(p, stream);
}

template <typename T>
void LaunchDequantize(const Call& p, cudaStream_t stream) {
  constexpr int64_t kMost = 65535;  // of a grid's second dimension
  const int64_t blocks = (p.begin + p.rows + kGroupsBlock - 1) / kGroupsBlock;
  const dim3 grid(
      static_cast<unsigned>(blocks - p.begin / kGroupsBlock),
      static_cast<unsigned>(std::min(kMost, int64_t{(p.chunks + kWarps - 1) / kWarps})));
  const auto kernel = DequantizeSectionsKernel<T>;
  EXKV_LAUNCH(kernel, grid, kThreads, 0, stream, p);
}

}  // namespace

void LaunchLinearSections(const GroupsParams& params, const void* x, cudaStream_t stream) {
  Call p = CallOfSections(params.matrix);
  p.rows = params.rows;
  p.x = x;
  p.bias = params.bias;
  p.out = params.out;
  switch (params.dtype) {
    case FloatType::kFloat32:
      return LaunchRows<float>(p, stream);
    case FloatType::kFloat16:
      return LaunchRows<__half>(p, stream);
    case FloatType::kBFloat16:
      return LaunchRows<__nv_bfloat16>(p, stream);
  }
}

void LaunchDequantizeSections(const GroupsMatrix& matrix, FloatType dtype, int64_t begin,
                              int64_t end, void* out, cudaStream_t stream) {
  Call p = CallOfSections(matrix);
  p.begin = begin;
  p.rows = end - begin;
  p.out = out;
  switch (dtype) {
    case FloatType::kFloat32:
      return LaunchDequantize<float>(p, stream);
    case FloatType::kFloat16:
      return LaunchDequantize<__half>(p, stream);
    case FloatType::kBFloat16:
      return LaunchDequantize<__nv_bfloat16>(p, stream);
  }
}

}  // namespace exkv

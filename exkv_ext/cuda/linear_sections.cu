// Linear layers for a few rows by matrices in sections of inputs of unlike bits, and such weights
// as floats: EXL2 (exkv/weights/exl2.py). The warps of a block share 16 outputs and take turns at
// the chunks of 32 inputs, from one section into the next. Codes less the middle of their range are
// multiplied by the inputs that they stand for and summed in float32, then scaled, in an order that
// depends on the shape alone: on tensor cores for x of 16 bits, else lane by lane, with the codes
// that groups_codes.cuh says.
#include "groups_tensor.cuh"

namespace exkv {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kBlocks = kOutputs / static_cast<int>(kGroupsBlock);
constexpr int kUnderWay = 2;  // chunks of a warp, without tensor cores
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

struct Call : TileCall {  // `rows` of x, or of the matrix
  Section sections[kMostSections];
  int count;
  int chunks;
  int64_t block_bytes;
  int nibble_words;
  int64_t begin;  // of the rows of the matrix that are wanted
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
  octet.scale = s.nibbles[int64_t{group} * p.nibble_words + block];
  octet.shift = s.largest[group];
  return octet;
}

// Of a weight, per code: (nibble + 1)^2 * largest / 256. `own`: of eight outputs.
__device__ __forceinline__ float FactorOf(uint32_t nibbles, uint32_t largest, int own) {
  const auto root = static_cast<float>((nibbles >> (4 * own) & 15u) + 1);
  return root * root * (FloatOfStored(largest, FloatType::kFloat16) * (1.0f / 256.0f));
}
template <int kBits>
__device__ __forceinline__ float FactorOf(const Octet<kBits>& octet, const Place& at) {
  return FactorOf(octet.scale, octet.shift, at.own);
}

// A code less the middle of its range: the lowest bits of 2^23, less that and the middle.
__device__ __forceinline__ float CenteredFloat(uint32_t code, int bits) {
  return __uint_as_float(0x4b000000u | code) - static_cast<float>((1 << 23) + (1 << (bits - 1)));
}

struct alignas(16) FourInputs {
  uint32_t at[4];  // unsigned: an address is one instruction
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
    const uint32_t even = inputs[i / 2].at[i % 2 * 2], odd = inputs[i / 2].at[i % 2 * 2 + 1];
    float weights[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t pair = CodePair(octets[b], s.bits, at.place, i);
      weights[b][0] = CenteredFloat(pair & 0xffffu, s.bits);
      weights[b][1] = CenteredFloat(pair >> 16, s.bits);
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
  for (; chunk < s.chunks; chunk += kWarps * kUnderWay) {
    Octet<kBits> octets[kUnderWay][kBlocks];
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int there = min(chunk + i * kWarps, s.chunks - 1);
        octets[i][b] = LoadPlace<kBits>(p, s, at, min(block + b, last), there);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnderWay; ++i) {
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
__device__ __forceinline__ void MultiplySections(const Call& p) {
  const Place at;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const T* x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // a row that is not there repeats the last one
    x[r] = static_cast<const T*>(p.x) + min(first_row + r, p.rows - 1) * p.inputs;
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

// x of 16 bits comes here on GPUs without tensor cores only.
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads) LinearSectionsKernel(Call p) {
  if (std::is_same<T, float>::value || kForOthers) MultiplySections<T, kRows>(p);
}

// On tensor cores -------------------------------------------------------------------------------

// A lane's share of a chunk: eight inputs of outputs 2 (l / 4) and 2 (l / 4) + 1 of 16, and of row
// l / 4 of x.
struct Share {
  TwoOutputs codes;
  uint32_t x[kOctet / 2];
};

// Where a lane is: its outputs, and its row of x.
struct Lane {
  int64_t block;  // of eight outputs
  int own;        // of those, the first of two
  int place;
  const uint16_t* x;
};

// Where its share of a section begins.
struct Source {
  const uint8_t* low;
  const uint8_t* high;  // its second word
  const FourInputs* order;
  const uint32_t* nibbles;
  const uint16_t* largest;
  uint32_t inverse;
};

template <int kBits>
__device__ __forceinline__ Source FindSource(const Call& p, const Section& s, const Lane& lane) {
  constexpr int kOfOctet = kBits == 8 || kBits == 4 ? kBits : 0;
  const auto [first, second] = VectorsOf<kOfOctet>(kBits, lane.place);
  const uint8_t* codes = s.codes + lane.block * p.block_bytes + lane.own * 4;
  return {Pinned(codes + first * kVectorBytes),
          Pinned(codes + second * kVectorBytes),
          Pinned(reinterpret_cast<const FourInputs*>(s.order + lane.place * kOctet)),
          Pinned(s.nibbles + lane.block),
          Pinned(s.largest),
          s.inverse};
}

template <int kBits>
__device__ __forceinline__ Share LoadShare(const Source& from, const Lane& lane, int chunk) {
  constexpr int64_t kBytes = kGroupsChunk * kBits;
  constexpr int kOrders = static_cast<int>(kGroupsChunk) / 4;
  Share share;
  share.codes =
      LoadOutputs<kBits>(from.low + chunk * kBytes, from.high + chunk * kBytes, lane.place);
  const FourInputs* order = from.order + int64_t{chunk} * kOrders;
  const FourInputs inputs[2] = {order[0], order[1]};
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const uint32_t even = inputs[i / 2].at[i % 2 * 2], odd = inputs[i / 2].at[i % 2 * 2 + 1];
    share.x[i] = uint32_t{lane.x[even]} | uint32_t{lane.x[odd]} << 16;
  }
  return share;
}

// Calls with the number of bits as a constant.
template <typename Then>
__device__ __forceinline__ void WithBits(int bits, const Then& then) {
  switch (bits) {
    case 8:
      return then(std::integral_constant<int, 8>());
    case 6:
      return then(std::integral_constant<int, 6>());
    case 5:
      return then(std::integral_constant<int, 5>());
    case 4:
      return then(std::integral_constant<int, 4>());
    case 3:
      return then(std::integral_constant<int, 3>());
    default:
      return then(std::integral_constant<int, 2>());
  }
}

// Adds the part of kChunks chunks. A lane finds the scales of chunk l % 4 of them, for the four
// lanes of its outputs.
template <typename T, int kBits, int kChunks>
__device__ __forceinline__ void AddChunks(const Call& p, const Source& from, const Lane& lane,
                                          int first, float (&sums)[4]) {
  Share shares[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) shares[i] = LoadShare<kBits>(from, lane, first + i);
  const int group = GroupOf(from.inverse, kChunks > 1 ? first + lane.place : first);
  const uint32_t nibbles = from.nibbles[int64_t{group} * p.nibble_words];
  const uint32_t largest = from.largest[group];
  const float factors[2] = {FactorOf(nibbles, largest, lane.own),
                            FactorOf(nibbles, largest, lane.own + 1)};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float products[4] = {};
#pragma unroll
    for (int j = 0; j < kOctet / 2; j += 2) {
      uint32_t a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        a[k] = CenteredPair<T, kBits>(shares[i].codes.words[k % 2], j + k / 2);
      }
      Multiply<T>(products, a, shares[i].x[j], shares[i].x[j + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float factor = kChunks > 1 ? __shfl_sync(kFullWarp, factors[n], i, 4) : factors[n];
#pragma unroll
      for (int c = 2 * n; c < 2 * n + 2; ++c) sums[c] = fmaf(factor, products[c], sums[c]);
    }
  }
}

template <typename T, int kBits>
__device__ __forceinline__ void AddSectionInTiles(const Call& p, const Section& s, const Lane& lane,
                                                  float (&sums)[4]) {
  const Source from = FindSource<kBits>(p, s, lane);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, whole = s.chunks / kDeep;
  // A section begins with another warp than the one before.
  const int turn = (warp + kWarps - s.first / kDeep % kWarps) % kWarps;
  for (int i = turn; i < whole; i += kWarps) {
    AddChunks<T, kBits, kDeep>(p, from, lane, i * kDeep, sums);
  }
  const int left = whole * kDeep + turn;
  if (left < s.chunks) AddChunks<T, kBits, 1>(p, from, lane, left, sums);
}

template <typename T>
__device__ __forceinline__ void AddTile(const Call& p) {
  const int place = static_cast<int>(threadIdx.x) % kWarp, output = place / 4 * 2;
  const Tile tile = FindTile(p);
  // A block of outputs that is not there repeats the last one.
  const int64_t last = (p.outputs - 1) / kGroupsBlock;
  const Lane lane = {min((tile.first + output) / kGroupsBlock, last),
                     output % static_cast<int>(kGroupsBlock), place % 4,
                     Pinned(RowOfLane(p, tile))};
  float sums[4] = {};
  for (int i = 0; i < p.count; ++i) {
    const Section& s = p.sections[i];
    WithBits(s.bits,
             [&](auto bits) { AddSectionInTiles<T, decltype(bits)::value>(p, s, lane, sums); });
  }
  StoreTile<T>(p, {output, output + 1}, sums);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) TensorSectionsKernel(Call p) {
  if (kForTensorCores) AddTile<T>(p);
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
    out[order[2 * i]] = FromFloat<T>(CenteredFloat(pair & 0xffffu, s.bits) * factor);
    out[order[2 * i + 1]] = FromFloat<T>(CenteredFloat(pair >> 16, s.bits) * factor);
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
  p.nibble_words = static_cast<int>(m.nibble_words);
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
  if constexpr (!std::is_same<T, float>::value) {
    if (HasTensorCores()) return LaunchTiles(TensorSectionsKernel<T>, p, stream);
  }
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
  static_cast<TileCall&>(p) = TileCallOf(params, x);
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
  p.rows = static_cast<int>(end - begin);
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

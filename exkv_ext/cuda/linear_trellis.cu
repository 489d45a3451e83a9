// Linear layers for a few rows by tiles of trellis codes, and such tiles as floats (what they are:
// exkv/weights/exl3.py). A block takes 16 outputs; its warps take turns at tiles of 16 inputs. Lane
// l has a tile's eight places from 8 l on, whose bits are a stretch of its stream: outputs l / 4
// and l / 4 + 8, inputs 2 (l % 4) and the next, and both eight later. Each weight is made once, in
// registers, for all rows of x that the block has. Sums are of float32, in an order that depends on
// the shape alone. For x of 16 bits, a lane's weights are its share of a factor for tensor cores as
// they lie.
#include "linear_packed.cuh"
#include "tensor_tile.cuh"

namespace exkv {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kTile = static_cast<int>(kTrellisTile);
constexpr int kPlaces = 8;   // of a lane
constexpr int kSharing = 4;  // lanes that share outputs

struct Call {
  const uint32_t* tiles;  // (outputs / 16, tiles of an output, words)
  int words;              // of 32 bits
  int bits;               // of a place
  int more;               // 1 where each second place has one more
  bool of_bytes;          // kMul1
  uint32_t factor;
  uint32_t addend;
  int of_output;  // tiles
  int outputs;
  int rows;
  const void* x;
  const void* bias;
  void* out;
};

// The upper word of two that are shifted to the left as one, by less than 32.
__device__ __forceinline__ uint32_t Shifted(uint32_t upper, uint32_t lower, int bits) {
  return static_cast<uint32_t>((uint64_t{upper} << 32 | lower) << bits >> 32);
}

__device__ __forceinline__ float HalfOf(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ float ValueOf(const Call& p, uint32_t state) {
  const uint32_t made = state * p.factor + p.addend;
  if (p.of_bytes) {
    const uint32_t total = (made & 255u) + (made >> 8 & 255u) + (made >> 16 & 255u) + (made >> 24);
    return Rounded<__half>(fmaf(static_cast<float>(1024u + total), kTrellisStep, kTrellisLeast));
  }
  const uint32_t halves = (made & kTrellisMask) ^ kTrellisTurned;
  return Rounded<__half>(HalfOf(halves & 0xffffu) + HalfOf(halves >> 16));
}

// A lane's weights of a tile, in the order of their places.
__device__ __forceinline__ void LoadPlaces(const Call& p, const uint32_t* tile, int lane,
                                           float (&weights)[kPlaces]) {
  // Its stretch and the 16 bits before it: at most 80, from the highest bit of `bits[0]` on.
  const int ring = p.words * 32;
  const int first = (lane * p.words + ring - 16) % ring;
  uint32_t words[4], bits[3];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = tile[(first / 32 + i) % p.words];
#pragma unroll
  for (int i = 0; i < 3; ++i) bits[i] = Shifted(words[i], words[i + 1], first % 32);
#pragma unroll
  for (int place = 0; place < kPlaces; ++place) {
    const int at = (place + 1) * p.bits + (place + 1) / 2 * p.more;
    const uint32_t upper = at < 32 ? bits[0] : at < 64 ? bits[1] : bits[2];
    const uint32_t lower = at < 32 ? bits[1] : at < 64 ? bits[2] : 0u;
    weights[place] = ValueOf(p, Shifted(upper, lower, at % 32) >> 16);
  }
}

// Grid: 16 outputs, and kRows rows of x. A row that is not there repeats the last one.
template <typename T, int kRows>
__global__ void __launch_bounds__(kWarps* kWarp) LinearTrellisKernel(Call p) {
  if (!std::is_same<T, float>::value && !kForOthers) return;
  EXKV_DYNAMIC_SHARED(float, shared);  // (warps, rows, outputs)
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int column = lane % kSharing * 2;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const int64_t inputs = int64_t{p.of_output} * kTile;
  const uint32_t* tiles = p.tiles + int64_t{blockIdx.x} * p.of_output * p.words;
  float sums[kRows][2] = {};
  for (int tile = warp; tile < p.of_output; tile += kWarps) {
    float weights[kPlaces];
    LoadPlaces(p, tiles + int64_t{tile} * p.words, lane, weights);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T* x = static_cast<const T*>(p.x) + min(first_row + r, p.rows - 1) * inputs;
#pragma unroll
      for (int i = 0; i < kSharing; ++i) {
        const float value = ToFloat(x[tile * kTile + column + i % 2 + i / 2 * 8]);
        sums[r][0] = fmaf(weights[i], value, sums[r][0]);
        sums[r][1] = fmaf(weights[kSharing + i], value, sums[r][1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float sum = sums[r][n];
      for (int step = kSharing / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, step);
      }
      if (lane % kSharing == 0) {
        shared[(warp * kRows + r) * kTile + lane / kSharing + 8 * n] = sum;
      }
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) / kTile,
            output = static_cast<int>(threadIdx.x) % kTile;
  const int64_t row = first_row + r, at = int64_t{blockIdx.x} * kTile + output;
  if (r >= kRows || row >= p.rows || at >= p.outputs) return;
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += shared[(i * kRows + r) * kTile + output];
  if (p.bias != nullptr) sum += ToFloat(static_cast<const T*>(p.bias)[at]);
  static_cast<T*>(p.out)[row * p.outputs + at] = FromFloat<T>(sum);
}

// On tensor cores -------------------------------------------------------------------------------

struct TensorCall : TileCall {
  const uint32_t* tiles;
  uint32_t factor;
  uint32_t addend;
  int of_output;  // tiles
};

constexpr int kDeep = 4;  // tiles that a warp has under way
// Words of 32 bits, for so many halves of a bit of a place: of a tile, of a lane's stretch and the
// 16 bits before it, and of those where they begin amid a word.
template <int kHalves>
constexpr int kRing = 4 * kHalves;
template <int kHalves>
constexpr int kStretch = (16 + 4 * kHalves + 31) / 32;
template <int kHalves>
constexpr int kAmid = kHalves % 4 == 0   ? 16
                      : kHalves % 2 == 0 ? 24
                                         : 28;  // at most
template <int kHalves>
constexpr int kLoaded = (16 + 4 * kHalves + kAmid<kHalves> + 31) / 32;

// The sum of a word's bytes, and of another number.
__device__ __forceinline__ uint32_t SumOfBytes(uint32_t bytes, uint32_t and_this) {
#if defined(__CUDA_ARCH__)
  return __dp4a(bytes, 0x01010101u, and_this);
#else
  return and_this + (bytes & 255u) + (bytes >> 8 & 255u) + (bytes >> 16 & 255u) + (bytes >> 24);
#endif
}

// a * b + c of pairs of float16, rounded once.
__device__ __forceinline__ uint32_t MultiplyAddPairs(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __half2 first, second, third;
  memcpy(&first, &a, sizeof(a));
  memcpy(&second, &b, sizeof(b));
  memcpy(&third, &c, sizeof(c));
  first = __hfma2(first, second, third);
  memcpy(&a, &first, sizeof(a));
  return a;
#else
  const auto at = [&](bool i) {
    return fmaf(FloatOf<__half>(a, i), FloatOf<__half>(b, i), FloatOf<__half>(c, i));
  };
  return PackPair<__half>(at(false), at(true));
#endif
}

// The weights of two states, as ValueOf has them.
template <typename T, bool kOfBytes>
__device__ __forceinline__ uint32_t PairOf(const TensorCall& p, uint32_t first, uint32_t second) {
  const uint32_t a = first * p.factor + p.addend, b = second * p.factor + p.addend;
  uint32_t pair;
  if constexpr (kOfBytes) {
    constexpr uint32_t k1024 = 0x6400u;  // whose last bit is 1
    const uint32_t sums = Permuted(SumOfBytes(a, k1024), SumOfBytes(b, k1024), 0x5410);
    const uint32_t step = PackPair<__half>(kTrellisStep, kTrellisStep);
    pair = MultiplyAddPairs(sums, step, PackPair<__half>(kTrellisLeast, kTrellisLeast));
  } else {
    constexpr uint32_t kTurned = kTrellisTurned ^ 0x80000000u;  // to be subtracted
    const uint32_t x = AndXor(a, kTrellisMask, kTurned), y = AndXor(b, kTrellisMask, kTurned);
    pair = SubtractPairs<__half>(Permuted(x, y, 0x5410), Permuted(x, y, 0x7632));
  }
  if constexpr (std::is_same<T, __half>::value) return pair;
  return PackPair<T>(FloatOf<__half>(pair, false), FloatOf<__half>(pair, true));
}

// A lane's state of a place, from its stretch.
template <int kHalves>
__device__ __forceinline__ uint32_t StateOf(const uint32_t (&stretch)[kStretch<kHalves>],
                                            int place) {
  const int at = (place + 1) * (kHalves / 2) + (place + 1) / 2 * (kHalves % 2);
  const int word = at / 32, shift = at % 32;
  if (shift <= 16) return stretch[word] >> (16 - shift) & 0xffffu;
  return Shifted(stretch[word], stretch[min(word + 1, kStretch<kHalves> - 1)], shift) >> 16;
}

// Where a lane's share of tiles begins.
template <int kHalves>
struct Source {
  const uint32_t* words[kLoaded<kHalves>];
  int shift;
  const uint16_t* x;
};

template <int kHalves>
__device__ __forceinline__ Source<kHalves> FindSource(const TensorCall& p, const Tile& tile,
                                                      int lane) {
  constexpr int kWords = kRing<kHalves>;
  const int first = (lane * kWords + 32 * kWords - 16) % (32 * kWords);
  Source<kHalves> source;
#pragma unroll
  for (int i = 0; i < kLoaded<kHalves>; ++i) {
    const uint32_t* tiles = p.tiles + tile.first / kTile * p.of_output * kWords;
    source.words[i] = Pinned(tiles + (first / 32 + i) % kWords);
  }
  source.shift = first % 32;
  source.x = Pinned(RowOfLane(p, tile) + lane % kSharing * 2);
  return source;
}

// Adds the part of kTiles tiles.
template <typename T, int kHalves, bool kOfBytes, int kTiles>
__device__ __forceinline__ void AddTiles(const TensorCall& p, const Source<kHalves>& from,
                                         int first, float (&sums)[4]) {
  uint32_t words[kTiles][kLoaded<kHalves>], x[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int64_t tile = first + t;
#pragma unroll
    for (int i = 0; i < kLoaded<kHalves>; ++i) words[t][i] = from.words[i][tile * kRing<kHalves>];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[t][i] = *reinterpret_cast<const uint32_t*>(from.x + tile * kTile + 8 * i);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    uint32_t stretch[kStretch<kHalves>], a[4];
#pragma unroll
    for (int i = 0; i < kStretch<kHalves>; ++i) {
      const uint32_t next = i + 1 < kLoaded<kHalves> ? words[t][i + 1] : 0u;
      stretch[i] = Shifted(words[t][i], next, from.shift);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // pairs of the first output, and of the one eight later
      a[i % 2 * 2 + i / 2] = PairOf<T, kOfBytes>(p, StateOf<kHalves>(stretch, 2 * i),
                                                 StateOf<kHalves>(stretch, 2 * i + 1));
    }
    Multiply<T>(sums, a, x[t][0], x[t][1]);
  }
}

template <typename T, int kHalves, bool kOfBytes>
__device__ __forceinline__ void AddTile(const TensorCall& p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Source<kHalves> source = FindSource<kHalves>(p, FindTile(p), lane);
  float sums[4] = {};
  const int whole = p.of_output / kDeep;
  for (int i = warp; i < whole; i += kWarps) {
    AddTiles<T, kHalves, kOfBytes, kDeep>(p, source, i * kDeep, sums);
  }
  const int left = whole * kDeep + warp;
  if (left < p.of_output) AddTiles<T, kHalves, kOfBytes, 1>(p, source, left, sums);
  StoreTile<T>(p, {lane / kSharing, lane / kSharing + 8}, sums);
}

template <typename T, int kHalves, bool kOfBytes>
__global__ void __launch_bounds__(kWarp* kWarps) TrellisTensorKernel(TensorCall p) {
  if (kForTensorCores) AddTile<T, kHalves, kOfBytes>(p);
}

template <typename T, bool kOfBytes, int kHalves = 2>
void LaunchHalves(const TensorCall& p, int halves, cudaStream_t stream) {
  if constexpr (kHalves <= 16) {
    if (halves > kHalves) return LaunchHalves<T, kOfBytes, kHalves + 1>(p, halves, stream);
    LaunchTiles(TrellisTensorKernel<T, kHalves, kOfBytes>, p, stream);
  }
}

template <typename T>
void LaunchCodebook(const TensorCall& p, const Call& of_lanes, cudaStream_t stream) {
  const int halves = 2 * of_lanes.bits + of_lanes.more;
  return of_lanes.of_bytes ? LaunchHalves<T, true>(p, halves, stream)
                           : LaunchHalves<T, false>(p, halves, stream);
}

// As floats --------------------------------------------------------------------------------------

// A warp takes a tile; `outputs` ends the rows, which are counted from `begin` on.
template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp) DequantizeTrellisKernel(Call p, int begin) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t tile =
      int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;  // from `begin`'s on
  const int64_t block = begin / kTile + tile / p.of_output;
  if (block * kTile >= p.outputs) return;
  const int64_t of_row = tile % p.of_output, inputs = int64_t{p.of_output} * kTile;
  float weights[kPlaces];
  LoadPlaces(p, p.tiles + (block * p.of_output + of_row) * p.words, lane, weights);
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int64_t output = block * kTile + lane / kSharing + i / kSharing * 8;
    if (output < begin || output >= p.outputs) continue;
    const int64_t input = of_row * kTile + lane % kSharing * 2 + i % 2 + i / 2 % 2 * 8;
    static_cast<T*>(p.out)[(output - begin) * inputs + input] = FromFloat<T>(weights[i]);
  }
}

Call CallOf(const PackedMatrix& m) {
  Call p{};
  p.tiles = reinterpret_cast<const uint32_t*>(m.rows);
  p.words = static_cast<int>(m.words / 2);
  p.bits = static_cast<int>(m.words / 16);
  p.more = static_cast<int>(m.words / 8 % 2);
  p.of_bytes = m.codebook == Codebook::kMul1;
  p.factor = kTrellisFactors[static_cast<int>(m.codebook)];
  p.addend = m.codebook == Codebook::k3Inst ? kTrellisAddend : 0;
  p.of_output = static_cast<int>(m.tiles());
  return p;
}

template <typename T, int kRows>
void LaunchRows(const Call& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.outputs + kTile - 1) / kTile),
                  static_cast<unsigned>((p.rows + kRows - 1) / kRows));
  const auto kernel = LinearTrellisKernel<T, kRows>;
  constexpr int kShared = kWarps * kRows * kTile * static_cast<int>(sizeof(float));
  EXKV_LAUNCH(kernel, grid, kWarps * kWarp, kShared, stream, p);
}

template <typename T>
void LaunchType(const Call& p, cudaStream_t stream) {
  return p.rows == 1 ? LaunchRows<T, 1>(p, stream) : LaunchRows<T, 4>(p, stream);
}

template <typename T>
void LaunchDequantize(const Call& p, int begin, unsigned blocks, cudaStream_t stream) {
  const auto kernel = DequantizeTrellisKernel<T>;
  EXKV_LAUNCH(kernel, dim3(blocks), kWarps * kWarp, 0, stream, p, begin);
}

}  // namespace

void LaunchLinearTrellis(const PackedParams& params, const void* x, cudaStream_t stream) {
  Call p = CallOf(params.matrix);
  p.outputs = static_cast<int>(params.matrix.outputs);
  p.rows = static_cast<int>(params.rows);
  p.x = x;
  p.bias = params.bias;
  p.out = params.out;
  if (params.dtype != FloatType::kFloat32 && HasTensorCores()) {
    TensorCall call{};
    static_cast<TileCall&>(call) = TileCallOf(params, x);
    call.tiles = p.tiles;
    call.factor = p.factor;
    call.addend = p.addend;
    call.of_output = p.of_output;
    return params.dtype == FloatType::kFloat16 ? LaunchCodebook<__half>(call, p, stream)
                                               : LaunchCodebook<__nv_bfloat16>(call, p, stream);
  }
  switch (params.dtype) {
    case FloatType::kFloat32:
      return LaunchType<float>(p, stream);
    case FloatType::kFloat16:
      return LaunchType<__half>(p, stream);
    case FloatType::kBFloat16:
      return LaunchType<__nv_bfloat16>(p, stream);
  }
}

void LaunchDequantizeTrellis(const PackedMatrix& matrix, FloatType dtype, int64_t begin,
                             int64_t end, void* out, cudaStream_t stream) {
  Call p = CallOf(matrix);
  p.outputs = static_cast<int>(end);
  p.out = out;
  const int64_t tiles = ((end - 1) / kTile - begin / kTile + 1) * p.of_output;
  const auto blocks = static_cast<unsigned>((tiles + kWarps - 1) / kWarps);
  const auto first = static_cast<int>(begin);
  switch (dtype) {
    case FloatType::kFloat32:
      return LaunchDequantize<float>(p, first, blocks, stream);
    case FloatType::kFloat16:
      return LaunchDequantize<__half>(p, first, blocks, stream);
    case FloatType::kBFloat16:
      return LaunchDequantize<__nv_bfloat16>(p, first, blocks, stream);
  }
}

}  // namespace exkv

// Linear layers for a few rows by packed weights, on tensor cores, for x of 16 bits: a block's
// warps take turns at pieces of 64 to 256 inputs, of 16 outputs. Codes become 16-bit floats:
// exactly, but for values of a table, which are rounded. Products of inputs that share a scale are
// scaled in float32, and minima are multiplied by a sum of x, a product with ones.
//
// Lane l has outputs l / 4 and l / 4 + 8, and its words hold codes of four inputs out of 16, or of
// eight out of 32. A type says in which order (Inputs), so that codes are taken two at a time.
#include "packed_chunk.cuh"
#include "tensor_tile.cuh"

namespace exkv {
namespace {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kPair = 2;  // outputs of a lane

struct Call : TileCall {
  PackedMatrix m;
  int shift;  // 2^shift inputs share a scale that lies beside the codes
};

// Where an output's codes begin, and the input, counted from the matrix's first, to which its first
// scale beside them belongs.
struct Row {
  const uint8_t* codes;
  int64_t scales;
};

struct ScaleAndLow {
  float scale;
  float low;
};

__device__ __forceinline__ Row RowOf(const Call& p, int64_t output) {
  int64_t scales = output * p.inputs;
  if (p.m.packing == Packing::kFloat8) {
    const int64_t columns = (p.inputs + p.m.wide - 1) / p.m.wide;
    scales = output / p.m.high * columns << p.shift;
  }
  return {Pinned(p.m.rows + output * p.m.row_bytes), scales};
}

// The scale of a piece's chunk `place`, of so many: of a last one if there are fewer.
__device__ __forceinline__ int64_t ScaleAt(const Call& p, const Row& row, int first, int place,
                                           int chunks) {
  return (row.scales + first + min(place, chunks - 1) * kChunkInputs) >> p.shift;
}

__device__ __forceinline__ uint32_t WordAt(const uint8_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}

// The same where bytes begin at a multiple of two.
__device__ __forceinline__ uint32_t HalvesAt(const uint8_t* from) {
  uint32_t word[1];
  LoadWords<2>(from, word);
  return word[0];
}

// Sixteen values as 16-bit floats, four to a word: their lower bytes, and their upper ones.
struct Table {
  uint32_t low[4];
  uint32_t high[4];
};

template <typename T, typename Value>
__device__ __forceinline__ Table TableOf(const Value& value) {
  Table table{};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = PackPair<T>(value(i), 0.0f);
    table.low[i / 4] |= (bits & 0xffu) << (i % 4 * 8);
    table.high[i / 4] |= (bits >> 8) << (i % 4 * 8);
  }
  return table;
}

// Bytes of a table that four indices of four bits stand for: of each index, `at` has the lower
// three bits, and `above` its place among four, plus four if its highest bit is set.
__device__ __forceinline__ uint32_t BytesOf(const uint32_t (&bytes)[4], uint32_t at,
                                            uint32_t above) {
  return Permuted(Permuted(bytes[0], bytes[1], at), Permuted(bytes[2], bytes[3], at), above);
}

// Two of the values that the lower or upper half of a word of indices stands for: kSelect says
// which bytes, the lower ones of all four being 0 to 3, the upper ones 4 to 7.
__device__ __forceinline__ uint32_t PairOf(const Table& table, uint32_t word, bool upper,
                                           uint32_t select) {
  const int shift = upper ? 16 : 0;
  const uint32_t at = (word & 0x77777777u) >> shift;
  const uint32_t above = AndOr(word >> 1, 0x44444444u, 0x32103210u) >> shift;
  return Permuted(BytesOf(table.low, at, above), BytesOf(table.high, at, above), select);
}

// The types' pieces, as four lanes have one between them. `own`: scales of a quarter of the groups,
// in their order. Pair: two codes of a chunk of 32 inputs, in its lower or upper half (step), the
// first or the second two of a lane's four there. A type of whose pieces a row needn't be a
// multiple says how the rest is taken (Tail).

// Codes in bytes of four inputs out of 16. A mask leaves the first and the third of them in a word,
// or the second and the fourth.
struct InBytes {
  static constexpr int kLane = 4;
  static constexpr bool kAlternate = true;
  static constexpr bool kHasMinima = false;
  using Tail = void;
  template <typename T>
  __device__ __forceinline__ static Table Values(const PackedMatrix&) {
    return {};
  }
};

template <int kBits>
struct TensorWithMinima : InBytes {
  static constexpr int kHigh = kBits == 5 ? 32 : 0;
  static constexpr int kInputs = 256, kGroup = 32, kOwn = kInputs / kGroup / 4;
  static constexpr bool kHasMinima = true;
  uint32_t codes[4][2], high[2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* block = row.codes + int64_t{piece} * (144 + kHigh);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint8_t* from = block + 16 + step * 16 + place * 4;
      if constexpr (kBits == 5) high[step] = WordAt(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i][step] = WordAt(from + kHigh + i * 32);
      }
    }
    uint32_t first[4];  // two halves, and eight scales and minima of 6 bits
    LoadWords<16>(block, first);
    const int at = place % 2 * 16;
    const uint32_t a = first[1] >> at, b = first[2] >> at, c = first[3] >> at;
    const bool upper = place >= 2;
    const uint32_t s = upper ? (c & 0x0f0fu) | (a >> 2 & 0x3030u) : a & 0x3f3fu;
    const uint32_t m = upper ? (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u) : b & 0x3f3fu;
    const float d = __half2float(__ushort_as_half(static_cast<unsigned short>(first[0])));
    const float least = __half2float(__ushort_as_half(static_cast<unsigned short>(first[0] >> 16)));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(s >> (8 * i) & 0xffu);
      own[i].low = -least * static_cast<float>(m >> (8 * i) & 0xffu);
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table&, int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk / 2][step] >> (chunk % 2 * 4 + byte * 8);
    uint32_t code = AndOr(word, 0x000f000fu, kBase<T>);
    if constexpr (kBits == 5) {
      code = AndOr(ShiftDown(high[step], chunk + byte * 8 - 4), 0x00100010u, code);
    }
    return SubtractPairs<T>(code, kBase<T>);
  }
};

// Half a block: of a whole one, codes of two outputs would be too many registers.
struct TensorQ6K : InBytes {
  static constexpr int kInputs = 128, kGroup = 16, kOwn = kInputs / kGroup / 4;
  uint32_t codes[2][2], high[2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* block = row.codes + int64_t{piece / 2} * 210;
    const int half = piece % 2;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int at = step * 16 + place * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) codes[i][step] = HalvesAt(block + half * 64 + i * 32 + at);
      high[step] = HalvesAt(block + 128 + half * 32 + at);
    }
    const uint8_t* scales = block + 192 + half * 8 + place * kOwn;
    const float d = HalfAt(block + 208);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(static_cast<int8_t>(scales[i]));
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table&, int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk % 2][step] >> (chunk / 2 * 4 + byte * 8);
    const uint32_t above = ShiftDown(high[step], chunk * 2 + byte * 8 - 4);
    const uint32_t code = AndOr(above, 0x00300030u, AndOr(word, 0x000f000fu, kBase<T>));
    return SubtractPairs<T>(code, kBase<T> + 32 * 0x10001u);
  }
};

struct TensorQ2K : InBytes {
  static constexpr int kInputs = 256, kGroup = 16, kOwn = kInputs / kGroup / 4;
  static constexpr bool kHasMinima = true;
  uint32_t codes[2][2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* block = row.codes + int64_t{piece} * 84;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i / 2][i % 2] = WordAt(block + 16 + i * 16 + place * 4);
    }
    const uint32_t both = WordAt(block + place * 4);
    const float d = HalfAt(block + 80), least = HalfAt(block + 82);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(both >> (8 * i) & 15u);
      own[i].low = -least * static_cast<float>(both >> (8 * i + 4) & 15u);
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table&, int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk / 4][step] >> (chunk % 4 * 2 + byte * 8);
    return SubtractPairs<T>(AndOr(word, 0x00030003u, kBase<T>), kBase<T>);
  }
};

struct TensorQ3K : InBytes {
  static constexpr int kInputs = 256, kGroup = 16, kOwn = kInputs / kGroup / 4;
  uint32_t codes[2][2], high[2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* block = row.codes + int64_t{piece} * 110;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int at = step * 16 + place * 4;
      high[step] = HalvesAt(block + at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[half][step] = HalvesAt(block + 32 + half * 32 + at);
      }
    }
    const uint8_t* packed = block + 96;  // sixteen scales of 6 bits
    const uint32_t lower = HalvesAt(packed + place % 2 * 4) >> (place / 2 * 4) & 0x0f0f0f0fu;
    const uint32_t upper = HalvesAt(packed + 8) >> (place * 2) & 0x03030303u;
    const uint32_t scales = lower | upper << 4;
    const float d = HalfAt(block + 108);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i].scale = d * static_cast<float>(static_cast<int>(scales >> (8 * i) & 0xffu) - 32);
    }
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table&, int chunk, int step, int byte) const {
    const uint32_t word = codes[chunk / 4][step] >> (chunk % 4 * 2 + byte * 8);
    const uint32_t above = ShiftDown(high[step], chunk + byte * 8 - 2);
    const uint32_t code = AndOr(above, 0x00040004u, AndOr(word, 0x00030003u, kBase<T>));
    return SubtractPairs<T>(code, kBase<T> + 4 * 0x10001u);
  }
};

// 8-bit floats. kChunks: of a piece.
template <int kChunks>
struct TensorFloat8 : InBytes {
  static constexpr int kInputs = kChunks * kChunkInputs, kGroup = kChunkInputs, kOwn = 1;
  using Tail = TensorFloat8<1>;
  uint32_t codes[kChunks][2];
  ScaleAndLow own[kOwn];

  __device__ __forceinline__ void Load(const Call& p, const Row& row, int piece, int place) {
    const int first = piece * kInputs;
    const uint8_t* from = row.codes + first + place * 4;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) codes[i / 2][i % 2] = WordAt(from + i * 16);
    own[0].scale = StoredScale(p.m, ScaleAt(p, row, first, place, kChunks));
    if (HasNan()) own[0].scale = __uint_as_float(0x7fc00000u);
  }

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table&, int chunk, int step, int byte) const {
    // As a 16-bit float its exponent is 8 or 120 too small.
    constexpr bool kHalf = std::is_same<T, __half>::value;
    constexpr uint32_t kMagnitude = kHalf ? 0x3f803f80u : 0x07f007f0u;
    const uint32_t word = codes[chunk][step] >> (byte * 8);
    const uint32_t code = AndOr(word << 8, 0x80008000u, word << (kHalf ? 7 : 4) & kMagnitude);
    return MultiplyPairs<T>(code, kHalf ? 0x5c005c00u : 0x7b807b80u);
  }

  __device__ __forceinline__ bool HasNan() const {
    uint32_t carried = 0;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      carried |= (codes[i / 2][i % 2] & 0x7f7f7f7fu) + 0x01010101u;
    }
    // Of each lane of the four: a scale of theirs makes the output none, whichever of them is used.
#pragma unroll
    for (int other = 1; other < 4; other *= 2) {
      carried |= __shfl_xor_sync(kFullWarp, carried, other);
    }
    return (carried & 0x80808080u) != 0;
  }
};

// Halves of a byte that are indices into a table. Orders of a byte's two, and how a pair is made of
// the bytes that PairOf has found.

// ggml's: the lower halves are of the first 16 inputs.
struct InHalves {
  static constexpr int kLane = 4;
  __device__ __forceinline__ static uint32_t PairIn(const Table& table, uint32_t word, int step,
                                                    int two) {
    return PairOf(table, word, two == 1, step == 0 ? 0x6240u : 0x7351u);
  }
};

// Neighbours, the first of them in the lower or in the upper half.
template <bool kUpperFirst>
struct AsNeighbours {
  static constexpr int kLane = 8;
  __device__ __forceinline__ static uint32_t PairIn(const Table& table, uint32_t word, int step,
                                                    int two) {
    constexpr uint32_t kFirst = kUpperFirst ? 0x4051u : 0x5140u;
    return PairOf(table, word, step == 1, two == 0 ? kFirst : kFirst + 0x2222u);
  }
};

template <int kChunks, typename Order>
struct TensorTable : Order {
  static constexpr int kInputs = kChunks * kChunkInputs, kGroup = kChunkInputs;
  static constexpr int kOwn = kChunks == 8 ? 2 : 1;
  static constexpr bool kAlternate = false, kHasMinima = false;
  uint32_t codes[kChunks];
  ScaleAndLow own[kOwn];

  template <typename T>
  __device__ __forceinline__ uint32_t Pair(const Table& table, int chunk, int step, int two) const {
    return Order::PairIn(table, codes[chunk], step, two);
  }
};

template <int kChunks>
struct TensorIq4Nl : TensorTable<kChunks, InHalves> {
  using Tail = TensorIq4Nl<1>;

  template <typename T>
  __device__ __forceinline__ static Table Values(const PackedMatrix&) {
    return TableOf<T>([](int i) { return Iq4Level(static_cast<uint32_t>(i)); });
  }
  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* blocks = row.codes + int64_t{piece} * (kChunks * 18);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) this->codes[i] = HalvesAt(blocks + i * 18 + 2 + place * 4);
    this->own[0].scale = HalfAt(blocks + min(place, kChunks - 1) * 18);
  }
};

struct TensorIq4Xs : TensorTable<8, InHalves> {
  using Tail = void;

  template <typename T>
  __device__ __forceinline__ static Table Values(const PackedMatrix& m) {
    return TensorIq4Nl<1>::Values<T>(m);
  }
  __device__ __forceinline__ void Load(const Call&, const Row& row, int piece, int place) {
    const uint8_t* block = row.codes + int64_t{piece} * 136;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = WordAt(block + 8 + i * 16 + place * 4);
    const uint32_t first = WordAt(block), lower = WordAt(block + 4) >> (place * 8);
    const uint32_t upper = first >> (16 + place * 4);
    const float d = __half2float(__ushort_as_half(static_cast<unsigned short>(first)));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t code = (lower >> (4 * i) & 15u) | (upper >> (2 * i) & 3u) << 4;
      own[i].scale = d * static_cast<float>(static_cast<int>(code) - 32);
    }
  }
};

template <int kChunks>
struct TensorFloat4 : TensorTable<kChunks, AsNeighbours<false>> {
  using Tail = TensorFloat4<1>;

  template <typename T>
  __device__ __forceinline__ static Table Values(const PackedMatrix&) {
    return TableOf<T>([](int i) { return Float4Value(static_cast<uint32_t>(i)); });
  }
  __device__ __forceinline__ void Load(const Call& p, const Row& row, int piece, int place) {
    const int first = piece * this->kInputs;
    const uint8_t* from = row.codes + first / 2 + place * 4;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) this->codes[i] = WordAt(from + i * 16);
    const auto* powers = static_cast<const uint8_t*>(p.m.scale);
    this->own[0].scale = PowerValue(powers[ScaleAt(p, row, first, place, kChunks)]);
  }
};

template <int kChunks>
struct TensorIndices : TensorTable<kChunks, AsNeighbours<true>> {
  using Tail = TensorIndices<1>;

  template <typename T>
  __device__ __forceinline__ static Table Values(const PackedMatrix& m) {
    return TableOf<T>([&](int i) { return m.table[i]; });
  }
  __device__ __forceinline__ void Load(const Call& p, const Row& row, int piece, int place) {
    const int first = piece * this->kInputs;
    const uint8_t* from = row.codes + first / 2 + place * 4;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) this->codes[i] = WordAt(from + i * 16);
    this->own[0].scale = StoredMagnitude(p.m, ScaleAt(p, row, first, place, kChunks));
  }
};

// A row's inputs of a lane in a step, as Pair has their codes.
struct InputPairs {
  uint32_t low;
  uint32_t high;
};

template <typename Block>
__device__ __forceinline__ InputPairs LoadInputs(const uint16_t* x, int step) {
  struct alignas(8) Two {
    uint32_t at[2];
  };
  const int first = Block::kLane == 4 ? step * 16 : step / 2 * 32 + step % 2 * 4;
  const Two two = *reinterpret_cast<const Two*>(x + first);
  if constexpr (!Block::kAlternate) return {two.at[0], two.at[1]};
  return {__byte_perm(two.at[0], two.at[1], 0x5410), __byte_perm(two.at[0], two.at[1], 0x7632)};
}

// What the lane that has a group's scale says.
template <typename Block>
__device__ __forceinline__ ScaleAndLow OfGroup(const Block& block, int group) {
  const ScaleAndLow& own = block.own[group % Block::kOwn];
  const int place = group / Block::kOwn;
  const float scale = __shfl_sync(kFullWarp, own.scale, place, 4);
  if constexpr (!Block::kHasMinima) return {scale, 0};
  return {scale, __shfl_sync(kFullWarp, own.low, place, 4)};
}

template <typename Block>
__device__ __forceinline__ void AddScaled(const Block (&blocks)[kPair], int group,
                                          const float (&products)[4], const float (&inputs)[4],
                                          float (&sums)[4]) {
#pragma unroll
  for (int n = 0; n < kPair; ++n) {
    const ScaleAndLow by = OfGroup(blocks[n], group);
#pragma unroll
    for (int c = 2 * n; c < 2 * n + 2; ++c) {
      sums[c] = fmaf(by.scale, products[c], sums[c]);
      if constexpr (Block::kHasMinima) sums[c] = fmaf(by.low, inputs[c], sums[c]);
    }
  }
}

// Adds the part of a block, of whose inputs x has a lane's first.
template <typename T, typename Block>
__device__ __forceinline__ void AddBlock(const Block (&blocks)[kPair], const Table& table,
                                         const uint16_t* x, float (&sums)[4]) {
  constexpr int kEach = Block::kGroup / 16;
#pragma unroll
  for (int group = 0; group < Block::kInputs / Block::kGroup; ++group) {
    float products[4] = {}, inputs[4] = {};
#pragma unroll
    for (int i = group * kEach; i < (group + 1) * kEach; ++i) {
      const auto [low, high] = LoadInputs<Block>(x, i);
      uint32_t a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = blocks[j % 2].template Pair<T>(table, i / 2, i % 2, j / 2);
      Multiply<T>(products, a, low, high);
      if constexpr (Block::kHasMinima) AddInputs<T>(low, high, inputs);
    }
    AddScaled(blocks, group, products, inputs, sums);
  }
}

// Adds the part of piece `i`.
template <typename T, typename Block>
__device__ __forceinline__ void AddPiece(const Call& p, const Row (&rows)[kPair], int i,
                                         const Table& table, const uint16_t* x, float (&sums)[4]) {
  const int place = static_cast<int>(threadIdx.x) % 4;
  Block blocks[kPair];
#pragma unroll
  for (int n = 0; n < kPair; ++n) blocks[n].Load(p, rows[n], i, place);
  AddBlock<T>(blocks, table, x + int64_t{i} * Block::kInputs, sums);
}

template <typename T, typename Block>
__device__ __forceinline__ void AddTile(Call p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Tile tile = FindTile(p);
  if (tile.rows == 0) return;
  if (tile.chosen != nullptr) {
    p.m.rows = static_cast<const uint8_t*>(tile.chosen->parts[0]);
    p.m.scale = tile.chosen->parts[1];
  }
  Row rows[kPair];
#pragma unroll
  for (int n = 0; n < kPair; ++n) {  // an output that is not there repeats the last one
    rows[n] = RowOf(p, min(tile.first + lane / 4 + 8 * n, p.outputs - 1));
  }
  const Table table = Block::template Values<T>(p.m);
  const uint16_t* x = Pinned(RowOfLane(p, tile) + lane % 4 * Block::kLane);
  float sums[4] = {};
  const int pieces = static_cast<int>(p.inputs / Block::kInputs);
  for (int i = warp; i < pieces; i += kWarps) AddPiece<T, Block>(p, rows, i, table, x, sums);
  if constexpr (!std::is_void<typename Block::Tail>::value) {
    using Tail = typename Block::Tail;
    const int chunks = static_cast<int>(p.inputs / Tail::kInputs);
    const int first = pieces * (Block::kInputs / Tail::kInputs);
    for (int i = first + warp; i < chunks; i += kWarps) {
      AddPiece<T, Tail>(p, rows, i, table, x, sums);
    }
  }
  StoreTile<T>(p, {lane / 4, lane / 4 + 8}, sums);
}

template <typename T, typename Block>
__global__ void __launch_bounds__(kWarp* kWarps, 2) PackedTensorKernel(Call p) {
  if (kForTensorCores) AddTile<T, Block>(p);
}

template <typename T, typename Block>
void LaunchBlock(const Call& p, cudaStream_t stream) {
  LaunchTiles(PackedTensorKernel<T, Block>, p, stream);
}

template <typename T>
void LaunchType(const Call& p, cudaStream_t stream) {
  switch (p.m.packing) {
    case Packing::kFloat8:
      return LaunchBlock<T, TensorFloat8<4>>(p, stream);
    case Packing::kFloat4:
      return LaunchBlock<T, TensorFloat4<4>>(p, stream);
    case Packing::kTable:
      return LaunchBlock<T, TensorIndices<4>>(p, stream);
    default:
      break;
  }
  switch (p.m.type) {
    case GgmlType::kQ2K:
      return LaunchBlock<T, TensorQ2K>(p, stream);
    case GgmlType::kQ3K:
      return LaunchBlock<T, TensorQ3K>(p, stream);
    case GgmlType::kQ4K:
      return LaunchBlock<T, TensorWithMinima<4>>(p, stream);
    case GgmlType::kQ5K:
      return LaunchBlock<T, TensorWithMinima<5>>(p, stream);
    case GgmlType::kQ6K:
      return LaunchBlock<T, TensorQ6K>(p, stream);
    case GgmlType::kIq4Nl:
      return LaunchBlock<T, TensorIq4Nl<4>>(p, stream);
    default:
      return LaunchBlock<T, TensorIq4Xs>(p, stream);
  }
}

// The inputs, as a power of two, that share a scale beside the codes; -1 if they are none.
int ShiftOf(const PackedMatrix& m) {
  int64_t inputs = kPackedChunk;
  if (m.packing == Packing::kTable) inputs = m.block;
  if (m.packing == Packing::kFloat8) inputs = m.wide;
  if (m.packing == Packing::kFloat8 && inputs >= m.inputs) return 31;
  int shift = 0;
  while (int64_t{1} << shift < inputs) ++shift;
  return int64_t{1} << shift == inputs ? shift : -1;
}

}  // namespace

bool PackedFitsTensorCores(const PackedParams& params) {
  return ShiftOf(params.matrix) >= 0 && params.dtype != FloatType::kFloat32 && HasTensorCores();
}

void LaunchPackedOnTensorCores(const PackedParams& params, const void* x, const ChosenCall& chosen,
                               cudaStream_t stream) {
  Call p{};
  static_cast<TileCall&>(p) = TileCallOf(params, x, chosen);
  p.m = params.matrix;
  p.shift = ShiftOf(params.matrix);
  return params.dtype == FloatType::kFloat16 ? LaunchType<__half>(p, stream)
                                             : LaunchType<__nv_bfloat16>(p, stream);
}

}  // namespace exkv

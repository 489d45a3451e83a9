// What packed rows stand for, a chunk of 32 inputs at a time, as a lane has it: rounded in the
// order of exkv/weights, to the bit. A chunk's bytes are loaded first, in the largest pieces to
// which their type aligns them, so that those of several chunks are under way at once; its values
// are found from registers. Each type has its sizes, Load(block, chunk) and Value(i).
#pragma once

#include "floats.cuh"
#include "linear_packed.cuh"

namespace exkv {

constexpr int kChunkInputs = static_cast<int>(kPackedChunk);

// Loads kWords words of 32 bits from where `from` is a multiple of kAlign bytes.
template <int kAlign, int kWords>
__device__ __forceinline__ void LoadWords(const uint8_t* from, uint32_t (&to)[kWords]) {
  if constexpr (kAlign >= 16 && kWords % 4 == 0) {
    struct alignas(16) Four {
      uint32_t at[4];
    };
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const Four four = reinterpret_cast<const Four*>(from)[i / 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = four.at[j];
    }
  } else if constexpr (kAlign >= 8 && kWords % 2 == 0) {
    struct alignas(8) Two {
      uint32_t at[2];
    };
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const Two two = reinterpret_cast<const Two*>(from)[i / 2];
      to[i] = two.at[0], to[i + 1] = two.at[1];
    }
  } else if constexpr (kAlign >= 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      to[i] = uint32_t{halves[2 * i]} | uint32_t{halves[2 * i + 1]} << 16;
    }
  }
}

// Byte `i` of words.
template <int kWords>
__device__ __forceinline__ uint32_t ByteOf(const uint32_t (&words)[kWords], int i) {
  return words[i / 4] >> (i % 4 * 8) & 0xffu;
}

__device__ __forceinline__ float HalfAt(const uint8_t* from) {
  return __half2float(*reinterpret_cast<const __half*>(from));
}

// Products and differences that are rounded one by one: nvcc would make one fused step of two.
__device__ __forceinline__ float Product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float Difference(float a, float b) { return __fsub_rn(a, b); }

// ggml's blocks ---------------------------------------------------------------------------------

struct CudaQ2K {
  static constexpr int kChunks = 8, kBytes = 84, kAlign = 4;
  uint32_t codes[8];
  float scale[2], low[2];  // of 16 inputs each
  int shift;

  __device__ __forceinline__ void Load(const uint8_t* block, int chunk) {
    LoadWords<kAlign>(block + 16 + chunk / 4 * 32, codes);
    shift = chunk % 4 * 2;
    const float d = HalfAt(block + 80), least = HalfAt(block + 82);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t both = block[2 * chunk + i];
      scale[i] = Product(d, static_cast<float>(both & 15));
      low[i] = Product(least, static_cast<float>(both >> 4));
    }
  }
  __device__ __forceinline__ float Value(int i) const {
    const auto code = static_cast<float>(ByteOf(codes, i) >> shift & 3u);
    return Difference(Product(code, scale[i / 16]), low[i / 16]);
  }
};

struct CudaQ3K {
  static constexpr int kChunks = 8, kBytes = 110, kAlign = 2;
  uint32_t codes[8], high[8];
  float scale[2];
  int chunk_;

  __device__ __forceinline__ void Load(const uint8_t* block, int chunk) {
    LoadWords<kAlign>(block + 32 + chunk / 4 * 32, codes);
    LoadWords<kAlign>(block, high);
    chunk_ = chunk;
    const float d = HalfAt(block + 108);
    const uint8_t* packed = block + 96;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int group = 2 * chunk + i;
      const int code = (packed[group % 8] >> (group / 8 * 4) & 15) |
                       (packed[8 + group % 4] >> (group / 4 * 2) & 3) << 4;
      scale[i] = Product(d, static_cast<float>(code - 32));
    }
  }
  __device__ __forceinline__ float Value(int i) const {
    const int low = static_cast<int>(ByteOf(codes, i) >> (chunk_ % 4 * 2) & 3u);
    const int above = static_cast<int>(ByteOf(high, i) >> chunk_ & 1u);
    return Product(static_cast<float>(low + above * 4 - 4), scale[i / 16]);
  }
};

// Codes of 4 bits, or of 5, of which the fifth lie before the others.
template <int kBits>
struct CudaWithMinima {
  static constexpr int kHigh = kBits == 5 ? 32 : 0;
  static constexpr int kChunks = 8, kBytes = 144 + kHigh, kAlign = 16;
  uint32_t codes[8], high[8];
  float scale, low;
  int chunk_;

  __device__ __forceinline__ void Load(const uint8_t* block, int chunk) {
    LoadWords<kAlign>(block + 16 + kHigh + chunk / 2 * 32, codes);
    if constexpr (kBits == 5) LoadWords<kAlign>(block + 16, high);
    chunk_ = chunk;
    uint32_t first[4];  // two halves, and eight scales and minima of 6 bits
    LoadWords<kAlign>(block, first);
    const uint32_t packed[3] = {first[1], first[2], first[3]};
    const int i = chunk % 4;
    const uint32_t a = ByteOf(packed, i), b = ByteOf(packed, 4 + i), c = ByteOf(packed, 8 + i);
    const uint32_t s = chunk < 4 ? a & 63u : (c & 15u) | (a >> 2 & 48u);
    const uint32_t m = chunk < 4 ? b & 63u : c >> 4 | (b >> 2 & 48u);
    const auto half = [&](uint32_t bits) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    };
    scale = Product(half(first[0] & 0xffffu), static_cast<float>(s));
    low = Product(half(first[0] >> 16), static_cast<float>(m));
  }
  __device__ __forceinline__ float Value(int i) const {
    uint32_t code = ByteOf(codes, i) >> (chunk_ % 2 * 4) & 15u;
    if constexpr (kBits == 5) code |= (ByteOf(high, i) >> chunk_ & 1u) << 4;
    return Difference(Product(static_cast<float>(code), scale), low);
  }
};

using CudaQ4K = CudaWithMinima<4>;
using CudaQ5K = CudaWithMinima<5>;

struct CudaQ6K {
  static constexpr int kChunks = 8, kBytes = 210, kAlign = 2;
  uint32_t codes[8], high[8];
  float scale[2];
  int of_half;

  __device__ __forceinline__ void Load(const uint8_t* block, int chunk) {
    of_half = chunk % 4;
    LoadWords<kAlign>(block + chunk / 4 * 64 + of_half % 2 * 32, codes);
    LoadWords<kAlign>(block + 128 + chunk / 4 * 32, high);
    const float d = HalfAt(block + 208);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = Product(d, static_cast<float>(static_cast<int8_t>(block[192 + 2 * chunk + i])));
    }
  }
  __device__ __forceinline__ float Value(int i) const {
    const int low = static_cast<int>(ByteOf(codes, i) >> (of_half / 2 * 4) & 15u);
    const int above = static_cast<int>(ByteOf(high, i) >> (of_half * 2) & 3u);
    return Product(static_cast<float>(low + above * 16 - 32), scale[i / 16]);
  }
};

// ggml's table of 16 levels, four to a word.
__device__ __forceinline__ float Iq4Level(uint32_t index) {
  const uint32_t levels[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
  const uint32_t word =
      index < 8 ? (index < 4 ? levels[0] : levels[1]) : (index < 12 ? levels[2] : levels[3]);
  return static_cast<float>(static_cast<int8_t>(word >> (index % 4 * 8) & 0xffu));
}

// 32 weights from 16 bytes: their lower halves, then their upper ones.
struct Iq4Chunk {
  uint32_t codes[4];
  float scale;

  __device__ __forceinline__ float Value(int i) const {
    return Product(Iq4Level(ByteOf(codes, i % 16) >> (i / 16 * 4) & 15u), scale);
  }
};

struct CudaIq4Nl : Iq4Chunk {
  static constexpr int kChunks = 1, kBytes = 18, kAlign = 2;

  __device__ __forceinline__ void Load(const uint8_t* block, int) {
    LoadWords<kAlign>(block + 2, codes);
    scale = HalfAt(block);
  }
};

struct CudaIq4Xs : Iq4Chunk {
  static constexpr int kChunks = 8, kBytes = 136, kAlign = 8;

  __device__ __forceinline__ void Load(const uint8_t* block, int chunk) {
    LoadWords<kAlign>(block + 8 + chunk * 16, codes);
    const int low = block[4 + chunk / 2] >> (chunk % 2 * 4) & 15;
    const int code = (low | (block[2 + chunk / 4] >> (chunk % 4 * 2) & 3) << 4) - 32;
    scale = Product(HalfAt(block), static_cast<float>(code));
  }
};

// 8-bit floats, and tables ----------------------------------------------------------------------

__device__ __forceinline__ float Float8Value(uint32_t bits) {
  if ((bits & 0x7fu) == 0x7fu) return __uint_as_float(0x7fc00000u);
  // As a float16 its exponent is 8 too small.
  const uint32_t half = (bits & 0x80u) << 8 | (bits & 0x7fu) << 7;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * 256.0f;
}

// 2^(power - 127).
__device__ __forceinline__ float PowerValue(uint32_t power) {
  if (power == 255) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(power == 0 ? 0x00400000u : power << 23);
}

__device__ __forceinline__ float StoredScale(const PackedMatrix& m, int64_t index) {
  switch (m.scale_type) {
    case ScaleType::kFloat32:
      return static_cast<const float*>(m.scale)[index];
    case ScaleType::kFloat16:
      return ToFloat(static_cast<const __half*>(m.scale)[index]);
    case ScaleType::kBFloat16:
      return ToFloat(static_cast<const __nv_bfloat16*>(m.scale)[index]);
    case ScaleType::kPowers:
      break;
  }
  return PowerValue(static_cast<const uint8_t*>(m.scale)[index]);
}

struct Float8Chunk {
  uint32_t codes[8];
  float scale;

  __device__ __forceinline__ void LoadFrom(const PackedMatrix& m, int64_t row, int64_t chunk) {
    LoadWords<16>(m.rows + row * m.row_bytes + chunk * kPackedChunk, codes);
    const int64_t columns = (m.inputs + m.wide - 1) / m.wide;
    scale = StoredScale(m, row / m.high * columns + chunk * kPackedChunk / m.wide);
  }
  __device__ __forceinline__ float Value(int i) const {
    return Product(Float8Value(ByteOf(codes, i)), scale);
  }
};

// Floats of 4 bits, the sign the highest.
__device__ __forceinline__ float Float4Value(uint32_t code) {
  // Its exponent's two bits and the one below as those of a float16, 14 too small.
  const uint32_t half = (code & 8u) << 12 | (code & 7u) << 9;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half))) * 16384.0f;
}

struct Float4Chunk {
  uint32_t codes[4];
  float scale;

  __device__ __forceinline__ void LoadFrom(const PackedMatrix& m, int64_t row, int64_t chunk) {
    LoadWords<16>(m.rows + row * m.row_bytes + chunk * (kPackedChunk / 2), codes);
    scale =
        PowerValue(static_cast<const uint8_t*>(m.scale)[row * (m.inputs / kPackedChunk) + chunk]);
  }
  __device__ __forceinline__ float Value(int i) const {
    return Product(Float4Value(ByteOf(codes, i / 2) >> (i % 2 * 4) & 15u), scale);
  }
};

// The largest magnitude of a table's block.
__device__ __forceinline__ float StoredMagnitude(const PackedMatrix& m, int64_t block) {
  if (m.nested == nullptr) return static_cast<const float*>(m.magnitudes)[block];
  const float found = m.nested_table[static_cast<const uint8_t*>(m.magnitudes)[block]];
  return __fadd_rn(Product(found, m.nested[block / 256]), m.offset[0]);
}

struct TableChunk {
  uint32_t codes[4];
  float magnitude;
  const float* table;

  __device__ __forceinline__ void LoadFrom(const PackedMatrix& m, int64_t row, int64_t chunk) {
    LoadWords<16>(m.rows + row * m.row_bytes + chunk * (kPackedChunk / 2), codes);
    table = m.table;
    magnitude = StoredMagnitude(m, (row * m.inputs + chunk * kPackedChunk) / m.block);
  }
  __device__ __forceinline__ float Value(int i) const {
    const uint32_t both = ByteOf(codes, i / 2);
    return Product(table[i % 2 == 0 ? both >> 4 : both & 15u], magnitude);
  }
};

// A chunk of a row of ggml's blocks.
template <typename Block>
struct GgmlChunk : Block {
  __device__ __forceinline__ void LoadFrom(const PackedMatrix& m, int64_t row, int64_t chunk) {
    const int64_t block = chunk / Block::kChunks;
    this->Load(m.rows + row * m.row_bytes + block * Block::kBytes,
               static_cast<int>(chunk % Block::kChunks));
  }
};

// Calls with a chunk of the matrix's own type, of which nothing is loaded.
template <typename Call>
void WithChunk(const PackedMatrix& m, const Call& call) {
  if (m.packing == Packing::kFloat8) return call(Float8Chunk());
  if (m.packing == Packing::kTable) return call(TableChunk());
  if (m.packing == Packing::kFloat4) return call(Float4Chunk());
  switch (m.type) {
    case GgmlType::kQ2K:
      return call(GgmlChunk<CudaQ2K>());
    case GgmlType::kQ3K:
      return call(GgmlChunk<CudaQ3K>());
    case GgmlType::kQ4K:
      return call(GgmlChunk<CudaQ4K>());
    case GgmlType::kQ5K:
      return call(GgmlChunk<CudaQ5K>());
    case GgmlType::kQ6K:
      return call(GgmlChunk<CudaQ6K>());
    case GgmlType::kIq4Nl:
      return call(GgmlChunk<CudaIq4Nl>());
    case GgmlType::kIq4Xs:
      return call(GgmlChunk<CudaIq4Xs>());
    default:  // which the binding leaves to the reference
      return;
  }
}

}  // namespace exkv

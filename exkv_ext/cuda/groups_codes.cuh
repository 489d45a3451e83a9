// Codes of a weight matrix in groups, and what stands beside them, as a lane loads them: see
// exkv/ops/weight_groups.py. Lane l of a warp has output l / 4 of a block of eight, and inputs
// 8 (l % 4) to 8 (l % 4) + 7 of a chunk of 32, so that a warp loads a chunk of a block in whole
// lines. Loads are a step of their own, so that several are under way before the first is looked
// at.
#pragma once

#include "floats.cuh"
#include "linear_groups.cuh"

namespace exkv {

// A matrix, with what only the host has time to find out.
struct GroupsCall {
  GroupsMatrix m;
  int chunks;
  int chunk_bytes;
  int64_t block_bytes;
  int stored_bytes;  // of a scale
  int scales_bytes;  // of an output's scales
  int shifts_bytes;  // of what it has beside them
  uint32_t inverse;  // of a group's chunks, times 2^32 and rounded up; 0 of one
};

// See GroupsCall::inverse.
inline uint32_t InverseOf(int64_t group) {
  const auto each = static_cast<uint64_t>(group / kGroupsChunk);
  return each == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + each - 1) / each);
}

inline GroupsCall CallOf(const GroupsMatrix& m) {
  const int stored = m.scale_type == FloatType::kFloat32 ? 4 : 2;
  const auto scales = static_cast<int>(m.groups * stored);
  return {m,
          static_cast<int>(m.chunks()),
          static_cast<int>(kGroupsChunk * m.bits),
          m.block_bytes(),
          stored,
          scales,
          m.beside == GroupsShift::kOffset ? scales : static_cast<int>(m.zero_bytes()),
          InverseOf(m.group)};
}

// The group of a chunk: exact as long as there are fewer than 2^32 / (a group's chunks) of them.
__device__ __forceinline__ int GroupOf(uint32_t inverse, int chunk) {
  if (inverse == 0) return chunk;
  return static_cast<int>(uint64_t{static_cast<uint32_t>(chunk)} * inverse >> 32);
}

constexpr int kVectorBytes = 4 * static_cast<int>(kGroupsBlock);  // a word of each output
constexpr int kOctet = 8;                                         // inputs of a lane

// kBits 8 or 4, or 0 for codes in planes, or of 2 bits.
template <int kBits>
struct Octet {
  uint32_t words[2];  // of 4 bits: the first; in planes: the lower, and the upper one
  uint32_t scale;     // as it is stored
  uint32_t shift;     // likewise
};

// Bits of the lower plane.
__device__ __forceinline__ int LowBits(int64_t bits) { return bits >= 4 ? 4 : 2; }

__device__ __forceinline__ uint32_t WordAt(const uint8_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}

__device__ __forceinline__ uint32_t StoredAt(const uint8_t* from, int bytes) {
  return bytes == 4 ? *reinterpret_cast<const uint32_t*>(from)
                    : *reinterpret_cast<const uint16_t*>(from);
}

// Without a branch: all three cost less.
__device__ __forceinline__ float FloatOfStored(uint32_t stored, FloatType type) {
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(stored)));
  const float other = __uint_as_float(type == FloatType::kBFloat16 ? stored << 16 : stored);
  return type == FloatType::kFloat16 ? half : other;
}

// Of a chunk, those with a lane's first and second word.
struct Vectors {
  int first;
  int second;
};

template <int kBits>
__device__ __forceinline__ Vectors VectorsOf(int64_t bits, int place) {
  if constexpr (kBits == 8) return {2 * place, 2 * place + 1};
  if constexpr (kBits == 4) return {place, 0};
  const int low = LowBits(bits), high = static_cast<int>(bits) - low;
  return {low == 4 ? place : place / 2, low + (high == 2 ? place / 2 : 0)};
}

// `second`: bytes from the first word to the second, if there is one.
template <int kBits>
__device__ __forceinline__ void LoadCodes(const uint8_t* first, int second, int64_t bits,
                                          Octet<kBits>* octet) {
  octet->words[0] = WordAt(first);
  if (kBits == 8 || (kBits == 0 && bits != 2)) octet->words[1] = WordAt(first + second);
}

// Where an output's codes, scales and shifts begin for a lane; an output that is not there repeats
// the last one's.
struct Output {
  const uint8_t* codes;
  int second;  // bytes from a chunk's first word to its second
  const uint8_t* scale;
  const uint8_t* shift;
};

// An output's scales, and what it has beside them.
__device__ __forceinline__ const uint8_t* ScalesOf(const GroupsCall& p, int64_t output) {
  return static_cast<const uint8_t*>(p.m.scale) + output * p.scales_bytes;
}
__device__ __forceinline__ const uint8_t* ShiftsOf(const GroupsCall& p, int64_t output) {
  return static_cast<const uint8_t*>(p.m.shift) + output * p.shifts_bytes;
}

template <int kBits>
__device__ __forceinline__ Output FindOutput(const GroupsCall& p, int64_t block, int lane) {
  const GroupsMatrix& m = p.m;
  const int own = lane / 4;
  const auto [first, second] = VectorsOf<kBits>(m.bits, lane % 4);
  const int64_t output = min(block * kGroupsBlock + own, m.outputs - 1);
  Output found;
  found.codes = m.codes + block * p.block_bytes + own * 4 + first * kVectorBytes;
  found.second = (second - first) * kVectorBytes;
  found.scale = ScalesOf(p, output);
  found.shift = ShiftsOf(p, output);
  return found;
}

// What stands beside a group's codes, as it is stored.
struct Stored {
  uint32_t scale;
  uint32_t shift;
};

// `scales` and `shifts` of one output. Where `beside` and `bits` are constants, so is the path.
__device__ __forceinline__ Stored LoadStored(const GroupsCall& p, GroupsShift beside, int64_t bits,
                                             const uint8_t* scales, const uint8_t* shifts,
                                             int group) {
  Stored stored = {StoredAt(scales + group * p.stored_bytes, p.stored_bytes), 0};
  if (beside == GroupsShift::kOffset) {
    stored.shift = StoredAt(shifts + group * p.stored_bytes, p.stored_bytes);
  } else if (beside == GroupsShift::kZero) {
    const int zero = shifts[bits > 4 ? group : group / 2];
    stored.shift = bits > 4 ? zero : zero >> (group % 2 * 4) & 15;
  }
  return stored;
}

template <int kBits>
__device__ __forceinline__ Octet<kBits> LoadOctet(const GroupsCall& p, const Output& output,
                                                  int chunk) {
  const uint8_t* codes = output.codes + int64_t{chunk} * p.chunk_bytes;
  Octet<kBits> octet = {};
  LoadCodes(codes, output.second, p.m.bits, &octet);
  const Stored stored =
      LoadStored(p, p.m.beside, p.m.bits, output.scale, output.shift, GroupOf(p.inverse, chunk));
  octet.scale = stored.scale;
  octet.shift = stored.shift;
  return octet;
}

// Inputs 2 i and 2 i + 1 of the octet, in the halves of a word.
template <int kBits>
__device__ __forceinline__ uint32_t CodePair(const Octet<kBits>& octet, int64_t bits, int place,
                                             int i) {
  if constexpr (kBits == 8) return octet.words[i / 2] >> (i % 2 * 8) & 0x00ff00ffu;
  if constexpr (kBits == 4) return octet.words[0] >> (4 * i) & 0x000f000fu;
  const int low = LowBits(bits), high = static_cast<int>(bits) - low;
  const int at = low == 4 ? 0 : place % 2 * 8, above = high == 2 ? place % 2 * 8 : 4 * place;
  const uint32_t lower = octet.words[0] >> (at + low * i) & ((1u << low) - 1) * 0x10001u;
  return lower | (octet.words[1] >> (above + high * i) & ((1u << high) - 1) * 0x10001u) << low;
}

// A weight is scale * (code - 2^(bits - 1)) + offset.
struct ScaleAndOffset {
  float scale;
  float offset;
};

__device__ __forceinline__ ScaleAndOffset ScaleOf(GroupsShift beside, int64_t bits, FloatType type,
                                                  const Stored& stored) {
  const float middle = static_cast<float>(1 << (bits - 1));
  const float scale = FloatOfStored(stored.scale, type);
  if (beside == GroupsShift::kSymmetric) return {scale, 0};
  if (beside == GroupsShift::kZero) {
    return {scale, scale * (middle - static_cast<float>(stored.shift))};
  }
  return {scale, fmaf(scale, middle, FloatOfStored(stored.shift, type))};
}

template <int kBits>
__device__ __forceinline__ ScaleAndOffset ScaleOf(const GroupsMatrix& m,
                                                  const Octet<kBits>& octet) {
  return ScaleOf(m.beside, m.bits, m.scale_type, {octet.scale, octet.shift});
}

}  // namespace exkv

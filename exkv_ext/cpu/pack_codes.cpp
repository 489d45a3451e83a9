#include "pack_codes.h"

#include <cstring>

namespace exkv {
namespace {

// Of eight bytes' lowest kBits bits, those of every other byte, one behind the other.
template <int kBits>
inline uint64_t Gathered(uint64_t bytes) {
  constexpr uint64_t kField = (uint64_t{1} << kBits) - 1;
  constexpr uint64_t kTwo = (uint64_t{1} << 2 * kBits) - 1;
  const uint64_t words = bytes & (kField | kField << 16 | kField << 32 | kField << 48);
  const uint64_t pairs = (words | words >> (16 - kBits)) & (kTwo | kTwo << 32);
  return (pairs | pairs >> (32 - 2 * kBits)) & ((uint64_t{1} << 4 * kBits) - 1);
}

// A plane of one output's chunk: bits [below, below + kBits) of 32 codes. Its words of 16 bits are
// those of even and of odd inputs in turn, and so a step of 32 bits of every output's.
template <int kBits>
inline void PackPlane(const uint8_t* codes, int below, uint8_t* out) {
  constexpr int kEach = kBits == 8 ? 1 : 4 / kBits;  // eights of codes in a step
  constexpr int kOut = kBits == 8 ? 2 : 1;           // steps of them
  for (int step = 0; step < kGroupsChunk / 8 / kEach; ++step) {
    uint64_t even = 0, odd = 0;
    for (int i = 0; i < kEach; ++i) {
      uint64_t bytes;
      std::memcpy(&bytes, codes + (step * kEach + i) * 8, sizeof bytes);
      even |= Gathered<kBits>(bytes >> below) << 4 * kBits * i;
      odd |= Gathered<kBits>(bytes >> (below + 8)) << 4 * kBits * i;
    }
    for (int i = 0; i < kOut; ++i) {
      const auto both = static_cast<uint32_t>((even >> 16 * i & 0xffff) | (odd >> 16 * i) << 16);
      std::memcpy(out + (step * kOut + i) * kGroupsBlock * sizeof both, &both, sizeof both);
    }
  }
}

// One output's chunk; `out`: its place in the chunk's block.
template <int kLow, int kHigh>
inline void PackChunk(const uint8_t* codes, uint8_t* out) {
  PackPlane<kLow>(codes, 0, out);
  if constexpr (kHigh > 0) PackPlane<kHigh>(codes, kLow, out + kGroupsChunk * kLow);
}

// codes(row, chunk, to) gives 32 of them.
template <int kLow, int kHigh, typename Codes>
void PackBlocks(int64_t rows, int64_t chunks, int64_t begin, int64_t end, const Codes& codes,
                uint8_t* packed) {
  constexpr int64_t kBytes = kGroupsChunk * (kLow + kHigh);
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      uint8_t* out = packed + (block * chunks + chunk) * kBytes;
      for (int64_t i = 0; i < kGroupsBlock; ++i) {
        alignas(32) uint8_t of_chunk[kGroupsChunk] = {};
        const int64_t row = block * kGroupsBlock + i;
        if (row < rows) codes(row, chunk, of_chunk);
        PackChunk<kLow, kHigh>(of_chunk, out + i * sizeof(uint32_t));
      }
    }
  }
}

template <SplitType kType>
inline void BlockCodes(const uint8_t* block, uint8_t* codes) {
  constexpr SplitLayout kLayout = LayoutOf(kType);
  const uint8_t* from = block + kLayout.bytes - (kLayout.bits == 8 ? 32 : 16);
  if constexpr (kLayout.bits == 8) {
    for (int i = 0; i < 32; ++i) codes[i] = from[i] ^ 128;
    return;
  }
  for (int i = 0; i < 16; ++i) {
    codes[i] = from[i] & 15;
    codes[16 + i] = from[i] >> 4;
  }
  if constexpr (kLayout.bits == 5) {
    uint32_t fifth;
    std::memcpy(&fifth, from - sizeof fifth, sizeof fifth);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
  }
}

template <SplitType kType>
void Split(const uint8_t* blocks, int64_t rows, int64_t chunks, int64_t begin, int64_t end,
           uint8_t* packed, uint16_t* scale, uint16_t* offset) {
  constexpr SplitLayout kLayout = LayoutOf(kType);
  const auto codes = [=](int64_t row, int64_t chunk, uint8_t* to) {
    const int64_t at = row * chunks + chunk;
    const uint8_t* block = blocks + at * kLayout.bytes;
    std::memcpy(scale + at, block, sizeof *scale);
    if constexpr (kLayout.offset) std::memcpy(offset + at, block + 2, sizeof *offset);
    BlockCodes<kType>(block, to);
  };
  constexpr int kLow = kLayout.bits == 5 ? 4 : kLayout.bits, kHigh = kLayout.bits - kLow;
  PackBlocks<kLow, kHigh>(rows, chunks, begin, end, codes, packed);
}

// The same of words ------------------------------------------------------------------------------

// One of each of a block's outputs.
struct Eight {
  uint32_t of[kGroupsBlock];
};

// Outputs that are not there have zeros.
inline Eight WordsAt(const CodeWords& from, int64_t first, int64_t word) {
  Eight eight = {};
  const uint32_t* at = from.words + first * from.output_stride + word * from.word_stride;
  const int64_t count = from.outputs - first;
  if (from.output_stride == 1 && count >= kGroupsBlock) {
    std::memcpy(eight.of, at, sizeof eight.of);
    return eight;
  }
  for (int64_t i = 0; i < kGroupsBlock && i < count; ++i) eight.of[i] = at[i * from.output_stride];
  return eight;
}

// Codes of which `low` has the lowest bit, at `shift`, and `high`, the word behind it, what doesn't
// fit.
template <int kBits>
inline Eight CodesOf(const Eight& low, const Eight& high, int shift) {
  Eight codes;
  for (int64_t i = 0; i < kGroupsBlock; ++i) codes.of[i] = low.of[i] >> shift;
  if (shift + kBits > 32) {
    for (int64_t i = 0; i < kGroupsBlock; ++i) codes.of[i] |= high.of[i] << (32 - shift);
  }
  return codes;
}

// Bits [below, below + kBits) of the chunk's `input`-th codes put into their plane.
template <int kBits>
inline void PutInPlane(const Eight& codes, int below, int input, Eight* plane) {
  constexpr int kEach = 32 / kBits;
  const int place = input % kEach, at = place % 2 * 16 + place / 2 * kBits;
  constexpr uint32_t kField = (uint32_t{1} << kBits) - 1;
  Eight& vector = plane[input / kEach];
  for (int64_t i = 0; i < kGroupsBlock; ++i) {
    vector.of[i] |= (codes.of[i] >> below & kField) << at;
  }
}

// A chunk of a block of outputs from `first` on.
template <int kLow, int kHigh, bool kSorted>
void PackChunkOfWords(const CodeWords& from, int64_t first, int64_t chunk, uint8_t* out) {
  constexpr int kBits = kLow + kHigh;
  Eight packed[kBits] = {};
  Eight words[kBits + 1] = {};  // of the chunk, where it lies together
  for (int i = 0; !kSorted && i < kBits; ++i) words[i] = WordsAt(from, first, chunk * kBits + i);
#pragma GCC unroll 32
  for (int input = 0; input < static_cast<int>(kGroupsChunk); ++input) {
    Eight codes;
    if constexpr (kSorted) {
      const int64_t bit = from.order[chunk * kGroupsChunk + input] * kBits;
      const int shift = static_cast<int>(bit % 32);
      words[0] = WordsAt(from, first, bit / 32);
      if (shift + kBits > 32) words[1] = WordsAt(from, first, bit / 32 + 1);
      codes = CodesOf<kBits>(words[0], words[1], shift);
    } else {
      const int bit = input * kBits;
      codes = CodesOf<kBits>(words[bit / 32], words[bit / 32 + 1], bit % 32);
    }
    PutInPlane<kLow>(codes, 0, input, packed);
    if constexpr (kHigh > 0) PutInPlane<kHigh>(codes, kLow, input, packed + kLow);
  }
  std::memcpy(out, packed, sizeof packed);
}

// Where outputs lie side by side, so many blocks meet each row of words: they share its lines.
constexpr int64_t kTogether = 16;

// Calls with each block and each of its chunks, `together` blocks at a time.
template <typename Call>
inline void ForBlocksAndChunks(int64_t begin, int64_t end, int64_t chunks, int64_t together,
                               const Call& call) {
  for (; begin < end; begin += together) {
    const int64_t last = end - begin < together ? end : begin + together;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t block = begin; block < last; ++block) call(block, chunk);
    }
  }
}

template <int kLow, int kHigh, bool kSorted>
void PackBlocksOfWords(const CodeWords& from, int64_t chunks, int64_t begin, int64_t end,
                       uint8_t* packed) {
  constexpr int64_t kBytes = kGroupsChunk * (kLow + kHigh);
  const int64_t together = from.output_stride == 1 ? kTogether : 1;
  ForBlocksAndChunks(begin, end, chunks, together, [&](int64_t block, int64_t chunk) {
    PackChunkOfWords<kLow, kHigh, kSorted>(from, block * kGroupsBlock, chunk,
                                           packed + (block * chunks + chunk) * kBytes);
  });
}

}  // namespace

void PackAwq(const uint32_t* words, int64_t inputs, int64_t blocks, int64_t begin, int64_t end,
             uint8_t* packed) {
  constexpr int kBits = 4;
  constexpr int kShifts[kGroupsBlock] = {0, 16, 4, 20, 8, 24, 12, 28};  // of each output
  const int64_t chunks = inputs / kGroupsChunk;
  ForBlocksAndChunks(begin, end, chunks, kTogether, [&](int64_t block, int64_t chunk) {
    Eight made[kBits] = {};
    for (int input = 0; input < static_cast<int>(kGroupsChunk); ++input) {
      const uint32_t word = words[(chunk * kGroupsChunk + input) * blocks + block];
      Eight codes;
      for (int64_t i = 0; i < kGroupsBlock; ++i) codes.of[i] = word >> kShifts[i];
      PutInPlane<kBits>(codes, 0, input, made);
    }
    std::memcpy(packed + (block * chunks + chunk) * sizeof made, made, sizeof made);
  });
}

void PackWords(const CodeWords& from, int64_t inputs, int64_t bits, int64_t begin, int64_t end,
               uint8_t* packed) {
  const int64_t chunks = inputs / kGroupsChunk;
  WithPlanes(bits, [&](auto low, auto high) {
    if (from.order == nullptr) {
      PackBlocksOfWords<low, high, false>(from, chunks, begin, end, packed);
    } else {
      PackBlocksOfWords<low, high, true>(from, chunks, begin, end, packed);
    }
  });
}

void PackCodes(const uint8_t* codes, int64_t rows, int64_t inputs, int64_t bits, int64_t begin,
               int64_t end, uint8_t* packed) {
  const int64_t chunks = inputs / kGroupsChunk;
  const auto read = [=](int64_t row, int64_t chunk, uint8_t* to) {
    std::memcpy(to, codes + row * inputs + chunk * kGroupsChunk, kGroupsChunk);
  };
  WithPlanes(bits, [&](auto low, auto high) {
    PackBlocks<low, high>(rows, chunks, begin, end, read, packed);
  });
}

void SplitBlocks(const uint8_t* blocks, SplitType type, int64_t rows, int64_t inputs, int64_t begin,
                 int64_t end, uint8_t* packed, uint16_t* scale, uint16_t* offset) {
  const int64_t chunks = inputs / kGroupsChunk;
  const auto split = [&](auto run) {
    run(blocks, rows, chunks, begin, end, packed, scale, offset);
  };
  switch (type) {
    case SplitType::kQ40:
      return split(Split<SplitType::kQ40>);
    case SplitType::kQ41:
      return split(Split<SplitType::kQ41>);
    case SplitType::kQ50:
      return split(Split<SplitType::kQ50>);
    case SplitType::kQ51:
      return split(Split<SplitType::kQ51>);
    case SplitType::kQ80:
      return split(Split<SplitType::kQ80>);
  }
}

}  // namespace exkv

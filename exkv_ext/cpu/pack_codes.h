// Codes of weights put into the order in which linear_groups reads them: exkv/ops/weight_groups.py.
#pragma once

#include <cstdint>

#include "../params/groups_params.h"

namespace exkv {

// ggml's types whose blocks of 32 weights become groups, by ggml's own numbers.
enum class SplitType { kQ40 = 2, kQ41 = 3, kQ50 = 6, kQ51 = 7, kQ80 = 8 };

struct SplitLayout {
  int64_t bytes;  // of a block, 0 where there is no such type
  int64_t bits;
  bool offset;
};

constexpr SplitLayout LayoutOf(SplitType type) {
  switch (type) {
    case SplitType::kQ40:
      return {18, 4, false};
    case SplitType::kQ41:
      return {20, 4, true};
    case SplitType::kQ50:
      return {22, 5, false};
    case SplitType::kQ51:
      return {24, 5, true};
    case SplitType::kQ80:
      return {34, 8, false};
  }
  return {};
}

// Blocks [begin, end) of eight rows each, of codes (rows, inputs), a byte each; rows that are not
// there are zeros.
void PackCodes(const uint8_t* codes, int64_t rows, int64_t inputs, int64_t bits, int64_t begin,
               int64_t end, uint8_t* packed);

// The same of rows of ggml's blocks; their 16-bit floats go to scale and offset (rows, inputs /
// 32), of which the second may be null.
void SplitBlocks(const uint8_t* blocks, SplitType type, int64_t rows, int64_t inputs, int64_t begin,
                 int64_t end, uint8_t* packed, uint16_t* scale, uint16_t* offset);

// Blocks [begin, end) of words (inputs, blocks) that have an input's codes of eight outputs, 4 bits
// each, in AWQ's order.
void PackAwq(const uint32_t* words, int64_t inputs, int64_t blocks, int64_t begin, int64_t end,
             uint8_t* packed);

// Words in which codes lie one behind the other, from the lowest bit on: that of an output's i-th
// 32 bits is at output * output_stride + i * word_stride.
struct CodeWords {
  const uint32_t* words;
  int64_t output_stride;
  int64_t word_stride;
  int64_t outputs;
  const int64_t* order;  // input i is the order[i]-th code; or null
};

// Blocks [begin, end) of these outputs.
void PackWords(const CodeWords& from, int64_t inputs, int64_t bits, int64_t begin, int64_t end,
               uint8_t* packed);

}  // namespace exkv

// A weight matrix of small integers with a scale for each group of inputs, on any device. How it
// lies: exkv/ops/weight_groups.py.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int64_t kGroupsBlock = 8;   // outputs whose codes lie together
inline constexpr int64_t kGroupsChunk = 32;  // inputs, likewise

// What is beside a group's scale, in the order of exkv.ops.weight_groups.
enum class GroupsShift { kSymmetric, kOffset, kZero };

inline constexpr int64_t kMostSections = 6;

// Inputs of equal bits and groups, of a matrix that has several such.
struct GroupsSection {
  int64_t bits;
  int64_t group;
  int64_t inputs;

  int64_t groups() const { return (inputs + group - 1) / group; }
  int64_t block_bytes() const { return kGroupsBlock * inputs * bits / 8; }
};

struct GroupsMatrix {
  int64_t inputs;
  int64_t outputs;
  int64_t bits;
  int64_t group;   // inputs that share a scale
  int64_t groups;  // of an output
  GroupsShift beside;
  FloatType scale_type;
  const uint8_t* codes;  // (ceil(outputs / 8), inputs / 32, 32 * bits)
  const void* scale;     // (outputs, groups) of scale_type
  const void* shift;     // likewise, or uint8 (outputs, zero_bytes), or null
  const int32_t* order;  // (inputs), or null

  // Where not null, there is no scale: it is (nibble + 1)^2 * largest / 256. Of each group a word
  // of eight nibbles for each block of outputs (groups, nibble_words), and a float16 (groups).
  const uint32_t* nibbles;
  int64_t nibble_words;
  const uint16_t* largest;

  // Of a matrix in sections, whose codes follow each other in each block; then bits, group and
  // groups are of no meaning.
  int64_t section_count;
  GroupsSection sections[kMostSections];
  int64_t stride;  // bytes between blocks, of a section; 0 for those of a block

  int64_t chunks() const { return inputs / kGroupsChunk; }
  int64_t blocks() const { return (outputs + kGroupsBlock - 1) / kGroupsBlock; }
  int64_t block_bytes() const {
    if (stride > 0) return stride;
    if (section_count == 0) return kGroupsBlock * inputs * bits / 8;
    int64_t bytes = 0;
    for (int64_t i = 0; i < section_count; ++i) bytes += sections[i].block_bytes();
    return bytes;
  }
  // A section as a matrix, whose blocks lie apart. `first`: its first input.
  GroupsMatrix Section(int64_t index, int64_t* first) const {
    GroupsMatrix m = *this;
    m.stride = block_bytes();
    m.section_count = 0;
    *first = 0;
    for (int64_t i = 0; i < index; ++i) {
      const GroupsSection& before = sections[i];
      *first += before.inputs;
      m.codes += before.block_bytes();
      m.nibbles += before.groups() * nibble_words;
      m.largest += before.groups();
    }
    const GroupsSection& section = sections[index];
    m.bits = section.bits;
    m.group = section.group;
    m.groups = section.groups();
    m.inputs = section.inputs;
    return m;
  }
  int64_t zero_bytes() const { return bits <= 4 ? (groups + 1) / 2 : groups; }
};

// Calls with the bits of the lower plane and those of the upper one.
template <typename Call>
inline void WithPlanes(int64_t bits, const Call& call) {
  using std::integral_constant;
  const auto planes = [&](auto low, auto high) { call(low, high); };
  switch (bits) {
    case 8:
      return planes(integral_constant<int, 8>(), integral_constant<int, 0>());
    case 6:
      return planes(integral_constant<int, 4>(), integral_constant<int, 2>());
    case 5:
      return planes(integral_constant<int, 4>(), integral_constant<int, 1>());
    case 4:
      return planes(integral_constant<int, 4>(), integral_constant<int, 0>());
    case 3:
      return planes(integral_constant<int, 2>(), integral_constant<int, 1>());
    case 2:
      return planes(integral_constant<int, 2>(), integral_constant<int, 0>());
  }
}

}  // namespace exkv

// A weight matrix of small integers with a scale for each group of inputs, on any device. How it
// lies: exkv/ops/weight_groups.py.
#pragma once

#include <cstdint>

#include "kv_quant_params.h"

namespace exkv {

inline constexpr int64_t kGroupsBlock = 8;   // outputs whose codes lie together
inline constexpr int64_t kGroupsChunk = 32;  // inputs, likewise

// What is beside a group's scale, in the order of exkv.ops.weight_groups.
enum class GroupsShift { kSymmetric, kOffset, kZero };

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

  int64_t chunks() const { return inputs / kGroupsChunk; }
  int64_t blocks() const { return (outputs + kGroupsBlock - 1) / kGroupsBlock; }
  int64_t block_bytes() const { return kGroupsBlock * inputs * bits / 8; }
  int64_t zero_bytes() const { return bits <= 4 ? (groups + 1) / 2 : groups; }
};

}  // namespace exkv

// The two 16-bit floats as types of their own, by their bits.
#pragma once

#include <cstdint>

namespace exkv {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

}  // namespace exkv

// The points that ggml's IQ1, IQ2 and IQ3 types choose from (exkv/weights/gguf_grids.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace exkv {

// A byte for each weight of a point, the first the lowest.
struct GgufGrids {
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];  // magnitudes
  uint32_t iq3_xxs[256], iq3_s[512];
  uint64_t iq1[2048];           // 8 times the weights, signed
  uint64_t negative[256];       // bits -> 255 in the bytes of those that are set
  uint64_t negative_even[128];  // of seven bits and an eighth that makes their number even
};

extern const GgufGrids kGgufGrids;

}  // namespace exkv

// linear_groups for any processor.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_types.h"
#include "half.inc"
#include "linear_groups.h"
#include "rounded.inc"
#include "scratch.h"
#include "simd_portable.inc"

namespace exkv {
namespace {

constexpr bool kUnrolled = false;
constexpr int kRowsAtOnce = 1;

using Words = uint16_t __attribute__((vector_size(16)));
using Ints = IntVec;

struct Pair {
  int32_t even, odd;
};

inline Words LoadWords(const uint8_t* in) {
  Words words;
  std::memcpy(&words, in, sizeof words);
  return words;
}
inline Words Field(Words words, int shift, int bits) {
  return words >> static_cast<uint16_t>(shift) & static_cast<uint16_t>((1 << bits) - 1);
}
inline Words ShiftLeft(Words words, int bits) { return words << static_cast<uint16_t>(bits); }
inline Words Or(Words a, Words b) { return a | b; }
inline Pair LoadPair(const int16_t* in) { return {in[0], in[1]}; }
inline Ints Low(Words words) { return (Ints)words & 0xffff; }
inline Ints High(Words words) { return (Ints)words >> 16; }  // codes are no larger than 255
inline Ints MulAddPairs(Words words, Pair x, Ints sums) {
  return sums + Low(words) * x.even + High(words) * x.odd;
}
inline Vec ToFloat(Ints ints) { return __builtin_convertvector(ints, Vec); }

}  // namespace
}  // namespace exkv

#include "linear_groups.inc"

namespace exkv {
const GroupsKernels kGroupsPortable = {InputBytes,         Prepare, Run, Dequantize,
                                       {nullptr, nullptr}, nullptr};
}  // namespace exkv

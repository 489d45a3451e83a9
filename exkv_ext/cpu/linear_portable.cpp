// linear for any processor.
#include <cstdint>
#include <cstring>

#include "float_types.h"
#include "half.inc"
#include "isa.h"
#include "linear.h"
#include "scratch.h"

namespace exkv {
namespace {

constexpr int64_t kStep = 8;
constexpr int kRowsAtOnce = 2;
constexpr int64_t kRowsInStreams = 4;
constexpr int64_t kPart = 512;  // four lanes' sums would be long, and round more than torch's
template <typename T>
constexpr int kRowsInLine = 0;
template <typename T>
constexpr int kRowsTogether = 0;
template <typename T>
constexpr int64_t kWidenedFrom = kAllRows;

// Compilers' own vectors, as wide as every processor with any has them.
using Sums = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));

struct Pair {
  Sums first, second;
};

inline Pair Load(const float* values) {
  Pair pair;
  std::memcpy(&pair, values, sizeof pair);
  return pair;
}

// Values at even places and those at odd places: bfloat16 is the upper half of float32.
inline Pair Load(const BFloat16* values) {
  Words both;
  std::memcpy(&both, values, sizeof both);
  return {(Sums)(both << 16), (Sums)(both & 0xffff0000u)};
}

// float16 in the low half of each word. Its exponent's bias is 112 less than float32's.
inline Sums Widened(Words halves) {
  const Words magnitude = (halves & 0x7fff) << 13;
  const Words finite = (Words)((Sums)magnitude * 0x1p112f);
  const Words special = magnitude | 0x7f800000;  // infinity, NaN
  return (Sums)((halves & 0x8000) << 16 | (magnitude < (0x7c00 << 13) ? finite : special));
}

inline Pair Load(const Half* values) {
  Words both;
  std::memcpy(&both, values, sizeof both);
  return {Widened(both & 0xffff), Widened(both >> 16)};
}

inline Sums MulAdd(const Pair& a, const Pair& b, Sums sums) {
  return sums + (a.first * b.first + a.second * b.second);
}

inline void SumUp(const Sums (&sums)[kLinearBlock], float (&out)[kLinearBlock]) {
  for (int64_t n = 0; n < kLinearBlock; ++n) {
    out[n] = (sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]);
  }
}

inline void Prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace
}  // namespace exkv

#include "linear.inc"

namespace exkv {
namespace {
int64_t Widen(const LinearParams&, float*) { return 0; }

int64_t MaxRows(FloatType dtype) {
#if defined(__x86_64__)
  return dtype == FloatType::kFloat32 ? 4 : kAllRows;
#else
  (void)dtype;
  return 0;  // torch has other kernels there, and nobody has compared them yet
#endif
}
}  // namespace

const LinearKernels kLinearPortable = {Run, Widen, MaxRows};
}  // namespace exkv

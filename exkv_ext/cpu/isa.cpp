#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace exkv {
namespace {

constexpr CpuIsa kAll[] = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16};

CpuIsa BestIsa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    // Dot products of bfloat16 and of bytes, permutations of bytes and maps of their bits: Zen 4,
    // Sapphire Rapids.
    const bool dot = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                     __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
    return dot ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
  }
  // Every processor with AVX2 has F16C, which older compilers can't ask for.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kPortable;
}

CpuIsa Cap() {
  const char* text = std::getenv("EXKV_CPU_ISA");
  if (text == nullptr || *text == '\0') return CpuIsa::kAvx512Bf16;
  for (const CpuIsa isa : kAll) {
    if (std::string(text) == IsaName(isa)) return isa;
  }
  throw std::runtime_error(std::string("EXKV_CPU_ISA='") + text +
                           "' is unknown; say portable, avx2, avx512 or avx512_bf16");
}

// Of AMD's processors with AVX-512, the one that lacks what came with Zen 5.
bool FindZen4() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f") &&
         !__builtin_cpu_supports("avx512vp2intersect");
#else
  return false;
#endif
}

}  // namespace

CpuIsa ChosenIsa() {
  static const CpuIsa chosen = std::min(BestIsa(), Cap());
  return chosen;
}

const char* IsaName(CpuIsa isa) {
  constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

bool IsZen4() {
  static const bool is = FindZen4();
  return is;
}

}  // namespace exkv

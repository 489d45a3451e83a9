// Which instruction set the CPU kernels of this process use.
#pragma once

namespace exkv {

enum class CpuIsa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// The best that this processor has, capped by the environment variable EXKV_CPU_ISA (portable,
// avx2, avx512, avx512_bf16), which is read once. Throws where that names none of them.
CpuIsa ChosenIsa();

const char* IsaName(CpuIsa isa);

// Whether this is AMD's Zen 4, for which some distances of prefetching are others.
bool IsZen4();

}  // namespace exkv

// Norms, gates and rotary positions for processors with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "float_types.h"
#include "rows.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "half.inc"
#include "simd_avx2.inc"
// Written in those vectors:
#include "norm.inc"
// Written with its pieces:
#include "gate.inc"
#include "rope.inc"
// And with those of both:
#include "chunks.inc"
#include "delta.inc"
#include "ssd.inc"
#include "states.inc"
// Written with theirs:
#include "delta_chunks.inc"
#include "scan.inc"
#include "ssd_chunks.inc"
#pragma GCC pop_options

namespace exkv {
const RowKernels kRowsAvx2 = {
    Norm,
    {Gate<Silu>, Gate<GeluTanh>, Gate<Gelu>, Gate<Relu>, Gate<Relu2>, Gate<SoftPlus>},
    Clamped,
    {Activate<Silu>, Activate<GeluTanh>, Activate<Gelu>, Activate<Relu>, Activate<Relu2>,
     Activate<SoftPlus>},
    Add,
    AddTimes,
    Scale,
    Rope,
    Delta,
    Ssd,
    Scan,
    Convolve,
    GatedNorm};
}  // namespace exkv
#endif

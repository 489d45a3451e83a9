// Norms, gates and rotary positions for processors with AVX-512 F, BW, DQ and VL.
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
// GCC 12 warns about its own intrinsics' undefined vectors.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include "half.inc"
#include "simd_avx512.inc"
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
const RowKernels kRowsAvx512 = {
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

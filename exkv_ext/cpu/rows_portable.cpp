// Norms, gates and rotary positions for any processor.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "float_types.h"
#include "half.inc"
#include "rows.h"
#include "simd_portable.inc"
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

namespace exkv {
const RowKernels kRowsPortable = {
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

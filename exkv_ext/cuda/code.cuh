// Whether the current device can run this library's kernels at all.
#pragma once

#include "launch.cuh"

namespace exkv {

// False where the library holds neither code for the device nor PTX that its driver could compile.
bool HasCodeHere();

}  // namespace exkv

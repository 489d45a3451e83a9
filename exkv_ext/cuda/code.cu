#include "code.cuh"

namespace exkv {
namespace {

// Built for the same architectures as all others.
__global__ void EmptyKernel() {}

}  // namespace

bool HasCodeHere() { return IsLoadable(EmptyKernel); }

}  // namespace exkv

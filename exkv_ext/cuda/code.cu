#include "code.cuh"

namespace exkv {
namespace {

// Built for the same architectures as all others.
__global__ void EmptyKernel() {}

}  // namespace

bool HasCodeHere() { return IsLoadable(EmptyKernel); }

}  // namespace exkv

#define EXKV_TEXT(...) #__VA_ARGS__
#define EXKV_TEXT_OF(...) EXKV_TEXT(__VA_ARGS__)

// For exkv_ext.missing(): the compute capabilities that nvcc was asked for, times 100.
extern "C" __attribute__((visibility("default"))) const char* exkv_cuda_architectures() {
  return EXKV_TEXT_OF(__CUDA_ARCH_LIST__);
}

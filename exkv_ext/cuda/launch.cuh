// How a kernel is launched. A macro, so that the emulation in tests/cuda_emulation can run the very
// same launch on a CPU, where <<<>>> is no syntax.
#pragma once

#if defined(EXKV_CUDA_EMULATION)
#include "cuda_emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define EXKV_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

// The shared memory that the launch asks for, as an array of one type.
#define EXKV_DYNAMIC_SHARED(type, name)                         \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* name = reinterpret_cast<type*>(name##_bytes)

namespace exkv {

// What a launch may ask for beyond 48 KiB has to be granted first, on every device by itself. What
// goes wrong shows at the launch.
template <typename Kernel>
void AllowShared(Kernel* kernel, int bytes) {
  if (bytes <= 48 << 10) return;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Whether the current device has code of a kernel.
template <typename Kernel>
bool IsLoadable(Kernel* kernel) {
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
  cudaGetLastError();  // it is no launch's
  return found;
}

// -1 where it doesn't tell.
inline int CurrentDevice() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

// Whether the current device multiplies matrices of 16-bit floats as mma.cuh has it: from compute
// capability 8.0 on.
inline bool HasTensorCores() {
  int major = 0;
  const int device = CurrentDevice();
  if (device < 0) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 8;
}

// Blocks of a kernel that a multiprocessor of the current device has room for at once.
template <typename Kernel>
int BlocksAtOnce(Kernel* kernel, int threads, size_t shared_bytes) {
  int blocks = 0;
  const cudaError_t status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
  return status == cudaSuccess && blocks > 0 ? blocks : 1;
}

// Copies 16 bytes to shared memory without a register and without waiting; the thread that asked
// finds them there after WaitForCopies. Before compute capability 8.0, it waits.
__device__ __forceinline__ void CopyAsync(void* shared, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(from);
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void CommitCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all groups but the last so many are through.
template <int kUnderWay>
__device__ __forceinline__ void WaitForCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kUnderWay) : "memory");
#endif
}

}  // namespace exkv
#endif

namespace exkv {

// Which GPUs this is code for: those on which HasTensorCores() is true, or others. The emulation
// has both. A kernel that isn't launched on one of them is empty there: it takes no time to
// compile.
#if defined(__CUDA_ARCH__)
constexpr bool kForTensorCores = __CUDA_ARCH__ >= 800, kForOthers = !kForTensorCores;
#else
constexpr bool kForTensorCores = true, kForOthers = true;
#endif

}  // namespace exkv

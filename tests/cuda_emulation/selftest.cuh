// A kernel with the mistakes that the emulation should find: see test_emulation.py.
#pragma once

#include "../../exkv_ext/cuda/launch.cuh"

namespace exkv {

enum Mistake { kNone, kNoBarrier, kPastShared, kBarrierInBranch, kMissingLane };

// out[0] = x[n - 1] + ... + x[0], through shared memory; n threads in one block.
__global__ void SelfTestKernel(const float* x, float* out, unsigned n, int mistake) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const unsigned t = threadIdx.x;
  shared[t + (mistake == kPastShared ? 1 : 0)] = x[t];
  if (mistake != kNoBarrier && (mistake != kBarrierInBranch || t > 0)) __syncthreads();
  if (mistake == kMissingLane && t > 0) __shfl_xor_sync(0xffffffffu, t, 1);
  if (t == 0 || t == n - 1) {
    float sum = 0;
    for (unsigned i = 0; i < n; ++i) sum += shared[i];
    if (t == 0) out[0] = sum;
  }
  if (mistake == kBarrierInBranch && t == 0) __shfl_xor_sync(0xffffffffu, t, 1);
}

inline void LaunchSelfTest(const float* x, float* out, int64_t n, int64_t mistake) {
  EXKV_LAUNCH(SelfTestKernel, 1, static_cast<unsigned>(n), n * sizeof(float), nullptr, x, out,
              static_cast<unsigned>(n), static_cast<int>(mistake));
}

}  // namespace exkv

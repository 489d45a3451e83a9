// A kernel with the mistakes that the emulation should find: see test_emulation.py.
#pragma once

#include "../../exkv_ext/cuda/mma.cuh"

namespace exkv {

enum Mistake { kNone, kNoBarrier, kPastShared, kBarrierInBranch, kMissingLane, kPastMatrix };

// out[0] = x[n - 1] + ... + x[0], through shared memory; n threads in one block.
__global__ void SelfTestKernel(const float* x, float* out, unsigned n, int mistake) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const unsigned t = threadIdx.x;
  shared[t + (mistake == kPastShared ? 1 : 0)] = x[t];
  if (mistake != kNoBarrier && (mistake != kBarrierInBranch || t > 0)) __syncthreads();
  if (mistake == kPastMatrix) {
    uint32_t values[4];
    LoadMatrices(shared + t % 32 * 4, values);  // 24 rows fill the memory
  }
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

// out (16 x 16) = a b, or a b^T; all 16 x 16, row by row, of 16-bit floats. `plain`: without tensor
// cores.
template <typename T>
__global__ void MatrixKernel(const uint16_t* a, const uint16_t* b, float* out, bool transposed,
                             bool plain) {
  EXKV_DYNAMIC_SHARED(uint16_t, shared);
  const unsigned lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
  for (unsigned i = lane; i < 256; i += 32) {
    shared[i] = a[i];
    shared[256 + i] = b[i];
  }
  __syncwarp();
  uint32_t first[4], second[4];
  LoadMatrices(shared + lane % 16 * 16 + lane / 16 * 8, first);
  const uint16_t* from = shared + 256;
  if (transposed) {
    LoadMatrices(from + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8, second);
  } else {
    LoadTransposed(from + lane % 16 * 16 + lane / 16 * 8, second);
  }
  for (unsigned n = 0; n < 2; ++n) {
    float sum[4] = {};
    if (plain) {
      MultiplyByLanes<T>(sum, first, second[2 * n], second[2 * n + 1]);
    } else {
      Multiply<T>(sum, first, second[2 * n], second[2 * n + 1]);
    }
    for (unsigned i = 0; i < 4; ++i) {
      out[(row + i / 2 * 8) * 16 + n * 8 + column + i % 2] = sum[i];
    }
  }
}

inline void LaunchMatrix(const void* a, const void* b, float* out, bool half, bool transposed,
                         bool plain) {
  const auto* x = static_cast<const uint16_t*>(a);
  const auto* y = static_cast<const uint16_t*>(b);
  const auto kernel = half ? MatrixKernel<__half> : MatrixKernel<__nv_bfloat16>;
  EXKV_LAUNCH(kernel, 1, 32, 512 * sizeof(uint16_t), nullptr, x, y, out, transposed, plain);
}

}  // namespace exkv

// The selective scan, token after token (exkv/ops/selective_scan.py).
//
// Four lanes have a channel, each a quarter of its state, in registers for all tokens of a call. A
// warp's lanes of one quarter are neighbouring channels. What the next tokens bring is on its way
// while one is computed.
#include "floats.cuh"
#include "recurrent.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kParts = 4;
constexpr int kChannels = kWarp / kParts;  // of a warp
constexpr int kThreads = static_cast<int>(kScanChannels) * kParts;
constexpr int kAhead = 4;
constexpr unsigned kFullWarp = 0xffffffffu;

// Grid: blocks of kScanChannels channels of all rows. A lane has kStates numbers of a state. (The
// compiler would make room for two blocks by spilling registers.)
template <int kStates, typename T>
__global__ void __launch_bounds__(kThreads, 1) ScanKernel(ScanParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int part = lane / kChannels * kStates;  // the first of its numbers
  const auto blocks = static_cast<unsigned>(p.blocks);
  const int64_t row = blockIdx.x / blocks;
  const int64_t channel = blockIdx.x % blocks * kScanChannels + warp * kChannels + lane % kChannels;
  const bool here = channel < p.channels;
  int64_t real = p.new_lens == nullptr ? p.length : int64_t{p.new_lens[row]};
  real = max(int64_t{0}, min(real, p.length));
  const T* x = static_cast<const T*>(p.x) + row * p.length * p.channels + channel;
  const float* dt = p.dt + row * p.length * p.channels + channel;
  const T* b = static_cast<const T*>(p.b) + row * p.length * p.state_dim;
  const T* c = static_cast<const T*>(p.c) + row * p.length * p.state_dim;
  T* out = static_cast<T*>(p.out) + row * p.length * p.channels + channel;
  float* stored = p.state + row * p.state_row + channel;
  const bool writes = here && part == 0;
  if (writes) {
    for (int64_t token = real; token < p.length; ++token) {
      out[token * p.channels] = FromFloat<T>(0.0f);
    }
  }
  if (real == 0) return;
  const float d = here ? p.d[channel] : 0.0f;
  float state[kStates], a[kStates];
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    const bool has = here && part + i < p.state_dim;
    state[i] = has ? stored[(part + i) * p.channels] : 0.0f;
    a[i] = has ? p.a[(part + i) * p.channels + channel] : 0.0f;
  }
  for (int64_t first = 0; first < real; first += kAhead) {
    float inputs[kAhead], steps[kAhead];
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      const bool has = here && first + t < real;
      inputs[t] = has ? ToFloat(x[(first + t) * p.channels]) : 0.0f;
      steps[t] = has ? dt[(first + t) * p.channels] : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      if (first + t >= real) break;  // for all lanes of the block
      const int64_t at = (first + t) * p.state_dim + part;
      const float added = steps[t] * inputs[t];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        if (part + i >= p.state_dim) continue;
        state[i] = fmaf(ToFloat(b[at + i]), added, expf(steps[t] * a[i]) * state[i]);
        sum = fmaf(ToFloat(c[at + i]), state[i], sum);
      }
      for (int step = kChannels; step < kWarp; step *= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, step);
      }
      if (writes) out[(first + t) * p.channels] = FromFloat<T>(fmaf(d, inputs[t], sum));
    }
  }
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    if (here && part + i < p.state_dim) stored[(part + i) * p.channels] = state[i];
  }
}

template <int kStates, typename T>
void Scan(const ScanParams& p, cudaStream_t stream) {
  const auto kernel = ScanKernel<kStates, T>;
  EXKV_LAUNCH(kernel, static_cast<unsigned>(p.rows), kThreads, 0, stream, p);
}

template <typename T>
void ScanOf(const ScanParams& p, cudaStream_t stream) {
  if (p.state_dim <= kParts * 4) return Scan<4, T>(p, stream);  // all published ones
  return Scan<kMostScanStates / kParts, T>(p, stream);
}

}  // namespace

void LaunchScan(const ScanParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return ScanOf<float>(params, stream);
    case FloatType::kFloat16:
      return ScanOf<__half>(params, stream);
    case FloatType::kBFloat16:
      return ScanOf<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

// A mixture's linear layers for a few tokens: which expert a token passes is read on the device, so
// that the host waits for nothing and a graph may hold the launch. A warp has two outputs of one
// token's one choice. Sums are float32 and run in an order that depends on the shape alone.
#include "experts.cuh"
#include "floats.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarps = 4;    // of a block
constexpr int kOutputs = 2;  // of a warp
constexpr int kDeep = 4;     // loads of each row that are under way
constexpr int kBlocks = 3;   // of a multiprocessor, that registers must do for: 8.6 spills else
constexpr int kChoiceThreads = 128;

template <typename T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(16) Some {
  T at[kWide<T>];
};

// Grid: pairs of a row and a choice, and outputs; those that share an expert read it at the same
// time, and memory once.
template <typename T>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocks) ExpertsKernel(ExpertsParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t first = (int64_t{blockIdx.y} * kWarps + warp) * kOutputs, pair = blockIdx.x;
  const int64_t expert = p.chosen[pair];
  if (first >= p.outputs) return;
  T* out = static_cast<T*>(p.out) + pair * p.outputs + first;
  if (expert < 0 || expert >= p.experts) {  // the host doesn't look: it shows in the logits
    if (lane < kOutputs && first + lane < p.outputs) out[lane] = FromFloat<T>(NAN);
    return;
  }
  const T* weights[kOutputs];
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {  // a row that is not there repeats the last one
    const int64_t row = min(first + n, p.outputs - 1);
    weights[n] = static_cast<const T*>(p.weight[expert]) + row * p.inputs;
  }
  const T* x = static_cast<const T*>(p.x) + pair / p.taken * p.x_row + pair % p.taken * p.x_choice;
  const int inputs = static_cast<int>(p.inputs);
  constexpr int kStep = kWarp * kWide<T>;
  float sums[kOutputs] = {};
  for (int at = lane * kWide<T>; at < inputs; at += kDeep * kStep) {
    Some<T> w[kDeep][kOutputs], value[kDeep];
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      const bool there = at + i * kStep < inputs;
      const int from = there ? at + i * kStep : at;
#pragma unroll
      for (int n = 0; n < kOutputs; ++n) {
        w[i][n] = *reinterpret_cast<const Some<T>*>(weights[n] + from);
      }
      value[i] = *reinterpret_cast<const Some<T>*>(x + from);
    }
#pragma unroll
    for (int i = 0; i < kDeep; ++i) {
      if (at + i * kStep >= inputs) break;
#pragma unroll
      for (int j = 0; j < kWide<T>; ++j) {
#pragma unroll
        for (int n = 0; n < kOutputs; ++n) {
          sums[n] = fmaf(ToFloat(w[i][n].at[j]), ToFloat(value[i].at[j]), sums[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      sums[n] += __shfl_xor_sync(kFullWarp, sums[n], step);
    }
    if (lane != 0 || first + n >= p.outputs) continue;
    if (p.bias[expert] != nullptr)
      sums[n] += ToFloat(static_cast<const T*>(p.bias[expert])[first + n]);
    out[n] = FromFloat<T>(sums[n]);
  }
}

// A thread has a pair. The first of those that chose an expert, and each eighth from it on, reads
// it for itself and the seven that follow.
template <typename T>
__global__ void __launch_bounds__(kChoiceThreads) FindChosenKernel(ChoiceParams p) {
  const int64_t pair = int64_t{blockIdx.x} * kChoiceThreads + threadIdx.x;
  if (pair >= p.pairs) return;
  const int64_t expert = p.chosen[pair];
  ChosenMatrix& found = p.found[pair];
  found.count = 0;
  if (expert < 0 || expert >= p.experts) {  // the host doesn't look: it shows in the logits
    T* out = static_cast<T*>(p.out) + pair * p.outputs;
    for (int64_t i = 0; i < p.outputs; ++i) out[i] = FromFloat<T>(NAN);
    return;
  }
  int before = 0, count = 0;
  for (int64_t i = 0; i < pair; ++i) before += p.chosen[i] == expert ? 1 : 0;
  if (before % kChosenRows != 0) return;
  for (int64_t i = pair; i < p.pairs && count < kChosenRows; ++i) {
    if (p.chosen[i] == expert) found.pairs[count++] = static_cast<int>(i);
  }
#pragma unroll
  for (int i = 0; i < kMatrixParts; ++i) found.parts[i] = p.parts[expert][i];
  found.bias = p.bias[expert];
  found.count = count;
}

template <typename T>
void LaunchFind(const ChoiceParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.pairs + kChoiceThreads - 1) / kChoiceThreads));
  EXKV_LAUNCH(FindChosenKernel<T>, grid, kChoiceThreads, 0, stream, p);
}

template <typename T>
void Launch(const ExpertsParams& p, cudaStream_t stream) {
  constexpr int64_t kBlock = kWarps * kOutputs;
  const dim3 grid(static_cast<unsigned>(p.pairs),
                  static_cast<unsigned>((p.outputs + kBlock - 1) / kBlock));
  EXKV_LAUNCH(ExpertsKernel<T>, grid, kWarp * kWarps, 0, stream, p);
}

}  // namespace

void LaunchFindChosen(const ChoiceParams& params, cudaStream_t stream) {
  return params.dtype == FloatType::kFloat16 ? LaunchFind<__half>(params, stream)
                                             : LaunchFind<__nv_bfloat16>(params, stream);
}

void LaunchExpertProducts(const ExpertsParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Launch<float>(params, stream);
    case FloatType::kFloat16:
      return Launch<__half>(params, stream);
    case FloatType::kBFloat16:
      return Launch<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

// Linear layers for a few rows: the time is that of reading the weights. A warp computes two
// outputs of all rows at a time; each lane copies its 16 bytes of both rows of weights, and of x,
// to shared memory several steps ahead. Where there are too few outputs to keep all multiprocessors
// reading, the warps of a block share the inputs of an output. Sums are float32 and run in an order
// that depends on the shape and the device alone.
#include <algorithm>

#include "floats.cuh"
#include "linear.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarps = 4;    // of a block
constexpr int kOutputs = 2;  // of a warp
constexpr int kLoad = 16;    // bytes of a lane's copy
// Steps whose copies are under way: as many as leave room for several blocks.
template <int kRows>
constexpr int kStages = kRows == 1   ? 8
                        : kRows == 2 ? 6
                                     : 4;
constexpr int kMostLayers = 4;  // of a launch: queries, keys and values, and one to spare
// So many warps of a multiprocessor keep its share of memory busy.
constexpr int64_t kWarpsWanted = 16;

// What a thread holds of a row at a time.
template <typename T>
constexpr int kWide = kLoad / sizeof(T);

template <typename T>
struct alignas(kLoad) Some {
  T at[kWide<T>];
};

struct Layer {
  const void* weight;  // (outputs, inputs)
  const void* bias;    // or null
  void* out;           // (rows, outputs)
  int outputs;
  int first_block;
};

struct Layers {
  const void* x;  // (rows, inputs)
  int inputs;
  int sharing;  // warps that share an output: 1, 2 or 4
  int count;
  Layer each[kMostLayers];
};

// The layer that a block works on.
__device__ __forceinline__ const Layer& LayerOf(const Layers& p, int block) {
  int found = 0;
  for (int i = 1; i < p.count; ++i) {
    if (block >= p.each[i].first_block) found = i;
  }
  return p.each[found];
}

template <typename T, int kRows>
__device__ __forceinline__ void AddProducts(const Some<T> (&w)[kOutputs], const Some<T> (&x)[kRows],
                                            float (&sums)[kOutputs][kRows]) {
#pragma unroll
  for (int j = 0; j < kWide<T>; ++j) {
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
      const float weight = ToFloat(w[n].at[j]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[n][r] = fmaf(weight, ToFloat(x[r].at[j]), sums[n][r]);
    }
  }
}

__device__ __forceinline__ float WarpSum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// What a warp multiplies: outputs first to first + kOutputs - 1 of its layer.
template <typename T>
struct Work {
  const T* weights[kOutputs];
  const T* x;
  int inputs;
  int step;  // from a lane's values to its next
  int at;    // a lane's first
};

// Rows whose values lie anywhere, one by one.
template <typename T, int kRows>
__device__ void SumPieces(const Work<T>& work, float (&sums)[kOutputs][kRows]) {
  for (int at = work.at; at < work.inputs; at += work.step) {
    Some<T> w[kOutputs], x[kRows];
#pragma unroll
    for (int j = 0; j < kWide<T>; ++j) {
      const bool there = at + j < work.inputs;
#pragma unroll
      for (int n = 0; n < kOutputs; ++n) {
        w[n].at[j] = there ? work.weights[n][at + j] : FromFloat<T>(0);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r].at[j] = there ? work.x[int64_t{r} * work.inputs + at + j] : FromFloat<T>(0);
      }
    }
    AddProducts<T, kRows>(w, x, sums);
  }
}

// Rows that are whole numbers of loads, by way of shared memory; `own` is the lane's place in it.
// No lane reads what another has copied.
template <typename T, int kRows>
__device__ void SumLoads(const Work<T>& work, unsigned char* own, float (&sums)[kOutputs][kRows]) {
  constexpr int kSlot = kWarp * kLoad, kStage = (kOutputs + kRows) * kSlot;
  const auto copy = [&](int at, unsigned char* to) {
    if (at < work.inputs) {
#pragma unroll
      for (int n = 0; n < kOutputs; ++n) CopyAsync(to + n * kSlot, work.weights[n] + at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        CopyAsync(to + (kOutputs + r) * kSlot, work.x + int64_t{r} * work.inputs + at);
      }
    }
    CommitCopies();
  };
  for (int i = 0; i < kStages<kRows>; ++i) copy(work.at + i * work.step, own + i * kStage);
  int stage = 0;
  for (int at = work.at; at < work.inputs; at += work.step) {
    WaitForCopies<kStages<kRows> - 1>();
    unsigned char* here = own + stage * kStage;
    Some<T> w[kOutputs], x[kRows];
#pragma unroll
    for (int n = 0; n < kOutputs; ++n) w[n] = *reinterpret_cast<const Some<T>*>(here + n * kSlot);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = *reinterpret_cast<const Some<T>*>(here + (kOutputs + r) * kSlot);
    }
    AddProducts<T, kRows>(w, x, sums);
    copy(at + kStages<kRows> * work.step, here);
    stage = stage + 1 < kStages<kRows> ? stage + 1 : 0;
  }
  WaitForCopies<0>();
}

template <int kRows>
constexpr int kStagedBytes = kStages<kRows> * kWarps * (kOutputs + kRows) * kWarp * kLoad;

// Block: kWarps warps, of which `sharing` neighbours compute the same outputs.
template <typename T, int kRows, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarps) LinearKernel(Layers p) {
  EXKV_DYNAMIC_SHARED(unsigned char, shared);
  const Layer& layer = LayerOf(p, static_cast<int>(blockIdx.x));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int teams = kWarps / p.sharing, member = warp % p.sharing;
  const int block = static_cast<int>(blockIdx.x) - layer.first_block;
  const int first = (block * teams + warp / p.sharing) * kOutputs;
  Work<T> work;
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {  // a row that is not there repeats the last one
    const int64_t row = min(first + n, layer.outputs - 1);
    work.weights[n] = static_cast<const T*>(layer.weight) + row * p.inputs;
  }
  work.x = static_cast<const T*>(p.x);
  work.inputs = p.inputs;
  work.step = kWarp * p.sharing * kWide<T>;
  work.at = (member * kWarp + lane) * kWide<T>;
  float sums[kOutputs][kRows] = {};
  if constexpr (kAligned) {
    unsigned char* own = shared + warp * (kStagedBytes<kRows> / kWarps) + lane * kLoad;
    SumLoads<T, kRows>(work, own, sums);
    __syncthreads();  // the sums take the place of the copies
  } else {
    SumPieces<T, kRows>(work, sums);
  }
  float* partial = reinterpret_cast<float*>(shared);  // (warps, outputs of a warp, rows)
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = WarpSum(sums[n][r]);
      if (lane == 0) partial[(warp * kOutputs + n) * kRows + r] = sum;
    }
  }
  __syncthreads();
  if (member > 0 || lane >= kOutputs * kRows) return;
  const int n = lane / kRows, r = lane % kRows;
  if (first + n >= layer.outputs) return;
  float sum = 0;
  for (int i = 0; i < p.sharing; ++i) sum += partial[((warp + i) * kOutputs + n) * kRows + r];
  if (layer.bias != nullptr) sum += ToFloat(static_cast<const T*>(layer.bias)[first + n]);
  static_cast<T*>(layer.out)[int64_t{r} * layer.outputs + first + n] = FromFloat<T>(sum);
}

// The host's side ------------------------------------------------------------------------------

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool Aligned(const void* data, int64_t row_bytes) {
  return (static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) | row_bytes) % 16 == 0;
}

// Warps that share an output: as many as it takes to fill the device.
int Sharing(int64_t outputs, int64_t processors) {
  int sharing = 1;
  while (sharing < kWarps && CeilDiv(outputs, kOutputs) * sharing < processors * kWarpsWanted) {
    sharing *= 2;
  }
  return sharing;
}

template <typename T, int kRows>
void Launch(const Layers& p, bool aligned, unsigned blocks, cudaStream_t stream) {
  constexpr size_t kSums = sizeof(float) * kWarps * kOutputs * kRows;
  static_assert(kStagedBytes<kRows> >= kSums && kStagedBytes<kRows> <= 48 << 10);
  const size_t bytes = aligned ? kStagedBytes<kRows> : kSums;
  const auto kernel = aligned ? LinearKernel<T, kRows, true> : LinearKernel<T, kRows, false>;
  EXKV_LAUNCH(kernel, blocks, kWarp * kWarps, bytes, stream, p);
}

template <typename T>
void LaunchRows(const Layers& p, bool aligned, int64_t rows, unsigned blocks, cudaStream_t stream) {
  static_assert(kMostLinearRows == 4, "a kernel for each number of rows");
  switch (rows) {
    case 1:
      return Launch<T, 1>(p, aligned, blocks, stream);
    case 2:
      return Launch<T, 2>(p, aligned, blocks, stream);
    case 3:
      return Launch<T, 3>(p, aligned, blocks, stream);
    default:
      return Launch<T, 4>(p, aligned, blocks, stream);
  }
}

void LaunchSome(const LinearParams* layers, size_t count, int64_t processors, cudaStream_t stream) {
  const LinearParams& first = layers[0];
  const int64_t item = first.dtype == FloatType::kFloat32 ? 4 : 2, row_bytes = first.inputs * item;
  Layers p{};
  p.x = first.x;
  p.inputs = static_cast<int>(first.inputs);
  bool aligned = Aligned(p.x, row_bytes);
  p.count = static_cast<int>(count);
  int64_t outputs = 0, blocks = 0;
  for (size_t i = 0; i < count; ++i) outputs += layers[i].outputs;
  p.sharing = Sharing(outputs, processors);
  for (size_t i = 0; i < count; ++i) {
    const LinearParams& layer = layers[i];
    p.each[i] = {layer.weight, layer.bias, layer.out, static_cast<int>(layer.outputs),
                 static_cast<int>(blocks)};
    aligned = aligned && Aligned(layer.weight, row_bytes);
    blocks += CeilDiv(layer.outputs, kWarps / p.sharing * kOutputs);
  }
  const auto grid = static_cast<unsigned>(blocks);
  switch (first.dtype) {
    case FloatType::kFloat32:
      return LaunchRows<float>(p, aligned, first.rows, grid, stream);
    case FloatType::kFloat16:
      return LaunchRows<__half>(p, aligned, first.rows, grid, stream);
    case FloatType::kBFloat16:
      return LaunchRows<__nv_bfloat16>(p, aligned, first.rows, grid, stream);
  }
}

}  // namespace

void LaunchLinear(const std::vector<LinearParams>& layers, int64_t processors,
                  cudaStream_t stream) {
  for (size_t i = 0; i < layers.size(); i += kMostLayers) {
    LaunchSome(&layers[i], std::min<size_t>(kMostLayers, layers.size() - i), processors, stream);
  }
}

}  // namespace exkv

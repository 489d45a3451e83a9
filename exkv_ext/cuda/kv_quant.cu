// kv_quant on CUDA: eight lanes hold a group of 32, four neighbouring values each, so that a warp
// reads and writes four groups in whole lines. Bit-identical to the reference on the CPU; that is
// why divisions are IEEE ones and NaN is looked after.
#include "floats.cuh"
#include "kv_quant.cuh"

namespace exkv {
namespace {

constexpr int kLanes = 8;
constexpr int kPerLane = 4;
constexpr int kThreads = 256;
constexpr unsigned kFullWarp = 0xffffffffu;
static_assert(kLanes * kPerLane == kGroup, "a group is what its lanes hold");

// Four values that are moved at once.
template <typename T>
struct alignas(kPerLane * sizeof(T)) Four {
  T at[kPerLane];
};

// Where a lane works: its group, and its first value.
struct Place {
  int64_t group;  // counted over all rows
  int64_t first;  // offset of the lane's first value in the whole tensor
  int count;      // values of the lane inside the row: kPerLane but at a short last group's end
};

__device__ Place FindPlace(int64_t rows, int64_t dim, int64_t groups) {
  const int64_t lane = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  Place place;
  place.group = lane / kLanes;
  const int64_t row = place.group / groups;
  const int64_t column = (place.group % groups) * kGroup + (lane % kLanes) * kPerLane;
  const int64_t left = row < rows ? dim - column : 0;
  place.first = row * dim + column;
  place.count = left < 0 ? 0 : left < kPerLane ? static_cast<int>(left) : kPerLane;
  return place;
}

// Rows whose length is a multiple of four start where a Four may stand (torch's own allocations
// do); the flag says that all do.
template <typename T>
__device__ Four<T> Load(const T* from, const Place& place, bool aligned) {
  if (aligned && place.count == kPerLane) {
    return *reinterpret_cast<const Four<T>*>(from + place.first);
  }
  Four<T> four = {};
  for (int i = 0; i < place.count; ++i) four.at[i] = from[place.first + i];
  return four;
}

template <typename T>
__device__ void Store(T* to, const Place& place, bool aligned, const Four<T>& four) {
  if (aligned && place.count == kPerLane) {
    *reinterpret_cast<Four<T>*>(to + place.first) = four;
    return;
  }
  for (int i = 0; i < place.count; ++i) to[place.first + i] = four.at[i];
}

// The largest magnitude of the group, compared by its bits: NaN stands above infinity and wins.
__device__ float GroupPeak(const float (&values)[kPerLane]) {
  unsigned peak = 0;
  for (int i = 0; i < kPerLane; ++i) {
    peak = max(peak, __float_as_uint(values[i]) & 0x7fffffffu);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    peak = max(peak, __shfl_xor_sync(kFullWarp, peak, step));
  }
  return __uint_as_float(peak);
}

__device__ int8_t Level(float value, float step) {
  const float level = __fdiv_rn(value, step);
  return static_cast<int8_t>(rintf(fminf(fmaxf(level, -kLevels), kLevels)));
}

template <typename T>
__global__ void QuantizeKernel(QuantizeParams p, bool aligned) {
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  const Four<T> x = Load(static_cast<const T*>(p.x), place, aligned);
  float wide[kPerLane];
  for (int i = 0; i < kPerLane; ++i) wide[i] = ToFloat(x.at[i]);

  const float exact = __fdiv_rn(GroupPeak(wide), kLevels);
  const __half scale = __float2half_rn(exact > kMaxScale ? kMaxScale : exact);
  const float step = __half2float(scale);
  Four<int8_t> levels;
  for (int i = 0; i < kPerLane; ++i) levels.at[i] = step > 0 ? Level(wide[i], step) : 0;

  Store(p.values, place, aligned, levels);
  if (threadIdx.x % kLanes == 0 && place.group < p.rows * p.groups) {
    p.scales[place.group] = __half_as_ushort(scale);
  }
}

template <typename T>
__global__ void DequantizeKernel(DequantizeParams p, bool aligned) {
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  if (place.count == 0) return;
  const Four<int8_t> levels = Load(p.values, place, aligned);
  const float scale = __half2float(__ushort_as_half(p.scales[place.group]));
  Four<T> x;
  for (int i = 0; i < kPerLane; ++i) {
    x.at[i] = FromFloat<T>(static_cast<float>(levels.at[i]) * scale);
  }
  Store(static_cast<T*>(p.x), place, aligned, x);
}

bool Aligned(const void* floats, const int8_t* values, int64_t dim, size_t element_size) {
  return dim % kPerLane == 0 &&
         reinterpret_cast<uintptr_t>(floats) % (kPerLane * element_size) == 0 &&
         reinterpret_cast<uintptr_t>(values) % kPerLane == 0;
}

unsigned Blocks(int64_t rows, int64_t groups) {
  return static_cast<unsigned>((rows * groups * kLanes + kThreads - 1) / kThreads);
}

template <typename T>
void Quantize(const QuantizeParams& p, cudaStream_t stream) {
  const bool aligned = Aligned(p.x, p.values, p.dim, sizeof(T));
  EXKV_LAUNCH(QuantizeKernel<T>, Blocks(p.rows, p.groups), kThreads, 0, stream, p, aligned);
}

template <typename T>
void Dequantize(const DequantizeParams& p, cudaStream_t stream) {
  const bool aligned = Aligned(p.x, p.values, p.dim, sizeof(T));
  EXKV_LAUNCH(DequantizeKernel<T>, Blocks(p.rows, p.groups), kThreads, 0, stream, p, aligned);
}

}  // namespace

void LaunchQuantize(const QuantizeParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Quantize<float>(params, stream);
    case FloatType::kFloat16:
      return Quantize<__half>(params, stream);
    case FloatType::kBFloat16:
      return Quantize<__nv_bfloat16>(params, stream);
  }
}

void LaunchDequantize(const DequantizeParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Dequantize<float>(params, stream);
    case FloatType::kFloat16:
      return Dequantize<__half>(params, stream);
    case FloatType::kBFloat16:
      return Dequantize<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

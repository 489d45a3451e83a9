// kv_quant on CUDA, in lanes as kv_lanes.cuh has them. Bit-identical to the reference on the CPU.
#include "floats.cuh"
#include "kv_lanes.cuh"
#include "kv_levels.cuh"
#include "kv_quant.cuh"

namespace exkv {
namespace {

// The largest magnitude of the group.
__device__ unsigned GroupPeak(const float (&values)[kPerLane]) {
  unsigned peak = 0;
  for (int i = 0; i < kPerLane; ++i) {
    peak = max(peak, MagnitudeOf(values[i]));
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    peak = max(peak, __shfl_xor_sync(kFullWarp, peak, step));
  }
  return peak;
}

template <typename T>
__global__ void QuantizeKernel(QuantizeParams p, bool aligned) {
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  const Four<T> x = LoadFour(static_cast<const T*>(p.x), place, aligned);
  float wide[kPerLane];
  for (int i = 0; i < kPerLane; ++i) wide[i] = ToFloat(x.at[i]);

  const __half scale = ScaleOf(GroupPeak(wide));
  const float step = __half2float(scale);
  Four<int8_t> levels;
  for (int i = 0; i < kPerLane; ++i) levels.at[i] = LevelOf(wide[i], step);

  StoreFour(p.values, place, aligned, levels);
  if (threadIdx.x % kLanes == 0 && place.group < p.rows * p.groups) {
    p.scales[place.group] = __half_as_ushort(scale);
  }
}

template <typename T>
__global__ void DequantizeKernel(DequantizeParams p, bool aligned) {
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  if (place.count == 0) return;
  const Four<int8_t> levels = LoadFour(p.values, place, aligned);
  const float scale = __half2float(__ushort_as_half(p.scales[place.group]));
  Four<T> x;
  for (int i = 0; i < kPerLane; ++i) {
    x.at[i] = FromFloat<T>(static_cast<float>(levels.at[i]) * scale);
  }
  StoreFour(static_cast<T*>(p.x), place, aligned, x);
}

bool Aligned(const void* floats, const int8_t* values, int64_t dim, size_t element_size) {
  return dim % kPerLane == 0 &&
         reinterpret_cast<uintptr_t>(floats) % (kPerLane * element_size) == 0 &&
         reinterpret_cast<uintptr_t>(values) % kPerLane == 0;
}

template <typename T>
void Quantize(const QuantizeParams& p, cudaStream_t stream) {
  const bool aligned = Aligned(p.x, p.values, p.dim, sizeof(T));
  EXKV_LAUNCH(QuantizeKernel<T>, LaneBlocks(p.rows, p.groups), kLaneThreads, 0, stream, p, aligned);
}

template <typename T>
void Dequantize(const DequantizeParams& p, cudaStream_t stream) {
  const bool aligned = Aligned(p.x, p.values, p.dim, sizeof(T));
  EXKV_LAUNCH(DequantizeKernel<T>, LaneBlocks(p.rows, p.groups), kLaneThreads, 0, stream, p,
              aligned);
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

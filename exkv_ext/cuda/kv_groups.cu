// Values of 4 and 2 bits in groups with a scale and an offset, in lanes as kv_lanes.cuh has them,
// and the Walsh-Hadamard transform. Bit-identical to the references in exkv/ops/kv_formats.py on
// the CPU.
#include "floats.cuh"
#include "kv_groups.cuh"
#include "kv_lanes.cuh"
#include "kv_levels.cuh"

namespace exkv {
namespace {

// Of the group whose values these are some of; the first `count` of them count.
__device__ ScaleAndOffset GroupRange(const float (&x)[kPerLane], int count, float top) {
  int least = 0x7fffffff, most = -0x7fffffff - 1;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int order = OrderOf(x[i]);
    least = min(least, i < count ? order : least);
    most = max(most, i < count ? order : most);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(kFullWarp, least, step));
    most = max(most, __shfl_xor_sync(kFullWarp, most, step));
  }
  return RangeOf(least, most, top);
}

// A lane's packed bytes: two of 4 bits, one of 2. A head's end may leave the last one part empty.
template <int kBits>
constexpr int kLaneBytes = kPerLane * kBits / 8;

template <int kBits>
struct alignas(kLaneBytes<kBits>) Packed {
  uint8_t bytes[kLaneBytes<kBits>];
};

template <int kBits>
__device__ int64_t PackedAt(const Place& place, int64_t bytes) {
  return place.row * bytes + place.column * kBits / 8;
}

template <int kBits, typename T>
__global__ void PackKernel(PackParams p, bool aligned) {
  constexpr float kTop = (1 << kBits) - 1;
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  const Four<T> x = LoadFour(static_cast<const T*>(p.x), place, aligned);
  float wide[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) wide[i] = ToFloat(x.at[i]);

  const ScaleAndOffset range = GroupRange(wide, place.count, kTop);
  unsigned levels = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < place.count) levels |= LevelOf(wide[i], range, kTop) << (i * kBits);
  }
  uint8_t* packed = p.packed + PackedAt<kBits>(place, p.bytes);
  if (aligned && place.count == kPerLane) {
    Packed<kBits> all;
    for (int i = 0; i < kLaneBytes<kBits>; ++i)
      all.bytes[i] = static_cast<uint8_t>(levels >> 8 * i);
    *reinterpret_cast<Packed<kBits>*>(packed) = all;
  } else {
    for (int i = 0; i * 8 < place.count * kBits; ++i) {
      packed[i] = static_cast<uint8_t>(levels >> 8 * i);
    }
  }
  if (threadIdx.x % kLanes == 0 && place.group < p.rows * p.groups) {
    p.scales[place.group] = __half_as_ushort(range.scale);
    p.offsets[place.group] = __half_as_ushort(range.offset);
  }
}

template <int kBits, typename T>
__global__ void UnpackKernel(UnpackParams p, bool aligned) {
  const Place place = FindPlace(p.rows, p.dim, p.groups);
  if (place.count == 0) return;
  const uint8_t* packed = p.packed + PackedAt<kBits>(place, p.bytes);
  unsigned levels = 0;
  if (aligned && place.count == kPerLane) {
    const auto all = *reinterpret_cast<const Packed<kBits>*>(packed);
    for (int i = 0; i < kLaneBytes<kBits>; ++i) levels |= unsigned{all.bytes[i]} << 8 * i;
  } else {
    for (int i = 0; i * 8 < place.count * kBits; ++i) levels |= unsigned{packed[i]} << 8 * i;
  }
  const float scale = __half2float(__ushort_as_half(p.scales[place.group]));
  const float offset = __half2float(__ushort_as_half(p.offsets[place.group]));
  Four<T> x;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const unsigned level = levels >> (i * kBits) & ((1u << kBits) - 1);
    x.at[i] = FromFloat<T>(static_cast<float>(level) * scale + offset);
  }
  StoreFour(static_cast<T*>(p.x), place, aligned, x);
}

// The transform -----------------------------------------------------------------------------------

constexpr int kPerThread = 8;
constexpr int kWarp = 32;
constexpr int kThreads = static_cast<int>(kMostHadamard) / kPerThread;

// Sums and differences of values that are `half` apart in different threads of a warp.
__device__ void AddInWarp(float (&x)[kPerThread], int half) {
  const int lanes = half / kPerThread;
  const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    x[i] = __shfl_xor_sync(kFullWarp, x[i], lanes) + sign * x[i];
  }
}

// The same in different warps.
__device__ void AddInBlock(float (&x)[kPerThread], int half, float* shared) {
  const unsigned other = threadIdx.x ^ (half / kPerThread);
  const float sign = threadIdx.x > other ? -1.0f : 1.0f;
  __syncthreads();  // what was there is read
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) shared[i * kThreads + threadIdx.x] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = shared[i * kThreads + other] + sign * x[i];
}

// A thread holds eight neighbours of all the tensor's values, which are blocks one after the other.
template <typename T>
__global__ void __launch_bounds__(kThreads) HadamardKernel(HadamardParams p) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
  const int64_t left = p.rows * p.dim - first;
  const T* from = static_cast<const T*>(p.x) + first;
  float x[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = i < left ? ToFloat(from[i]) : 0;

  const int block = static_cast<int>(p.block);
#pragma unroll
  for (int half = 1; half < kPerThread; half *= 2) {
    if (half >= block) break;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i & half) continue;
      const float sum = x[i] + x[i + half];
      x[i + half] = x[i] - x[i + half];
      x[i] = sum;
    }
  }
  for (int half = kPerThread; half < block; half *= 2) {
    if (half < kPerThread * kWarp) {
      AddInWarp(x, half);
    } else {
      AddInBlock(x, half, shared);
    }
  }
  T* to = static_cast<T*>(p.out) + first;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (i < left) to[i] = FromFloat<T>(x[i] * p.factor);
  }
}

// The host's side ---------------------------------------------------------------------------------

template <int kBits>
bool Aligned(const void* floats, const uint8_t* packed, int64_t dim, size_t element_size) {
  return dim % kPerLane == 0 &&
         reinterpret_cast<uintptr_t>(floats) % (kPerLane * element_size) == 0 &&
         reinterpret_cast<uintptr_t>(packed) % sizeof(Packed<kBits>) == 0;
}

template <int kBits, typename T>
void Pack(const PackParams& p, cudaStream_t stream) {
  const bool aligned = Aligned<kBits>(p.x, p.packed, p.dim, sizeof(T));
  const auto kernel = PackKernel<kBits, T>;  // a macro's argument has no comma
  EXKV_LAUNCH(kernel, LaneBlocks(p.rows, p.groups), kLaneThreads, 0, stream, p, aligned);
}

template <int kBits, typename T>
void Unpack(const UnpackParams& p, cudaStream_t stream) {
  const bool aligned = Aligned<kBits>(p.x, p.packed, p.dim, sizeof(T));
  const auto kernel = UnpackKernel<kBits, T>;
  EXKV_LAUNCH(kernel, LaneBlocks(p.rows, p.groups), kLaneThreads, 0, stream, p, aligned);
}

template <typename T>
void PackAs(const PackParams& p, cudaStream_t stream) {
  return p.bits == 4 ? Pack<4, T>(p, stream) : Pack<2, T>(p, stream);
}

template <typename T>
void UnpackAs(const UnpackParams& p, cudaStream_t stream) {
  return p.bits == 4 ? Unpack<4, T>(p, stream) : Unpack<2, T>(p, stream);
}

template <typename T>
void Hadamard(const HadamardParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.rows * p.dim + kMostHadamard - 1) / kMostHadamard);
  const size_t shared = p.block > kPerThread * kWarp ? kMostHadamard * sizeof(float) : 0;
  EXKV_LAUNCH(HadamardKernel<T>, blocks, kThreads, shared, stream, p);
}

}  // namespace

void LaunchPack(const PackParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return PackAs<float>(params, stream);
    case FloatType::kFloat16:
      return PackAs<__half>(params, stream);
    case FloatType::kBFloat16:
      return PackAs<__nv_bfloat16>(params, stream);
  }
}

void LaunchUnpack(const UnpackParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return UnpackAs<float>(params, stream);
    case FloatType::kFloat16:
      return UnpackAs<__half>(params, stream);
    case FloatType::kBFloat16:
      return UnpackAs<__nv_bfloat16>(params, stream);
  }
}

void LaunchHadamard(const HadamardParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Hadamard<float>(params, stream);
    case FloatType::kFloat16:
      return Hadamard<__half>(params, stream);
    case FloatType::kBFloat16:
      return Hadamard<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

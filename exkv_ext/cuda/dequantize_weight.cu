// Rows of a weight matrix in groups as floats: a warp takes a chunk of 32 inputs of eight outputs.
#include "groups_codes.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kDeep = 4;  // chunks that a warp has under way

struct Call : GroupsCall {
  int64_t begin;
  int64_t end;
  void* out;
};

template <typename T>
struct alignas(16) Piece {
  T at[16 / sizeof(T)];
};

template <typename T>
__device__ __forceinline__ void Put(const float (&values)[kOctet], T* to) {
  constexpr int kOnce = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int first = 0; first < kOctet; first += kOnce) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) piece.at[i] = FromFloat<T>(values[first + i]);
    *reinterpret_cast<Piece<T>*>(to + first) = piece;
  }
}

// Grid: chunks, a few for each warp, and blocks of eight outputs.
template <typename T, int kBits>
__global__ void __launch_bounds__(kThreads) DequantizeWeightKernel(Call p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t block = p.begin / kGroupsBlock + blockIdx.y;
  const int64_t output = block * kGroupsBlock + lane / 4;
  const int warp = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / kWarp);
  const Output found = FindOutput<kBits>(p, block, lane);
  Octet<kBits> octets[kDeep];
#pragma unroll
  for (int i = 0; i < kDeep; ++i) {
    const int chunk = min(warp * kDeep + i, p.chunks - 1);
    octets[i] = LoadOctet<kBits>(p, found, chunk);
  }
  if (output >= p.end) return;
#pragma unroll
  for (int i = 0; i < kDeep; ++i) {
    const int chunk = warp * kDeep + i;
    if (chunk >= p.chunks) return;
    const ScaleAndOffset factors = ScaleOf(p.m, octets[i]);
    const float middle = static_cast<float>(1 << (p.m.bits - 1));
    float values[kOctet];
#pragma unroll
    for (int j = 0; j < kOctet / 2; ++j) {
      const uint32_t pair = CodePair(octets[i], p.m.bits, lane % 4, j);
      values[2 * j] =
          fmaf(static_cast<float>(pair & 0xffffu) - middle, factors.scale, factors.offset);
      values[2 * j + 1] =
          fmaf(static_cast<float>(pair >> 16) - middle, factors.scale, factors.offset);
    }
    const int64_t at = int64_t{chunk} * kGroupsChunk + lane % 4 * kOctet;
    Put(values, static_cast<T*>(p.out) + (output - p.begin) * p.m.inputs + at);
  }
}

template <typename T, int kBits>
void Launch(const Call& p, cudaStream_t stream) {
  constexpr int kChunks = kThreads / kWarp * kDeep;
  const dim3 grid(static_cast<unsigned>((p.chunks + kChunks - 1) / kChunks),
                  static_cast<unsigned>((p.end - p.begin + kGroupsBlock - 1) / kGroupsBlock));
  const auto kernel = DequantizeWeightKernel<T, kBits>;
  EXKV_LAUNCH(kernel, grid, kThreads, 0, stream, p);
}

template <typename T>
void LaunchBits(const Call& p, cudaStream_t stream) {
  switch (p.m.bits) {
    case 8:
      return Launch<T, 8>(p, stream);
    case 4:
      return Launch<T, 4>(p, stream);
    default:
      return Launch<T, 0>(p, stream);
  }
}

}  // namespace

void LaunchDequantizeWeight(const GroupsMatrix& matrix, FloatType dtype, int64_t begin, int64_t end,
                            void* out, cudaStream_t stream) {
  // What a grid may have in its second dimension.
  constexpr int64_t kMost = 65535 * kGroupsBlock;
  const int64_t item = dtype == FloatType::kFloat32 ? 4 : 2;
  for (int64_t first = begin; first < end; first += kMost) {
    Call p{};
    static_cast<GroupsCall&>(p) = CallOf(matrix);
    p.begin = first;
    p.end = end < first + kMost ? end : first + kMost;
    p.out = static_cast<char*>(out) + (first - begin) * matrix.inputs * item;
    switch (dtype) {
      case FloatType::kFloat32:
        LaunchBits<float>(p, stream);
        break;
      case FloatType::kFloat16:
        LaunchBits<__half>(p, stream);
        break;
      case FloatType::kBFloat16:
        LaunchBits<__nv_bfloat16>(p, stream);
        break;
    }
  }
}

}  // namespace exkv

// Root-mean-square norms, with or without a residual added first, gated products, and rotary
// positions. Roundings are those of exkv/ops/norm.py, exkv/ops/activations.py and exkv/ops/rope.py;
// only a norm's sum of squares runs in an order of its own. Rows that allow it are read and written
// 16 bytes at a time.
#include "floats.cuh"
#include "rows.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr unsigned kFullWarp = 0xffffffffu;

// What a thread holds at a time.
template <typename T>
constexpr int kWide = 16 / sizeof(T);

template <typename T>
struct alignas(16) Some {
  T at[kWide<T>];
};

// Up to a row's end, `left` values away; zeros follow. A thread gets the same values whether or not
// they can be moved at once, so that a sum's order depends on nothing but the row's length.
template <typename T>
__device__ __forceinline__ Some<T> Take(const T* from, int64_t left, bool aligned) {
  if (aligned) return *reinterpret_cast<const Some<T>*>(from);
  Some<T> some;
#pragma unroll
  for (int j = 0; j < kWide<T>; ++j) some.at[j] = j < left ? from[j] : FromFloat<T>(0);
  return some;
}

template <typename T>
__device__ __forceinline__ void Put(T* to, int64_t left, bool aligned, const Some<T>& some) {
  if (aligned) {
    *reinterpret_cast<Some<T>*>(to) = some;
    return;
  }
#pragma unroll
  for (int j = 0; j < kWide<T>; ++j) {
    if (j < left) to[j] = some.at[j];
  }
}

// The block's sum, in every thread.
__device__ float BlockSum(float x, float* shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) sum += shared[i];
  return sum;
}

// Writes x + residual, where there is one; the sum of what the thread's values square to.
template <typename T>
__device__ float SquareSum(const NormParams& p, bool aligned, const T* x, int64_t row) {
  const T* residual = static_cast<const T*>(p.residual);
  if (residual != nullptr) residual += row * p.residual_step;
  T* sum = static_cast<T*>(p.sum) + row * p.dim;
  float squares = 0;
  for (int64_t i = int64_t{threadIdx.x} * kWide<T>; i < p.dim; i += kThreads * kWide<T>) {
    Some<T> values = Take<T>(x + i, p.dim - i, aligned);
    if (residual != nullptr) {
      const Some<T> added = Take<T>(residual + i, p.dim - i, aligned);
#pragma unroll
      for (int j = 0; j < kWide<T>; ++j) {
        values.at[j] = FromFloat<T>(ToFloat(values.at[j]) + ToFloat(added.at[j]));
      }
      Put<T>(sum + i, p.dim - i, aligned, values);
    }
#pragma unroll
    for (int j = 0; j < kWide<T>; ++j) {
      const float value = ToFloat(values.at[j]);
      squares = fmaf(value, value, squares);
    }
  }
  return squares;
}

// One block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) NormKernel(NormParams p, bool aligned) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_step;
  const float total = BlockSum(SquareSum<T>(p, aligned, x, row), shared);
  const float mean = __fdiv_rn(total, static_cast<float>(p.dim));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(mean + p.eps));
  // What this thread itself has written.
  if (p.residual != nullptr) x = static_cast<const T*>(p.sum) + row * p.dim;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + row * p.dim;
  for (int64_t i = int64_t{threadIdx.x} * kWide<T>; i < p.dim; i += kThreads * kWide<T>) {
    const Some<T> factors = Take<T>(weight + i, p.dim - i, aligned);
    Some<T> values = Take<T>(x + i, p.dim - i, aligned);
#pragma unroll
    for (int j = 0; j < kWide<T>; ++j) {
      const float scaled = ToFloat(values.at[j]) * scale, factor = ToFloat(factors.at[j]);
      values.at[j] =
          FromFloat<T>(p.offset ? scaled * (factor + 1.0f) : factor * Rounded<T>(scaled));
    }
    Put<T>(out + i, p.dim - i, aligned, values);
  }
}

struct Silu {
  static __device__ float Of(float x) { return __fdiv_rn(x, 1.0f + expf(-x)); }
};

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u).
struct GeluTanh {
  static __device__ float Of(float x) {
    const float inner = fmaf(x * x * x, 0.044715f, x);
    return __fdiv_rn(x, 1.0f + expf(inner * -1.59576912f));
  }
};

// Grid: (pieces of a row, rows), and the second dimension goes on where it ends.
template <typename Act, typename T>
__global__ void __launch_bounds__(kThreads) GateKernel(GateParams p, bool aligned) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide<T>;
  if (i >= p.dim) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    T* gate = static_cast<T*>(p.gate) + row * p.gate_step + i;
    Some<T> values = Take<T>(gate, p.dim - i, aligned);
    const T* up_from = static_cast<const T*>(p.up) + row * p.up_step + i;
    const auto up = Take<T>(up_from, p.dim - i, aligned);
#pragma unroll
    for (int j = 0; j < kWide<T>; ++j) {
      const float active = Rounded<T>(Act::Of(ToFloat(values.at[j])));
      values.at[j] = FromFloat<T>(active * ToFloat(up.at[j]));
    }
    Put<T>(gate, p.dim - i, aligned, values);
  }
}

// Both values of each pair: `i` values into the first half, and into the second.
template <typename T>
__device__ __forceinline__ void RotatePairs(const T* x, const T* cos, const T* sin, int64_t half,
                                            int64_t i, bool aligned, T* out) {
  const int64_t j = half + i, left = half - i;
  const Some<T> first = Take<T>(x + i, left, aligned), second = Take<T>(x + j, left, aligned);
  const Some<T> cos_i = Take<T>(cos + i, left, aligned), cos_j = Take<T>(cos + j, left, aligned);
  const Some<T> sin_i = Take<T>(sin + i, left, aligned), sin_j = Take<T>(sin + j, left, aligned);
  Some<T> low, high;
#pragma unroll
  for (int n = 0; n < kWide<T>; ++n) {
    const float a = ToFloat(first.at[n]), b = ToFloat(second.at[n]);
    low.at[n] =
        FromFloat<T>(Rounded<T>(a * ToFloat(cos_i.at[n])) - Rounded<T>(b * ToFloat(sin_i.at[n])));
    high.at[n] =
        FromFloat<T>(Rounded<T>(b * ToFloat(cos_j.at[n])) + Rounded<T>(a * ToFloat(sin_j.at[n])));
  }
  Put<T>(out + i, left, aligned, low);
  Put<T>(out + j, left, aligned, high);
}

// Grid: (tokens, 2): a token's queries, or its keys.
template <typename T>
__global__ void __launch_bounds__(kThreads) RopeKernel(RopeParams p, bool aligned) {
  const RopeHeads heads = blockIdx.y == 0 ? p.heads[0] : p.heads[1];
  const auto length = static_cast<unsigned>(p.length);
  const int64_t row = blockIdx.x / length, token = blockIdx.x % length;
  const T* cos = static_cast<const T*>(p.cos.data) + row * p.cos.row + token * p.cos.token;
  const T* sin = static_cast<const T*>(p.sin.data) + row * p.sin.row + token * p.sin.token;
  const T* from = static_cast<const T*>(heads.x.data) + row * heads.x.row + token * heads.x.token;
  T* to = static_cast<T*>(heads.out) + blockIdx.x * heads.count * p.head_dim;
  const int64_t half = p.width / 2, stay = p.head_dim - p.width;
  // Pieces of a head: of its pairs, then of the features that stay. Divided by as 32 bits.
  const auto rotated = static_cast<unsigned>((half + kWide<T> - 1) / kWide<T>);
  const auto pieces = rotated + static_cast<unsigned>((stay + kWide<T> - 1) / kWide<T>);
  for (unsigned at = threadIdx.x; at < heads.count * pieces; at += kThreads) {
    const unsigned head = at / pieces, piece = at % pieces;
    const T* x = from + head * heads.x.head;
    T* out = to + head * p.head_dim;
    if (piece < rotated) {
      RotatePairs<T>(x, cos, sin, half, int64_t{piece} * kWide<T>, aligned, out);
    } else {
      const int64_t i = p.width + int64_t{piece - rotated} * kWide<T>, left = p.head_dim - i;
      Put<T>(out + i, left, aligned, Take<T>(x + i, left, aligned));
    }
  }
}

// The host's side ------------------------------------------------------------------------------

bool Aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <typename T>
void Norm(const NormParams& p, cudaStream_t stream) {
  const bool aligned = Aligned(p.x) && Aligned(p.residual) && Aligned(p.weight) && Aligned(p.sum) &&
                       Aligned(p.out) && (p.dim | p.x_step | p.residual_step) % kWide<T> == 0;
  constexpr size_t kShared = kThreads / kWarp * sizeof(float);
  EXKV_LAUNCH(NormKernel<T>, static_cast<unsigned>(p.rows), kThreads, kShared, stream, p, aligned);
}

template <typename Act, typename T>
void Gate(const GateParams& p, cudaStream_t stream) {
  const bool aligned =
      Aligned(p.gate) && Aligned(p.up) && (p.dim | p.gate_step | p.up_step) % kWide<T> == 0;
  constexpr int64_t kMostRows = 65535, kPiece = kThreads * kWide<T>;
  const dim3 grid(static_cast<unsigned>((p.dim + kPiece - 1) / kPiece),
                  static_cast<unsigned>(p.rows < kMostRows ? p.rows : kMostRows));
  const auto kernel = GateKernel<Act, T>;  // a macro's argument has no comma
  EXKV_LAUNCH(kernel, grid, kThreads, 0, stream, p, aligned);
}

bool Aligned(const TokenView& view, int64_t step) {
  return Aligned(view.data) && (view.row | view.token | view.head) % step == 0;
}

template <typename T>
void Rope(const RopeParams& p, cudaStream_t stream) {
  bool aligned = (p.width / 2 | p.head_dim) % kWide<T> == 0;
  aligned = aligned && Aligned(p.cos, kWide<T>) && Aligned(p.sin, kWide<T>);
  for (const RopeHeads& heads : p.heads) {
    aligned = aligned && Aligned(heads.x, kWide<T>) && Aligned(heads.out);
  }
  const dim3 grid(static_cast<unsigned>(p.rows), 2);
  EXKV_LAUNCH(RopeKernel<T>, grid, kThreads, 0, stream, p, aligned);
}

template <typename Act>
void GateOf(const GateParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case FloatType::kFloat32:
      return Gate<Act, float>(p, stream);
    case FloatType::kFloat16:
      return Gate<Act, __half>(p, stream);
    case FloatType::kBFloat16:
      return Gate<Act, __nv_bfloat16>(p, stream);
  }
}

}  // namespace

void LaunchNorm(const NormParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Norm<float>(params, stream);
    case FloatType::kFloat16:
      return Norm<__half>(params, stream);
    case FloatType::kBFloat16:
      return Norm<__nv_bfloat16>(params, stream);
  }
}

void LaunchSiluMul(const GateParams& params, cudaStream_t stream) { GateOf<Silu>(params, stream); }

void LaunchGeluMul(const GateParams& params, cudaStream_t stream) {
  GateOf<GeluTanh>(params, stream);
}

void LaunchRope(const RopeParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return Rope<float>(params, stream);
    case FloatType::kFloat16:
      return Rope<__half>(params, stream);
    case FloatType::kBFloat16:
      return Rope<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

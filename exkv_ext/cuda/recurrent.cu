// Layers with a state: causal convolutions, the gated delta rule and state space duality, token
// after token (exkv/ops/recurrent.py, exkv/ops/ssd.py).
//
// A head's state is a matrix, whose columns have nothing to do with each other. A block has 32 of
// them, a lane each, in registers for all tokens of a call; its warps share the rows. In turns,
// each warp puts one token's vectors into shared memory, for all warps; those of the next turn are
// on their way meanwhile. Sums run in an order that depends on the sizes of a head alone.
//
// Registers a thread, by nvcc 13.0 for 7.5 to 12.0, without spills, with 64, 128 and 256 rows: the
// gated delta rule 124, 164 and 226; state space duality 126, 164 and 222; the convolution 62.
#include "floats.cuh"
#include "recurrent.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kMostWarps = 4;
constexpr unsigned kFullWarp = 0xffffffffu;

// That a multiprocessor has registers for at least: asked for no more, the compiler spills some to
// make room for one block more.
template <int kRows>
constexpr int kBlocks = 4 - kRows / 32;

struct alignas(16) Four {
  float at[4];
};

__device__ __forceinline__ Four FourAt(const float* shared) {
  return *reinterpret_cast<const Four*>(shared);
}

__device__ __forceinline__ float WarpSum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// Where a thread is: its warp's rows of the state of a head, and its column.
struct Place {
  int lane, warp, warps;
  int64_t row, head, column;
  int64_t real;  // tokens of the row

  template <typename Params>
  __device__ explicit Place(const Params& p) {
    lane = static_cast<int>(threadIdx.x) % kWarp;
    warp = static_cast<int>(threadIdx.x) / kWarp;
    warps = static_cast<int>(blockDim.x) / kWarp;
    const auto heads = static_cast<unsigned>(p.heads);
    row = blockIdx.x / heads;
    head = blockIdx.x % heads;
    column = int64_t{blockIdx.y} * kWarp + lane;
    real = p.new_lens == nullptr ? p.length : int64_t{p.new_lens[row]};
    real = max(int64_t{0}, min(real, p.length));
  }
};

template <typename T>
__device__ __forceinline__ const T* VectorOf(const TokenView& x, int64_t row, int64_t token,
                                             int64_t head) {
  return static_cast<const T*>(x.data) + row * x.row + token * x.token + head * x.head;
}

// A thread's column of its warp's rows of a state.
template <int kRows>
struct StateColumn {
  float at[kRows];
  float* from;      // the first of the rows
  int64_t rows;     // that there are, kRows or fewer
  int64_t columns;  // 0 where the thread has none

  __device__ StateColumn(float* state, int64_t all_rows, int64_t all_columns, const Place& place) {
    const int64_t first = int64_t{place.warp} * kRows;
    from = state + first * all_columns + place.column;
    rows = place.column < all_columns ? all_rows - first : 0;
    columns = all_columns;
#pragma unroll
    for (int i = 0; i < kRows; ++i) at[i] = i < rows ? from[i * columns] : 0.0f;
  }

  __device__ void Store() {
#if defined(__CUDA_ARCH__)
    // As if unknown: else the addresses of all rows stay in registers from where they were loaded.
    asm volatile("" : "+l"(from), "+l"(columns));
#endif
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < rows) from[i * columns] = at[i];
    }
  }
};

// A lane's values of a vector of up to kMostWarps * kRows, every 32nd, as they are stored: to widen
// one would be to wait for it.
template <int kRows, typename T>
struct Piece {
  static constexpr int kCount = (kMostWarps * kRows + kWarp - 1) / kWarp;
  T at[kCount];

  __device__ __forceinline__ void Take(const T* vector, int64_t size, int lane) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = j * kWarp + lane;
      at[j] = i < size ? vector[i] : FromFloat<T>(0.0f);
    }
  }

  // The vector to shared memory, with zeros up to a width.
  template <typename Of>
  __device__ __forceinline__ void Put(float* shared, int width, int lane, const Of& of) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = j * kWarp + lane;
      if (i < width) shared[i] = of(ToFloat(at[j]));
    }
  }
};

template <int kRows, typename T>
__device__ __forceinline__ float Product(const Piece<kRows, T>& a, const Piece<kRows, T>& b) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < Piece<kRows, T>::kCount; ++j) {
    sum = fmaf(ToFloat(a.at[j]), ToFloat(b.at[j]), sum);
  }
  return WarpSum(sum);
}

// Behind a row's last token.
template <typename T>
__device__ void PutZeros(void* out, int64_t length, int64_t heads, int64_t dim, const Place& at) {
  if (at.column >= dim) return;
  for (int64_t token = at.real + at.warp; token < length; token += at.warps) {
    const int64_t place = (at.row * length + token) * heads + at.head;
    static_cast<T*>(out)[place * dim + at.column] = FromFloat<T>(0.0f);
  }
}

// The gated delta rule --------------------------------------------------------------------------

// A token of a head in shared memory, of `width` keys: k, q, where channels fade by themselves
// their decays, v of the block's columns, and these numbers.
enum { kBeta, kDecay, kOfQueryAndKey, kDeltaNumbers = 4 };

template <bool kByChannel>
__host__ __device__ constexpr int DeltaSlot(int width) {
  return (kByChannel ? 3 : 2) * width + kWarp + kDeltaNumbers;
}

// The same in the registers of a warp, as it comes from memory.
template <int kRows, bool kByChannel, typename T>
struct DeltaToken {
  Piece<kRows, T> q, k;
  Piece<kRows, float> decays;
  T v;
  float decay, beta;

  __device__ __forceinline__ void Take(const DeltaParams& p, const Place& at, int64_t token) {
    const auto from = at.head / static_cast<unsigned>(p.groups);
    const int64_t place = (at.row * p.length + token) * p.heads + at.head;
    q.Take(VectorOf<T>(p.q, at.row, token, from), p.key_dim, at.lane);
    k.Take(VectorOf<T>(p.k, at.row, token, from), p.key_dim, at.lane);
    if (kByChannel) decays.Take(p.decay + place * p.key_dim, p.key_dim, at.lane);
    if (!kByChannel) decay = p.decay[place];
    beta = p.beta[place];
    v = FromFloat<T>(0.0f);
    if (at.column < p.value_dim) v = VectorOf<T>(p.v, at.row, token, at.head)[at.column];
  }

  __device__ __forceinline__ void Put(float* slot, int width, int lane, float scale) const {
    constexpr float kEps = 1e-6f;
    const float of_k = __fdiv_rn(1.0f, __fsqrt_rn(Product(k, k) + kEps));
    const float of_q = __fdiv_rn(scale, __fsqrt_rn(Product(q, q) + kEps));
    const float both = Product(q, k) * of_k * of_q;
    k.Put(slot, width, lane, [=](float x) { return x * of_k; });
    q.Put(slot + width, width, lane, [=](float x) { return x * of_q; });
    if (kByChannel) decays.Put(slot + 2 * width, width, lane, [](float x) { return expf(x); });
    slot += (kByChannel ? 3 : 2) * width;
    slot[lane] = ToFloat(v);
    if (lane != 0) return;
    slot[kWarp + kBeta] = beta;
    slot[kWarp + kDecay] = kByChannel ? 1.0f : expf(decay);
    slot[kWarp + kOfQueryAndKey] = both;
  }
};

// Fades a column, and finds what keys and queries see in it then: (k, q).
template <bool kByChannel, int kRows>
__device__ __forceinline__ float2 Fade(const float* k, const float* q, const float* decays,
                                       float decay, StateColumn<kRows>& state) {
  float from_k[2] = {}, from_q[2] = {};
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const Four keys = FourAt(k + i), queries = FourAt(q + i);
    const Four fading = FourAt((kByChannel ? decays : k) + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float kept = state.at[i + j] * (kByChannel ? fading.at[j] : decay);
      from_k[j % 2] = fmaf(keys.at[j], kept, from_k[j % 2]);
      from_q[j % 2] = fmaf(queries.at[j], kept, from_q[j % 2]);
      state.at[i + j] = kept;
    }
  }
  return {from_k[0] + from_k[1], from_q[0] + from_q[1]};
}

// Grid: (heads of all rows, tiles of columns). With S the state as it fades, a token needs one
// barrier: added = beta (v - k S), the output is q S + (q k) added, and the state S + k added.
template <int kRows, bool kByChannel, typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocks<kRows>)
    DeltaKernel(DeltaParams p, float scale) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const Place at(p);
  PutZeros<T>(p.out, p.length, p.heads, p.value_dim, at);
  if (at.real == 0) return;
  const int width = at.warps * kRows, slot = DeltaSlot<kByChannel>(width), rows = at.warp * kRows;
  float* slots = shared + 4 * at.warps * kWarp;  // behind what warps find of two tokens
  float* state_at = p.state + at.row * p.state_row + at.head * p.key_dim * p.value_dim;
  StateColumn<kRows> state(state_at, p.key_dim, p.value_dim, at);
  T* out = static_cast<T*>(p.out) + (at.row * p.length * p.heads + at.head) * p.value_dim;
  DeltaToken<kRows, kByChannel, T> next{};
  if (at.warp < at.real) next.Take(p, at, at.warp);
  int turn = 0;
#pragma unroll 1
  for (int64_t first = 0; first < at.real; first += at.warps, turn ^= 1) {
    const float* tokens = slots + turn * at.warps * slot;
    if (first + at.warp < at.real) {
      next.Put(slots + (turn * at.warps + at.warp) * slot, width, at.lane, scale);
    }
    __syncthreads();
    const int64_t later = first + at.warps + at.warp;
    if (later < at.real) next.Take(p, at, later);
    const auto count = static_cast<int>(min(int64_t{at.warps}, at.real - first));
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float* k = tokens + t * slot;
      const float* values = k + (kByChannel ? 3 : 2) * width;
      const float* numbers = values + kWarp;
      // A buffer's last readers are through with it: they have come to the barrier since.
      float* found = shared + ((first + t) % 2) * 2 * at.warps * kWarp + at.lane;
      const float2 own = Fade<kByChannel>(k + rows, k + width + rows, k + 2 * width + rows,
                                          numbers[kDecay], state);
      found[2 * at.warp * kWarp] = own.x;
      found[(2 * at.warp + 1) * kWarp] = own.y;
      __syncthreads();
      float from_k = 0, from_q = 0;
      for (int w = 0; w < at.warps; ++w) {
        from_k += found[2 * w * kWarp];
        from_q += found[(2 * w + 1) * kWarp];
      }
      const float added = numbers[kBeta] * (values[at.lane] - from_k);
      if (at.warp == t && at.column < p.value_dim) {
        const float result = fmaf(numbers[kOfQueryAndKey], added, from_q);
        out[(first + t) * p.heads * p.value_dim + at.column] = FromFloat<T>(result);
      }
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const Four keys = FourAt(k + rows + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) state.at[i + j] = fmaf(keys.at[j], added, state.at[i + j]);
      }
    }
  }
  state.Store();
}

// State space duality ---------------------------------------------------------------------------

// A token of a head in shared memory, of `width` rows of the state: b, c, dt x of the block's
// columns, and what is kept of the state.
constexpr int kSsdNumbers = 4;

__host__ __device__ constexpr int SsdSlot(int width) { return 2 * width + kWarp + kSsdNumbers; }

template <int kRows, typename T>
struct SsdToken {
  Piece<kRows, T> b, c;
  T x;
  float dt;

  __device__ __forceinline__ void Take(const SsdParams& p, const Place& at, int64_t token) {
    const auto from = at.head / static_cast<unsigned>(p.groups);
    b.Take(VectorOf<T>(p.b, at.row, token, from), p.state_dim, at.lane);
    c.Take(VectorOf<T>(p.c, at.row, token, from), p.state_dim, at.lane);
    dt = p.dt[(at.row * p.length + token) * p.heads + at.head];
    x = FromFloat<T>(0.0f);
    if (at.column < p.head_dim) x = VectorOf<T>(p.x, at.row, token, at.head)[at.column];
  }

  __device__ __forceinline__ void Put(float* slot, int width, int lane, float a) const {
    b.Put(slot, width, lane, [](float value) { return value; });
    c.Put(slot + width, width, lane, [](float value) { return value; });
    slot += 2 * width;
    slot[lane] = dt * ToFloat(x);
    if (lane == 0) slot[kWarp] = expf(dt * a);
  }
};

// Grid: as before. No token waits for another's output: warps meet once a turn, where they add up
// what they have found in the turn before.
template <int kRows, typename T>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocks<kRows>) SsdKernel(SsdParams p) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const Place at(p);
  PutZeros<T>(p.out, p.length, p.heads, p.head_dim, at);
  if (at.real == 0) return;
  const int width = at.warps * kRows, slot = SsdSlot(width), rows = at.warp * kRows;
  const int found_floats = at.warps * at.warps * kWarp;  // of a turn: token, warp, column
  float* slots = shared + 2 * found_floats;
  float* state_at = p.state + at.row * p.state_row + at.head * p.state_dim * p.head_dim;
  StateColumn<kRows> state(state_at, p.state_dim, p.head_dim, at);
  T* out = static_cast<T*>(p.out) + (at.row * p.length * p.heads + at.head) * p.head_dim;
  const float a = p.a[at.head], d = p.d[at.head];
  SsdToken<kRows, T> next{};
  float skipped = 0, skipped_before = 0;  // d x of the warp's own token, in this turn and the last
  if (at.warp < at.real) next.Take(p, at, at.warp);
  int turn = 0;
  // One turn more than there are tokens for, in which the last outputs are written.
#pragma unroll 1
  for (int64_t first = 0; first < at.real + at.warps; first += at.warps, turn ^= 1) {
    const float* tokens = slots + turn * at.warps * slot;
    if (first + at.warp < at.real) {
      next.Put(slots + (turn * at.warps + at.warp) * slot, width, at.lane, a);
      skipped = d * ToFloat(next.x);
    }
    __syncthreads();
    const int64_t later = first + at.warps + at.warp, before = first - at.warps + at.warp;
    if (later < at.real) next.Take(p, at, later);
    if (before >= 0 && before < at.real && at.column < p.head_dim) {
      const float* found = shared + (turn ^ 1) * found_floats + at.warp * at.warps * kWarp;
      float sum = skipped_before;
      for (int w = 0; w < at.warps; ++w) sum += found[w * kWarp + at.lane];
      out[before * p.heads * p.head_dim + at.column] = FromFloat<T>(sum);
    }
    skipped_before = skipped;
    const auto count = static_cast<int>(max(int64_t{0}, min(int64_t{at.warps}, at.real - first)));
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const float* b = tokens + t * slot + rows;
      const float* c = b + width;
      const float* values = tokens + t * slot + 2 * width;
      const float added = values[at.lane], decay = values[kWarp];
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const Four inputs = FourAt(b + i), outputs = FourAt(c + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          state.at[i + j] = fmaf(inputs.at[j], added, decay * state.at[i + j]);
          sums[j % 2] = fmaf(outputs.at[j], state.at[i + j], sums[j % 2]);
        }
      }
      shared[turn * found_floats + (t * at.warps + at.warp) * kWarp + at.lane] = sums[0] + sums[1];
    }
  }
  state.Store();
}

// Causal convolutions ---------------------------------------------------------------------------

constexpr int kConvThreads = 128;
constexpr int64_t kSegment = 64;  // tokens that a thread goes through, or more
constexpr int kAhead = 8;         // of which are loaded before they are needed

// Grid: (blocks of channels of all rows, segments of tokens): a thread has a channel of a segment.
// That of the first segment has the state for itself: the others' inputs are all in x. kTaps is the
// number of taps, whose inputs are in registers then, or 0 for any.
template <int kTaps, typename T>
__global__ void __launch_bounds__(kConvThreads) ConvKernel(ConvParams p, int64_t segment) {
  const auto blocks = static_cast<unsigned>((p.channels + kConvThreads - 1) / kConvThreads);
  const int64_t row = blockIdx.x / blocks;
  const int64_t channel = int64_t{blockIdx.x % blocks} * kConvThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const int64_t taps = kTaps > 0 ? kTaps : p.taps, before = taps - 1;
  const int64_t first = blockIdx.y * segment, last = min(first + segment, p.length);
  const T* x = static_cast<const T*>(p.x) + row * p.x_row + channel;
  T* state = static_cast<T*>(p.state) + row * p.state_row + channel;
  const T* weight = static_cast<const T*>(p.weight) + channel * taps;
  T* out = static_cast<T*>(p.out) + row * p.length * p.channels + channel;
  const float bias = p.bias == nullptr ? 0.0f : ToFloat(static_cast<const T*>(p.bias)[channel]);
  const auto input = [&](int64_t token) {
    return token < 0 ? state[(before + token) * p.channels] : x[token * p.x_token];
  };
  if constexpr (kTaps > 0) {
    float window[kTaps], factors[kTaps];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      factors[j] = ToFloat(weight[j]);
      if (j > 0) window[j] = ToFloat(input(first + j - kTaps));
    }
    for (int64_t token = first; token < last; token += kAhead) {
      T ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i] = token + i < last ? x[(token + i) * p.x_token] : FromFloat<T>(0.0f);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int j = 0; j + 1 < kTaps; ++j) window[j] = window[j + 1];
        window[kTaps - 1] = ToFloat(ahead[i]);
        float sum = window[0] * factors[0];
#pragma unroll
        for (int j = 1; j < kTaps; ++j) sum += window[j] * factors[j];
        if (token + i < last) out[(token + i) * p.channels] = FromFloat<T>(sum + bias);
      }
    }
  } else {
    for (int64_t token = first; token < last; ++token) {
      float sum = ToFloat(input(token - before)) * ToFloat(weight[0]);
      for (int64_t j = 1; j < taps; ++j) {
        sum += ToFloat(input(token - before + j)) * ToFloat(weight[j]);
      }
      out[token * p.channels] = FromFloat<T>(sum + bias);
    }
  }
  if (first > 0) return;
  int64_t real = p.new_lens == nullptr ? p.length : int64_t{p.new_lens[row]};
  real = max(int64_t{0}, min(real, p.length));
  // In order, so that none is overwritten before it has moved.
  for (int64_t j = 0; j < before; ++j) state[j * p.channels] = input(real - before + j);
}

// The host's side ------------------------------------------------------------------------------

// Warps that share so many rows of a state, each up to kRows.
template <int kRows>
int WarpsFor(int64_t rows) {
  return static_cast<int>(max(int64_t{1}, (rows + kRows - 1) / kRows));
}

dim3 GridFor(int64_t heads, int64_t columns) {
  return dim3(static_cast<unsigned>(heads), static_cast<unsigned>((columns + kWarp - 1) / kWarp));
}

template <int kRows, bool kByChannel, typename T>
void Delta(const DeltaParams& p, cudaStream_t stream) {
  const int warps = WarpsFor<kRows>(p.key_dim);
  const int floats = 2 * warps * (2 * kWarp + DeltaSlot<kByChannel>(warps * kRows));
  const float size = static_cast<float>(max(int64_t{1}, p.key_dim));
  const float scale = 1.0f / sqrtf(size);
  const auto kernel = DeltaKernel<kRows, kByChannel, T>;  // a macro's argument has no comma
  const dim3 grid = GridFor(p.rows, p.value_dim);
  EXKV_LAUNCH(kernel, grid, static_cast<unsigned>(warps * kWarp), floats * sizeof(float), stream, p,
              scale);
}

template <bool kByChannel, typename T>
void DeltaOf(const DeltaParams& p, cudaStream_t stream) {
  if (p.key_dim <= kMostWarps * 16) return Delta<16, kByChannel, T>(p, stream);
  if (p.key_dim <= kMostWarps * 32) return Delta<32, kByChannel, T>(p, stream);
  return Delta<64, kByChannel, T>(p, stream);
}

template <typename T>
void DeltaOf(const DeltaParams& p, cudaStream_t stream) {
  // Of a single key, either will do.
  return p.channels > 1 ? DeltaOf<true, T>(p, stream) : DeltaOf<false, T>(p, stream);
}

template <int kRows, typename T>
void Ssd(const SsdParams& p, cudaStream_t stream) {
  const int warps = WarpsFor<kRows>(p.state_dim);
  const int floats = 2 * warps * (warps * kWarp + SsdSlot(warps * kRows));
  const auto kernel = SsdKernel<kRows, T>;
  const dim3 grid = GridFor(p.rows, p.head_dim);
  EXKV_LAUNCH(kernel, grid, static_cast<unsigned>(warps * kWarp), floats * sizeof(float), stream,
              p);
}

template <typename T>
void SsdOf(const SsdParams& p, cudaStream_t stream) {
  if (p.state_dim <= kMostWarps * 16) return Ssd<16, T>(p, stream);
  if (p.state_dim <= kMostWarps * 32) return Ssd<32, T>(p, stream);
  return Ssd<64, T>(p, stream);
}

template <int kTaps, typename T>
void Conv(const ConvParams& p, cudaStream_t stream) {
  constexpr int64_t kMostSegments = 65535;
  int64_t segment = max(kSegment, p.taps - 1);
  segment = max(segment, (p.length + kMostSegments - 1) / kMostSegments);
  const int64_t blocks = (p.channels + kConvThreads - 1) / kConvThreads;
  const dim3 grid(static_cast<unsigned>(p.rows * blocks),
                  static_cast<unsigned>((p.length + segment - 1) / segment));
  const auto kernel = ConvKernel<kTaps, T>;
  EXKV_LAUNCH(kernel, grid, kConvThreads, 0, stream, p, segment);
}

template <typename T>
void ConvOf(const ConvParams& p, cudaStream_t stream) {
  if (p.taps == 3) return Conv<3, T>(p, stream);  // LFM2
  if (p.taps == 4) return Conv<4, T>(p, stream);  // all others
  return Conv<0, T>(p, stream);
}

}  // namespace

void LaunchDelta(const DeltaParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return DeltaOf<float>(params, stream);
    case FloatType::kFloat16:
      return DeltaOf<__half>(params, stream);
    case FloatType::kBFloat16:
      return DeltaOf<__nv_bfloat16>(params, stream);
  }
}

void LaunchSsd(const SsdParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return SsdOf<float>(params, stream);
    case FloatType::kFloat16:
      return SsdOf<__half>(params, stream);
    case FloatType::kBFloat16:
      return SsdOf<__nv_bfloat16>(params, stream);
  }
}

void LaunchConv(const ConvParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case FloatType::kFloat32:
      return ConvOf<float>(params, stream);
    case FloatType::kFloat16:
      return ConvOf<__half>(params, stream);
    case FloatType::kBFloat16:
      return ConvOf<__nv_bfloat16>(params, stream);
  }
}

}  // namespace exkv

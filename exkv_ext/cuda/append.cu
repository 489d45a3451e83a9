// Stores new keys and values: a warp rotates, transforms, encodes and writes one head of one token.
// Roundings are those of exkv/ops/rope.py and exkv/ops/kv_formats.py, so that the bits are too.
#include "append.cuh"
#include "floats.cuh"
#include "kv_pack.cuh"

namespace exkv {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;  // of a block

// A warp's head: whose, and where it goes.
struct Head {
  int64_t row;
  int64_t token;
  int64_t head;
  int64_t to_row;  // or page
  int64_t to_token;
};

__device__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// Whether the token is one that is written; as TokensWritten and PlaceInRow in ../append_params.h.
// What the host can't check is left out here: a token without a place is not stored.
__device__ bool FindPlace(const AppendParams& p, Head* at) {
  int64_t end = p.length;
  if (p.new_lens != nullptr) end = min(end, static_cast<int64_t>(p.new_lens[at->row]));
  if (at->token >= end || (p.ring > 0 && at->token < end - p.ring)) return false;
  int64_t place = p.past_lens[at->row] + at->token;
  if (p.ring > 0) place %= p.ring;
  if (place < 0 || place >= p.room) return false;
  at->to_row = at->row;
  at->to_token = place;
  if (p.block_table == nullptr) return true;
  at->to_row = p.block_table[at->row * p.table_row + place / p.page];
  at->to_token = place % p.page;
  return at->to_row >= 0 && at->to_row < p.pages;
}

template <typename T>
__device__ const T* Given(const TokenView& view, const Head& at) {
  return static_cast<const T*>(view.data) + at.row * view.row + at.token * view.token +
         at.head * view.head;
}

template <typename T>
__device__ T* Place(const TokenView& view, const Head& at) {
  return static_cast<T*>(const_cast<void*>(view.data)) + at.to_row * view.row +
         at.to_token * view.token + at.head * view.head;
}

// The head as floats, its first `width` features rotated; the two halves of these are the pairs.
template <typename T>
__device__ void LoadHead(const AppendParams& p, const AppendSide& side, const Head& at,
                         int64_t width, float* x) {
  const T* from = Given<T>(side.x, at);
  const T* cos = static_cast<const T*>(p.cos.data) + at.row * p.cos.row + at.token * p.cos.token;
  const T* sin = static_cast<const T*>(p.sin.data) + at.row * p.sin.row + at.token * p.sin.token;
  const int64_t half = width / 2;
  for (int64_t i = Lane(); i < p.dim; i += kWarp) {
    const float own = ToFloat(from[i]);
    if (i >= width) {
      x[i] = own;
      continue;
    }
    const float other = i < half ? -ToFloat(from[i + half]) : ToFloat(from[i - half]);
    const float straight = Rounded<T>(own * ToFloat(cos[i]));
    x[i] = Rounded<T>(straight + Rounded<T>(other * ToFloat(sin[i])));
  }
  __syncwarp();
}

// The Walsh-Hadamard transform, in place: sums and differences of halves that are 1, 2, 4, ...
// apart.
template <typename T>
__device__ void Transform(const AppendParams& p, float* x) {
  for (int64_t half = 1; half < p.block; half *= 2) {
    for (int64_t pair = Lane(); pair < p.dim / 2; pair += kWarp) {
      const int64_t i = pair / half * 2 * half + pair % half;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
    __syncwarp();
  }
  for (int64_t i = Lane(); i < p.dim; i += kWarp) x[i] = Rounded<T>(x[i] * p.factor);
  __syncwarp();
}

__device__ void StoreInt8(const AppendParams& p, const AppendSide& side, const Head& at,
                          const float* x) {
  int8_t* values = Place<int8_t>(side.values, at);
  uint16_t* scales = Place<uint16_t>(side.scale, at);
  for (int64_t first = 0; first < p.dim; first += kGroup) {
    const int64_t i = first + Lane();
    int8_t level;
    const __half scale = QuantizeLane(i < p.dim ? x[i] : 0, &level);
    if (i < p.dim) values[i] = level;
    if (Lane() == 0) scales[first / kGroup] = __half_as_ushort(scale);
  }
}

template <int kBits>
__device__ void StorePacked(const AppendParams& p, const AppendSide& side, const Head& at,
                            const float* x) {
  constexpr int kShare = 8 / kBits;
  uint8_t* packed = Place<uint8_t>(side.values, at);
  uint16_t* scales = Place<uint16_t>(side.scale, at);
  uint16_t* offsets = Place<uint16_t>(side.offset, at);
  for (int64_t first = 0; first < p.dim; first += kGroup) {
    const int64_t i = first + Lane(), left = p.dim - first;
    // A short last group repeats its last value, which changes no extreme.
    const float value = x[i < p.dim ? i : p.dim - 1];
    ScaleAndOffset range;
    const uint8_t byte =
        PackLane<kBits>(value, left < kWarp ? static_cast<int>(left) : kWarp, &range);
    if (Lane() % kShare == 0 && i < p.dim) packed[i / kShare] = byte;
    if (Lane() > 0) continue;
    scales[first / kGroup] = __half_as_ushort(range.scale);
    offsets[first / kGroup] = __half_as_ushort(range.offset);
  }
}

template <typename T>
__device__ void StoreHead(const AppendParams& p, const AppendSide& side, const Head& at,
                          const float* x) {
  switch (side.format) {
    case KvFormat::kFloat: {
      T* values = Place<T>(side.values, at);
      for (int64_t i = Lane(); i < p.dim; i += kWarp) values[i] = FromFloat<T>(x[i]);
      break;
    }
    case KvFormat::kInt8:
      StoreInt8(p, side, at, x);
      break;
    case KvFormat::kInt4:
      StorePacked<4>(p, side, at, x);
      break;
    default:
      StorePacked<2>(p, side, at, x);
  }
}

// One warp for each head of each token, of keys and of values.
template <typename T>
__global__ void AppendKernel(AppendParams p) {
  EXKV_DYNAMIC_SHARED(float, shared);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (at >= p.rows * p.length * p.heads * 2) return;
  Head head{};
  head.head = at % p.heads;
  at /= p.heads;
  const bool values = at % 2 != 0;
  at /= 2;
  head.token = at % p.length;
  head.row = at / p.length;
  if (!FindPlace(p, &head)) return;
  float* x = shared + warp * p.dim;
  const AppendSide& side = p.sides[values ? 1 : 0];
  LoadHead<T>(p, side, head, values ? 0 : p.width, x);
  if (p.block > 0) Transform<T>(p, x);
  StoreHead<T>(p, side, head, x);
}

template <typename T>
void Launch(const AppendParams& p, cudaStream_t stream) {
  const int64_t warps = p.rows * p.length * p.heads * 2;
  const auto blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  const auto shared = static_cast<size_t>(kWarps * p.dim) * sizeof(float);
  EXKV_LAUNCH(AppendKernel<T>, blocks, kWarps * kWarp, shared, stream, p);
}

}  // namespace

void LaunchAppend(const AppendParams& params, cudaStream_t stream) {
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

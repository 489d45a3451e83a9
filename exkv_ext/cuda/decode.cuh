// What the decode kernels share: their arguments, which keys a block goes through, and what becomes
// of a block's results. attention.cu has the kernel for all calls, attention_tensor.cu the one on
// tensor cores.
#pragma once

#include "attention.cuh"
#include "attention_call.cuh"

namespace exkv {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kLanes = 32;  // of a warp
constexpr int kBlockKeys = kLanes * static_cast<int>(kDecodeWarps);

// The arguments of a kernel, passed by value.
struct DecodeCall : AttentionCall {
  FloatType q_type;
  TokenView queries;
  int row_blocks;  // blocks that the rows of one head of keys take
  int splits;
  float* state;  // (B, H_kv, rows, splits, D) sums, then the same of their StateTail
};

// Beside a row's sum of values: its largest score, and the weights' sum.
struct StateTail {
  float peak;
  float total;
};

__device__ inline int CeilDivInt(int a, int b) { return (a + b - 1) / b; }

// The keys that a block goes through: its split of what its rows see between them.
__device__ inline Range BlockKeys(const DecodeCall& p, int row, int first_row, int row_count,
                                  int split) {
  const int group = p.heads / p.kv_heads;
  const int last = min(first_row + row_count, p.rows) - 1;
  Range all = {p.kv_len, 0};
  for (int query = first_row / group; query <= last / group; ++query) {
    const Range keys = VisibleTo(p, row, query);
    if (keys.begin == keys.end) continue;
    all = {min(all.begin, keys.begin), max(all.end, keys.end)};
  }
  if (all.begin >= all.end) return {0, 0};
  const int first = all.begin / kLanes * kLanes;
  const int step = CeilDivInt(CeilDivInt(all.end - first, p.splits), kBlockKeys) * kBlockKeys;
  const int64_t begin = first + static_cast<int64_t>(split) * step;
  if (begin >= all.end) return {0, 0};
  // Keys before the first are left out one by one.
  return {max(static_cast<int>(begin), all.begin),
          static_cast<int>(min(begin + step, static_cast<int64_t>(all.end)))};
}

__device__ inline float FloatAt(const void* data, FloatType type, int64_t at) {
  switch (type) {
    case FloatType::kFloat32:
      return static_cast<const float*>(data)[at];
    case FloatType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  }
}

// The keys that each row of a tile sees; none where there is no row.
template <int kRows>
__device__ void FindSeen(const DecodeCall& p, int row, int first_row, Range* seen) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= kRows) return;
  const int at = first_row + r;
  seen[r] = at < p.rows ? VisibleTo(p, row, at / (p.heads / p.kv_heads)) : Range{0, 0};
}

__device__ inline float WarpMax(float x) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  }
  return x;
}

__device__ inline float WarpSum(float x) {
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// The tile's largest score of a row, and the sum of weights relative to it.
template <int kRows>
__device__ StateTail TileTail(const StateTail* tails, int r) {
  StateTail all = {-INFINITY, 0};
  for (int warp = 0; warp < kDecodeWarps; ++warp) {
    all.peak = fmaxf(all.peak, tails[warp * kRows + r].peak);
  }
  for (int warp = 0; warp < kDecodeWarps; ++warp) {
    const StateTail& one = tails[warp * kRows + r];
    all.total = fmaf(one.total, expf(one.peak - Base(all.peak)), all.total);
  }
  return all;
}

__device__ inline void WriteLse(const DecodeCall& p, int64_t out_row, const StateTail& tail) {
  if (p.lse != nullptr) p.lse[out_row] = tail.total == 0 ? -INFINITY : tail.peak + logf(tail.total);
}

__device__ inline void WriteValue(const DecodeCall& p, int64_t out_row, int d, float sum,
                                  float total) {
  SetFloat(p.out, p.out_type, out_row * p.dim + d, total == 0 ? 0 : __fdiv_rn(sum, total));
}

__device__ inline StateTail* Tails(const DecodeCall& p, int64_t states) {
  return reinterpret_cast<StateTail*>(p.state + states * p.dim);
}

// Results, or a split's state; value(r, d, tail) is what all warps of the tile have found.
template <int kRows, typename Value>
__device__ void WriteTile(const DecodeCall& p, int row, int head, int first_row, int split,
                          const StateTail* tails, const Value& value) {
  const int64_t states = int64_t{gridDim.z} * p.kv_heads * p.rows * p.splits;
  for (int r = 0; r < kRows && first_row + r < p.rows; ++r) {
    const StateTail tail = TileTail<kRows>(tails, r);
    const int64_t out_row = OutRow(p, row, head, first_row + r);
    const int64_t state =
        ((static_cast<int64_t>(row) * p.kv_heads + head) * p.rows + first_row + r) * p.splits +
        split;
    for (int d = static_cast<int>(threadIdx.x); d < p.dim; d += kBlockKeys) {
      if (p.splits == 1) {
        WriteValue(p, out_row, d, value(r, d, tail), tail.total);
      } else {
        p.state[state * p.dim + d] = value(r, d, tail);
      }
    }
    if (threadIdx.x > 0) continue;
    if (p.splits == 1) {
      WriteLse(p, out_row, tail);
    } else {
      Tails(p, states)[state] = tail;
    }
  }
}

}  // namespace exkv

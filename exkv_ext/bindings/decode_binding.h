// Between torch and CUDA's attention kernels, of which one is for decode-sized calls and one for
// prefill; a fresh prompt over floats, and what neither takes, goes on to the ops' references.
// attention_binding.h and attention_part_binding.h have the checks.
#pragma once

#include <array>
#include <tuple>
#include <vector>

#include "../cuda/attention.cuh"
#include "../cuda/prefill.cuh"
#include "attention_binding.h"
#include "attention_part_binding.h"

namespace exkv {

// The references are ops of their own (exkv/ops/registry.py), reached through torch's dispatcher.
inline Tensor Reference(const AttentionArguments& a) {
  using torch::stable::detail::from;
  std::array<StableIValue, 9> stack{from(a.q),         from(a.k),      from(a.v),
                                    from(a.past_lens), from(a.kv_len), from(a.ragged),
                                    from(a.scale),     from(a.window), from(a.softcap)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("exkv::attention_reference", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor Reference(const AttentionInt8Arguments& a) {
  using torch::stable::detail::from;
  std::array<StableIValue, 10> stack{
      from(a.q),         from(a.k),      from(a.k_scale), from(a.v),      from(a.v_scale),
      from(a.past_lens), from(a.kv_len), from(a.scale),   from(a.window), from(a.softcap)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("exkv::attention_int8_reference", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline DecodeShape ShapeOf(const Tensor& q, const Tensor& k, int64_t kv_len) {
  return {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), kv_len};
}

// Allocates what the launch needs, then hands it on: enqueue(params, plan, state).
template <typename Enqueue>
void Decode(const Tensor& q, const AttentionParams& params, int64_t processors,
            const Enqueue& enqueue) {
  const DecodePlan plan = PlanDecode(params, processors);
  Tensor state = NewEmpty(q, {plan.state_floats}, ScalarType::Float);
  enqueue(params, plan, static_cast<float*>(state.mutable_data_ptr()));
}

// Whether the reference reads a call by torch's flash kernels: a prompt of which nothing is cached.
// As in exkv/ops/attention.py.
inline bool IsFresh(const AttentionArguments& a) {
  const int64_t length = a.q.size(1);
  const bool windowed = a.window > 0 && a.window < length;
  return !a.ragged && a.kv_len == length && a.softcap == 0 && !windowed;
}

// Whether it reads one behind a cache by them, too. As is_flash there.
inline bool IsFlash(const AttentionArguments& a) {
  constexpr int64_t kBlocks = 384, kQueries = 64, kMostDim = 256;
  const int64_t length = a.q.size(1), dim = a.q.size(3);
  if (a.q.scalar_type() == ScalarType::Float || a.k.scalar_type() != a.q.scalar_type()) {
    return false;
  }
  const bool windowed = a.window > 0 && a.window < a.kv_len;
  if (a.ragged || a.softcap != 0 || windowed || dim % 8 != 0 || dim > kMostDim) return false;
  const int64_t blocks = (length + kQueries - 1) / kQueries;
  return a.q.size(0) * a.q.size(2) * blocks >= kBlocks && HasTensorCores();
}

// Whether the prefill kernel reads such keys or values right: on an H100 it did not where they were
// float32 and heads no multiple of 8 values. Why is not known; the emulation finds nothing.
inline bool ReadsRight(const Tensor& stored, int64_t dim) {
  return stored.scalar_type() != ScalarType::Float || dim % 8 == 0;
}

// The three ops; decode(params) and prefill(params) run a kernel each.
template <typename RunDecode, typename RunPrefill>
Tensor AttentionOrReference(const AttentionArguments& a, const RunDecode& decode,
                            const RunPrefill& prefill) {
  Checked(a);
  const DecodeShape shape = ShapeOf(a.q, a.k, a.kv_len);
  const bool few = a.q.numel() == 0 || DecodeTakes(shape);
  const bool many = !IsFresh(a) && !IsFlash(a) && PrefillTakes(shape) && ReadsRight(a.k, shape.dim);
  if (!few && !many) return Reference(a);
  // Rows of one length, too: a graph that holds the launch goes on to other lengths.
  AttentionArguments with_lengths = a;
  with_lengths.ragged = true;
  return few ? Attention(with_lengths, decode) : Attention(with_lengths, prefill);
}

template <typename RunDecode, typename RunPrefill>
Tensor AttentionOrReference(const AttentionInt8Arguments& a, const RunDecode& decode,
                            const RunPrefill& prefill) {
  Checked(a);
  const DecodeShape shape = ShapeOf(a.q, a.k, a.kv_len);
  if (a.q.numel() == 0 || DecodeTakes(shape)) return AttentionInt8(a, decode);
  return PrefillTakes(shape) ? AttentionInt8(a, prefill) : Reference(a);
}

template <typename RunDecode, typename RunPrefill>
std::tuple<Tensor, Tensor> AttentionOrReference(const PartArguments& a, const RunDecode& decode,
                                                const RunPrefill& prefill) {
  if (!HasKernels(a)) return Reference(a);
  Checked(a);
  const DecodeShape shape = ShapeOf(a.q, a.k[0], a.kv_len);
  if (a.q.numel() == 0 || DecodeTakes(shape)) return AttentionPart(a, decode);
  const bool right = ReadsRight(a.k[0], shape.dim) && ReadsRight(a.v[0], shape.dim);
  return right && PrefillTakes(shape) ? AttentionPart(a, prefill) : Reference(a);
}

}  // namespace exkv

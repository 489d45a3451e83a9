// Between torch and the kernel of causal convolutions: checks the tensors, makes the output, fills
// the params.
#pragma once

#include "../params/conv_params.h"
#include "recurrent_binding.h"

namespace exkv {

// x (B, T, C), weight (C, 1, K), bias (C,) and state (B, K - 1, C), which is changed in place, of
// one dtype; new_lens int32 (B,) -> (B, T, C).
template <typename Launch>
Tensor CausalConv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const Tensor& state, const std::optional<Tensor>& new_lens,
                  const Launch& launch) {
  const char* op = "causal_conv";
  ConvParams params{};
  params.dtype = CheckRows(op, "x", x);
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 3 && weight.size(0) == x.size(2) &&
                      weight.size(1) == 1 && weight.size(2) > 0,
                  op, ": weight must be (C, 1, K) for x (B, T, C); they are ", ShapeText(weight),
                  " and ", ShapeText(x));
  const int64_t rows = x.size(0), length = x.size(1), channels = x.size(2), taps = weight.size(2);
  CheckAlike(op, "x", x, "weight", weight);
  CheckAlike(op, "x", x, "state", state);
  STD_TORCH_CHECK(state.dim() == 3 && state.size(0) == rows && state.size(1) == taps - 1 &&
                      state.size(2) == channels,
                  op, ": state must be (B, K - 1, C), (", rows, ", ", taps - 1, ", ", channels,
                  "); it is ", ShapeText(state));
  STD_TORCH_CHECK(
      state.numel() == 0 || (state.stride(2) == 1 && (taps == 2 || state.stride(1) == channels)),
      op, ": the rows of state must be contiguous");
  if (bias) CheckAlike(op, "x", x, "bias", *bias);
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == channels), op, ": bias must be (",
                  channels, ",), a number for each channel of x ", ShapeText(x));
  const std::optional<Tensor> lens = CheckedLens(op, "x", x, new_lens);
  Tensor out = NewEmpty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Tensor inputs = InLine(x), factors = Contiguous(weight);
  const Tensor added = bias ? Contiguous(*bias) : factors;
  params.rows = rows;
  params.length = length;
  params.channels = channels;
  params.taps = taps;
  params.x = inputs.const_data_ptr();
  params.x_row = inputs.stride(0);
  params.x_token = inputs.stride(1);
  params.weight = factors.const_data_ptr();
  params.bias = bias ? added.const_data_ptr() : nullptr;
  params.new_lens = lens ? static_cast<const int32_t*>(lens->const_data_ptr()) : nullptr;
  params.state = state.mutable_data_ptr();
  params.state_row = state.stride(0);
  params.out = out.mutable_data_ptr();
  launch(params);
  return out;
}

}  // namespace exkv

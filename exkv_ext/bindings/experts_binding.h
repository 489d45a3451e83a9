// Between torch and the kernel of products with chosen experts: checks the tensors, makes the
// output and fills the params.
#pragma once

#include <vector>

#include "../params/experts_params.h"
#include "linear_binding.h"

namespace exkv {

// x (N, inputs), or (N, K, inputs), which each choice has its own of; chosen int64 (N, K).
template <typename Launch>
Tensor ExpertProducts(const Tensor& x, const Tensor& chosen, const std::vector<Tensor>& weights,
                      const Launch& launch) {
  const char* op = "expert_products";
  const auto type = KernelFloatType(x.scalar_type());
  STD_TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && chosen.dim() == 2 && type.has_value(), op,
                  ": x ", ShapeText(x), " must be (N, in) or (N, K, in) of float32, float16 or ",
                  "bfloat16, and chosen ", ShapeText(chosen), " (N, K)");
  STD_TORCH_CHECK(x.size(0) == chosen.size(0) && (x.dim() == 2 || x.size(1) == chosen.size(1)), op,
                  ": x ", ShapeText(x), " and chosen ", ShapeText(chosen), " don't fit together");
  STD_TORCH_CHECK(chosen.scalar_type() == ScalarType::Long, op, ": chosen must be int64");
  CheckSameDevice(op, "x", x, "chosen", chosen);
  STD_TORCH_CHECK(!weights.empty() && weights.size() <= static_cast<size_t>(kMostExperts), op, ": ",
                  weights.size(), " experts; there must be 1 to ", kMostExperts);
  const Tensor lined = Contiguous(x), places = Contiguous(chosen);
  ExpertsParams p{};
  p.dtype = *type;
  p.pairs = chosen.numel();
  p.taken = chosen.size(1);
  p.inputs = x.size(x.dim() - 1);
  p.x_row = p.inputs * (x.dim() == 3 ? p.taken : 1);
  p.x_choice = x.dim() == 3 ? p.inputs : 0;
  p.outputs = weights[0].dim() == 2 ? weights[0].size(0) : 0;
  p.experts = static_cast<int64_t>(weights.size());
  p.chosen = places.const_data_ptr<int64_t>();
  p.x = lined.const_data_ptr();
  const int64_t item = *type == FloatType::kFloat32 ? 4 : 2;
  bool aligned = p.inputs * item % 16 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    CheckLinear(op, x, weight, std::nullopt);
    STD_TORCH_CHECK(weight.size(0) == p.outputs && weight.is_contiguous(), op, ": expert ", i,
                    " is ", ShapeText(weight), "; all must be contiguous and have ", p.outputs,
                    " outputs");
    p.weight[i] = weight.const_data_ptr();
    aligned = aligned && reinterpret_cast<uintptr_t>(p.weight[i]) % 16 == 0;
  }
  STD_TORCH_CHECK(aligned, op, ": rows of x and weights must begin at multiples of 16 bytes");
  constexpr int64_t kMostOutputs = 1 << 18;
  STD_TORCH_CHECK(p.outputs <= kMostOutputs, op, ": ", p.outputs, " outputs; ", kMostOutputs,
                  " at most");
  Tensor out = NewEmpty(x, {chosen.size(0), p.taken, p.outputs});
  p.out = out.mutable_data_ptr();
  if (out.numel() > 0) launch(p);
  return out;
}

}  // namespace exkv

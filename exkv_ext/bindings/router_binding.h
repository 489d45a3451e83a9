// Between torch and the router of a mixture of experts: checks the tensors, makes the outputs,
// fills the params.
#pragma once

#include <optional>
#include <tuple>

#include "../cpu/router.h"
#include "binding.h"
#include "rows_binding.h"

namespace exkv {

// How experts are chosen, of `experts` of them.
struct RouterArguments {
  int64_t top_k;
  bool sigmoid;
  bool normalize;
  double min_sum;
  int64_t groups;
  int64_t top_k_groups;
  int64_t best_of_group;
  double scale;

  RouterParams Params(const std::string& op, int64_t experts) const {
    STD_TORCH_CHECK(top_k > 0 && top_k <= experts, op, ": top_k is ", top_k, ", of ", experts,
                    " experts");
    const bool equal = groups > 0 && experts % groups == 0;
    STD_TORCH_CHECK(equal && top_k_groups > 0 && top_k_groups <= groups, op, ": ", top_k_groups,
                    " of ", groups, " groups of equal size, of ", experts, " experts");
    STD_TORCH_CHECK(
        top_k_groups == groups || (best_of_group > 0 && best_of_group <= experts / groups), op,
        ": groups of ", experts / groups, " experts are judged by ", best_of_group);
    RouterParams params{};
    params.experts = experts;
    params.top_k = top_k;
    params.sigmoid = sigmoid;
    params.normalize = normalize;
    params.min_sum = static_cast<float>(min_sum);
    params.groups = groups;
    params.top_k_groups = top_k_groups;
    params.best_of_group = best_of_group;
    params.scale = static_cast<float>(scale);
    return params;
  }
};

// logits (N, E), correction float32 (E) -> int64 and float32 (N, K).
template <typename Launch>
std::tuple<Tensor, Tensor> RouteExperts(const Tensor& logits,
                                        const std::optional<Tensor>& correction,
                                        const RouterArguments& a, const Launch& launch) {
  const char* op = "route_experts";
  const FloatType dtype = CheckRows(op, "logits", logits);
  STD_TORCH_CHECK(logits.dim() == 2, op, ": logits must be (N, experts); they are ",
                  ShapeText(logits));
  RouterParams params = a.Params(op, logits.size(1));
  params.dtype = dtype;
  if (correction) {
    CheckSameDevice(op, "logits", logits, "correction", *correction);
    CheckContiguous(op, "correction", *correction, ScalarType::Float, {logits.size(1)});
    params.correction = correction->const_data_ptr<float>();
  }
  const Tensor lined = Contiguous(logits);
  params.logits = lined.const_data_ptr();
  Tensor chosen = NewEmpty(logits, {logits.size(0), a.top_k}, ScalarType::Long);
  Tensor weights = NewEmpty(logits, {logits.size(0), a.top_k}, ScalarType::Float);
  params.chosen = chosen.mutable_data_ptr<int64_t>();
  params.weights = weights.mutable_data_ptr<float>();
  if (logits.size(0) > 0) launch(params, logits.size(0));
  return {chosen, weights};
}

// x becomes its sigmoid, rounded.
inline void Sigmoid(Tensor x) {
  const char* op = "sigmoid_";
  const FloatType dtype = CheckRows(op, "x", x);
  STD_TORCH_CHECK(x.is_contiguous(), op, ": x must be contiguous, since it is overwritten");
  void* values = x.mutable_data_ptr();
  for (int64_t i = 0; i < x.numel(); ++i) {
    NarrowAt(SigmoidOf(WideAt(values, dtype, i)), dtype, values, i);
  }
}

}  // namespace exkv

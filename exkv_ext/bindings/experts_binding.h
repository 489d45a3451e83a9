// Between torch and the kernels of products with chosen experts: checks the tensors, makes the
// output and fills the params.
#pragma once

#include <vector>

#include "../params/experts_params.h"
#include "linear_groups_binding.h"
#include "linear_packed_binding.h"

namespace exkv {

// x (N, inputs), or (N, K, inputs), which each choice has its own of; chosen int64 (N, K); as many
// biases as experts, or none.
inline FloatType CheckChoice(const char* op, const Tensor& x, const Tensor& chosen, size_t experts,
                             size_t biases) {
  const auto type = KernelFloatType(x.scalar_type());
  STD_TORCH_CHECK((x.dim() == 2 || x.dim() == 3) && chosen.dim() == 2 && type.has_value(), op,
                  ": x ", ShapeText(x), " must be (N, in) or (N, K, in) of float32, float16 or ",
                  "bfloat16, and chosen ", ShapeText(chosen), " (N, K)");
  STD_TORCH_CHECK(x.size(0) == chosen.size(0) && (x.dim() == 2 || x.size(1) == chosen.size(1)), op,
                  ": x ", ShapeText(x), " and chosen ", ShapeText(chosen), " don't fit together");
  STD_TORCH_CHECK(chosen.scalar_type() == ScalarType::Long, op, ": chosen must be int64");
  CheckSameDevice(op, "x", x, "chosen", chosen);
  STD_TORCH_CHECK(experts > 0 && experts <= static_cast<size_t>(kMostExperts), op, ": ", experts,
                  " experts; there must be 1 to ", kMostExperts);
  STD_TORCH_CHECK(biases == 0 || biases == experts, op, ": ", biases, " biases for ", experts,
                  " experts; give one for each, or none");
  return *type;
}

inline const void* BiasOf(const char* op, const Tensor& x, const Tensor& bias, int64_t outputs) {
  CheckSameDevice(op, "x", x, "bias", bias);
  CheckContiguous(op, "bias", bias, x.scalar_type(), {&outputs, 1});
  return bias.const_data_ptr();
}

template <typename Launch>
Tensor ExpertProducts(const Tensor& x, const Tensor& chosen, const std::vector<Tensor>& weights,
                      const std::vector<Tensor>& biases, const Launch& launch) {
  const char* op = "expert_products";
  const FloatType type = CheckChoice(op, x, chosen, weights.size(), biases.size());
  const Tensor lined = Contiguous(x), places = Contiguous(chosen);
  ExpertsParams p{};
  p.dtype = type;
  p.pairs = chosen.numel();
  p.taken = chosen.size(1);
  p.inputs = x.size(x.dim() - 1);
  p.x_row = p.inputs * (x.dim() == 3 ? p.taken : 1);
  p.x_choice = x.dim() == 3 ? p.inputs : 0;
  p.outputs = weights[0].dim() == 2 ? weights[0].size(0) : 0;
  p.experts = static_cast<int64_t>(weights.size());
  p.chosen = places.const_data_ptr<int64_t>();
  p.x = lined.const_data_ptr();
  const int64_t item = type == FloatType::kFloat32 ? 4 : 2;
  bool aligned = p.inputs * item % 16 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    CheckLinear(op, x, weight, std::nullopt);
    STD_TORCH_CHECK(weight.size(0) == p.outputs && weight.is_contiguous(), op, ": expert ", i,
                    " is ", ShapeText(weight), "; all must be contiguous and have ", p.outputs,
                    " outputs");
    p.weight[i] = weight.const_data_ptr();
    if (!biases.empty()) p.bias[i] = BiasOf(op, x, biases[i], p.outputs);
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

// Whether kernels on tensor cores choose among matrices of this layout.
inline bool AreChosenOnDevice(const std::vector<int64_t>& layout) {
  if (layout.size() != 4 || layout[0] > 0) return layout.size() == 4;
  if (layout[0] == -2) return layout[2] >= 0 && (layout[2] & (layout[2] - 1)) == 0;
  return layout[0] == -5 || (layout[0] == -1 && !PackedTensors::IsOfPoints(layout));
}

// The parts of a matrix in the order of ChosenMatrix.
inline void SetParts(const GroupsMatrix& m, const void* (&parts)[kMatrixParts]) {
  parts[0] = m.codes;
  parts[1] = m.scale;
  parts[2] = m.shift;
  parts[3] = m.order;
}
inline void SetParts(const PackedMatrix& m, const void* (&parts)[kMatrixParts]) {
  parts[0] = m.rows;
  parts[1] = m.scale;
}

// One launch serves all experts, so what isn't an address must be alike.
inline void CheckAlike(const char* op, size_t expert, const GroupsMatrix& a,
                       const GroupsMatrix& b) {
  STD_TORCH_CHECK(a.scale_type == b.scale_type, op, ": expert ", expert,
                  "'s scales are of another type than the first one's");
}
inline void CheckAlike(const char* op, size_t expert, const PackedMatrix& a,
                       const PackedMatrix& b) {
  STD_TORCH_CHECK(a.scale_type == b.scale_type && a.high == b.high && a.wide == b.wide, op,
                  ": expert ", expert, "'s scales are others than the first one's");
}

// Matrices of weights in few bits, `each` tensors of every expert; matrix(tensors) checks them.
// launch(x, params, choice, taken) has the params of the first of them.
template <typename Params, typename Matrix, typename Launch>
Tensor ChosenProducts(const Tensor& x, const Tensor& chosen, const std::vector<Tensor>& tensors,
                      size_t each, int64_t outputs, const std::vector<Tensor>& biases,
                      const Matrix& matrix, const Launch& launch) {
  const char* op = "chosen_products";
  const size_t experts = tensors.size() / each;
  ChoiceParams choice{};
  choice.dtype = CheckChoice(op, x, chosen, experts, biases.size());
  STD_TORCH_CHECK(tensors.size() % each == 0, op, ": ", tensors.size(),
                  " tensors, and a matrix of this layout has ", each);
  Params p{};
  for (size_t i = 0; i < experts; ++i) {
    const auto m = matrix(tensors.data() + i * each);
    CheckSameDevice(op, "x", x, "weight", tensors[i * each]);
    STD_TORCH_CHECK(m.outputs == outputs && m.inputs == x.size(x.dim() - 1), op, ": expert ", i,
                    " has ", m.outputs, " outputs and ", m.inputs, " inputs; x ", ShapeText(x),
                    " ends in those, and all have ", outputs, " outputs");
    if (i == 0) p.matrix = m;
    CheckAlike(op, i, p.matrix, m);
    SetParts(m, choice.parts[i]);
    if (!biases.empty()) choice.bias[i] = BiasOf(op, x, biases[i], outputs);
  }
  const Tensor lined = Aligned(x), places = Contiguous(chosen);
  Tensor out = NewEmpty(x, {chosen.size(0), chosen.size(1), outputs});
  if (out.numel() == 0) return out;
  choice.pairs = chosen.numel();
  choice.outputs = outputs;
  choice.experts = static_cast<int64_t>(experts);
  choice.chosen = places.const_data_ptr<int64_t>();
  choice.out = out.mutable_data_ptr();
  const int64_t bytes = choice.pairs * static_cast<int64_t>(sizeof(ChosenMatrix));
  Tensor found = NewEmpty(x, {bytes}, ScalarType::Byte);
  choice.found = static_cast<ChosenMatrix*>(found.mutable_data_ptr());
  p.dtype = choice.dtype;
  p.rows = choice.pairs;
  p.out = choice.out;
  launch(lined.const_data_ptr(), p, &choice, x.dim() == 3 ? 1 : chosen.size(1));
  return out;
}

// The reference, as LinearPackedReference.
inline Tensor ChosenProductsReference(const Tensor& x, const Tensor& chosen,
                                      const std::vector<Tensor>& tensors, int64_t format,
                                      const std::vector<int64_t>& layout, int64_t outputs,
                                      const std::vector<Tensor>& biases) {
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(x),      from(chosen),  from(tensors), from(format),
                                    from(layout), from(outputs), from(biases)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("exkv::chosen_products_reference", "", stack.data(),
                                               TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace exkv

// Between torch and the kernels for weights in integer groups: checks the tensors, makes the output
// and fills the params. What the tensors are: exkv/ops/weight_groups.py.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/linear_groups.h"
#include "linear_binding.h"

namespace exkv {

// The tensors of one matrix, as the op's layout says how they lie.
class GroupsTensors {
 public:
  GroupsTensors(std::string name, const Tensor* tensors, const std::vector<int64_t>& layout)
      : name_(std::move(name)), tensors_(tensors) {
    STD_TORCH_CHECK(layout.size() == 4, name_, ": the layout is ", layout.size(),
                    " numbers, and must be 4: bits, group, shift, ordered");
    bits_ = layout[0];
    group_ = layout[1];
    STD_TORCH_CHECK((bits_ >= 2 && bits_ <= 6) || bits_ == 8, name_, ": codes of ", bits_,
                    " bits; they must have 2 to 6, or 8");
    STD_TORCH_CHECK(group_ >= 0 && group_ % kGroupsChunk == 0, name_, ": groups of ", group_,
                    " inputs must be of a multiple of ", kGroupsChunk, ", or 0 for all");
    STD_TORCH_CHECK(layout[2] >= 0 && layout[2] <= 2, name_, ": shift is ", layout[2],
                    "; it must be 0, 1 or 2");
    beside_ = static_cast<GroupsShift>(layout[2]);
    ordered_ = layout[3] != 0;
  }

  static size_t Count(const std::vector<int64_t>& layout) {
    STD_TORCH_CHECK(layout.size() == 4, "a layout of groups is ", layout.size(),
                    " numbers, and must be 4: bits, group, shift, ordered");
    return 2 + (layout[2] != 0 ? 1 : 0) + (layout[3] != 0 ? 1 : 0);
  }

  // Contiguous tensors of the right types and shapes, on one device.
  GroupsMatrix Matrix() const {
    const Tensor &codes = tensors_[0], &scale = tensors_[1];
    STD_TORCH_CHECK(codes.dim() == 3 && scale.dim() == 2 && codes.size(1) > 0, name_, ": codes ",
                    ShapeText(codes),
                    " must have 3 dimensions, the second of 1 or more, and scale ",
                    ShapeText(scale), " 2");
    GroupsMatrix m{};
    m.bits = bits_;
    m.beside = beside_;
    m.inputs = codes.size(1) * kGroupsChunk;
    m.outputs = scale.size(0);
    m.group = group_ == 0 ? m.inputs : group_;
    m.groups = (m.inputs + m.group - 1) / m.group;
    Check("codes", codes, ScalarType::Byte, {m.blocks(), m.chunks(), kGroupsChunk * bits_});
    m.scale_type = CheckFloats(name_, "scale", scale.scalar_type());
    Check("scale", scale, scale.scalar_type(), {m.outputs, m.groups});
    m.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
    m.scale = scale.const_data_ptr();
    if (beside_ == GroupsShift::kOffset) {
      Check("offset", tensors_[2], scale.scalar_type(), {m.outputs, m.groups});
    }
    if (beside_ == GroupsShift::kZero) {
      Check("zero", tensors_[2], ScalarType::Byte, {m.outputs, m.zero_bytes()});
    }
    if (beside_ != GroupsShift::kSymmetric) m.shift = tensors_[2].const_data_ptr();
    if (!ordered_) return m;
    const Tensor& order = tensors_[beside_ == GroupsShift::kSymmetric ? 2 : 3];
    Check("order", order, ScalarType::Int, {m.inputs});
    m.order = order.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < m.inputs && order.is_cpu(); ++i) {
      STD_TORCH_CHECK(m.order[i] >= 0 && m.order[i] < m.inputs, name_, ": order names input ",
                      m.order[i], " of ", m.inputs);
    }
    return m;
  }

 private:
  void Check(const char* part, const Tensor& x, ScalarType dtype, Sizes shape) const {
    CheckSameDevice(name_.c_str(), "codes", tensors_[0], part, x);
    CheckContiguous(name_.c_str(), part, x, dtype, shape);
  }

  std::string name_;
  const Tensor* tensors_;
  int64_t bits_;
  int64_t group_;
  GroupsShift beside_;
  bool ordered_;
};

inline GroupsMatrix MatrixOf(const char* op, const std::vector<Tensor>& tensors,
                             const std::vector<int64_t>& layout, size_t index) {
  const size_t each = GroupsTensors::Count(layout);
  STD_TORCH_CHECK(tensors.size() >= (index + 1) * each, op, ": ", tensors.size(),
                  " tensors, and a matrix of this layout has ", each);
  return GroupsTensors(op, tensors.data() + index * each, layout).Matrix();
}

inline void CheckGroupsInput(const char* op, const Tensor& x, const Tensor& codes,
                             const GroupsMatrix& m, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == m.inputs, op, ": x ", ShapeText(x),
                  " must end in ", m.inputs, ", the weight's inputs");
  CheckFloats(op, "x", x.scalar_type());
  CheckSameDevice(op, "x", x, "codes", codes);
  if (!bias.has_value()) return;
  CheckSameDevice(op, "x", x, "bias", *bias);
  STD_TORCH_CHECK(
      bias->dim() == 1 && bias->size(0) == m.outputs && bias->scalar_type() == x.scalar_type(), op,
      ": bias ", ShapeText(*bias), " of ", torch::headeronly::toString(bias->scalar_type()),
      " must have one entry of x's type for each of the weight's ", m.outputs, " outputs");
}

// A call's matrices, which are of one layout: launch(x, params) fills the outputs, where there is
// something to compute; their `input` is its own.
template <typename Launch>
std::vector<Tensor> LinearsGroups(const char* op, const Tensor& x,
                                  const std::vector<Tensor>& tensors,
                                  const std::vector<int64_t>& layout,
                                  const std::vector<std::optional<Tensor>>& biases,
                                  const Launch& launch) {
  const Tensor lined = Contiguous(x);
  std::vector<Tensor> outs, held;
  std::vector<GroupsParams> layers;
  for (size_t i = 0; i < biases.size(); ++i) {
    GroupsParams p{};
    p.matrix = MatrixOf(op, tensors, layout, i);
    CheckGroupsInput(op, x, tensors[i * GroupsTensors::Count(layout)], p.matrix, biases[i]);
    p.dtype = *KernelFloatType(x.scalar_type());
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = p.matrix.outputs;
    outs.push_back(NewEmpty(x, {shape.data(), shape.size()}));
    p.rows = 1;
    for (int64_t d = 0; d + 1 < x.dim(); ++d) p.rows *= x.size(d);
    if (biases[i]) {
      held.push_back(Contiguous(*biases[i]));
      p.bias = held.back().const_data_ptr();
    }
    p.out = outs.back().mutable_data_ptr();
    if (outs.back().numel() > 0) layers.push_back(p);
  }
  if (!layers.empty()) launch(lined.const_data_ptr(), layers);
  return outs;
}

// With a bias for each matrix, or none at all.
template <typename Launch>
std::vector<Tensor> LinearsGroups(const Tensor& x, const std::vector<Tensor>& tensors,
                                  const std::vector<int64_t>& layout,
                                  const std::vector<Tensor>& biases, const Launch& launch) {
  const size_t each = GroupsTensors::Count(layout), count = tensors.size() / each;
  STD_TORCH_CHECK(tensors.size() % each == 0 && (biases.empty() || biases.size() == count),
                  "linears_groups: ", tensors.size(), " tensors of ", each, " a matrix and ",
                  biases.size(), " biases; give one for each matrix, or none");
  std::vector<std::optional<Tensor>> added(count);
  for (size_t i = 0; i < biases.size(); ++i) added[i] = biases[i];
  return LinearsGroups("linears_groups", x, tensors, layout, added, launch);
}

template <typename Launch>
Tensor DequantizeWeight(const std::vector<Tensor>& tensors, const std::vector<int64_t>& layout,
                        int64_t begin, int64_t end, ScalarType dtype, const Launch& launch) {
  const char* op = "dequantize_weight";
  const GroupsMatrix m = MatrixOf(op, tensors, layout, 0);
  STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= m.outputs && begin % kGroupsBlock == 0, op,
                  ": rows ", begin, " to ", end, " of ", m.outputs,
                  "; the first must be a multiple of ", kGroupsBlock);
  return DequantizedRows(op, tensors[0], m, end - begin, dtype, launch);
}

// The references are ops of their own (exkv/ops/registry.py), reached through torch's dispatcher.
inline Tensor LinearGroupsPromptReference(const Tensor& x, const std::vector<Tensor>& tensors,
                                          const std::vector<int64_t>& layout,
                                          const std::optional<Tensor>& bias, int64_t bits) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(x), from(tensors), from(layout), from(bias), from(bits)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("exkv::linear_groups_prompt_reference", "",
                                               stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor DequantizeWeightReference(const std::vector<Tensor>& tensors,
                                        const std::vector<int64_t>& layout, int64_t begin,
                                        int64_t end, ScalarType dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(tensors), from(layout), from(begin), from(end),
                                    from(dtype)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("exkv::dequantize_weight_reference", "",
                                               stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace exkv

// Between torch and the kernels for weights in sections of inputs of unlike bits: checks the
// tensors. What they are: exkv/weights/exl2.py.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "linear_groups_binding.h"

namespace exkv {

// The tensors of one matrix. A layout is -4, outputs, how many sections there are and 0, then bits,
// group and inputs of each.
class SectionTensors {
 public:
  static constexpr int64_t kMark = -4;
  static constexpr size_t kTensors = 4;

  SectionTensors(std::string name, const Tensor* tensors, const std::vector<int64_t>& layout)
      : name_(std::move(name)), tensors_(tensors), layout_(layout) {}

  static bool IsSections(const std::vector<int64_t>& layout) {
    return !layout.empty() && layout[0] == kMark;
  }

  // Numbers of a layout that begins like this.
  static size_t Numbers(const int64_t* layout) {
    STD_TORCH_CHECK(layout[2] >= 1 && layout[2] <= kMostSections, "a layout of ", layout[2],
                    " sections; there must be 1 to ", kMostSections);
    return 4 + 3 * static_cast<size_t>(layout[2]);
  }

  // Contiguous tensors of the right types and shapes, on one device.
  GroupsMatrix Matrix() const {
    STD_TORCH_CHECK(layout_.size() >= 4 && layout_.size() == Numbers(layout_.data()), name_,
                    ": a layout of sections is 4 numbers and 3 of each, not ", layout_.size());
    GroupsMatrix m{};
    m.outputs = layout_[1];
    STD_TORCH_CHECK(m.outputs >= 0 && m.outputs < kMost, name_, ": ", m.outputs, " outputs");
    m.section_count = layout_[2];
    int64_t groups = 0;
    for (int64_t i = 0; i < m.section_count; ++i) {
      const int64_t* numbers = layout_.data() + 4 + 3 * i;
      const GroupsSection section{numbers[0], numbers[1], numbers[2]};
      const bool known = (section.bits >= 2 && section.bits <= 6) || section.bits == 8;
      const bool whole = section.group > 0 && section.group % kGroupsChunk == 0 &&
                         section.inputs > 0 && section.inputs % kGroupsChunk == 0;
      STD_TORCH_CHECK(known && whole && section.group < kMost && section.inputs < kMost, name_,
                      ": there are no sections of ", section.inputs, " inputs of ", section.bits,
                      " bits in groups of ", section.group);
      m.sections[i] = section;
      m.inputs += section.inputs;
      groups += section.groups();
    }
    m.nibble_words = m.blocks();
    Check("codes", 0, ScalarType::Byte, {m.blocks(), m.block_bytes()});
    Check("scale", 1, ScalarType::Int, {groups, m.nibble_words});
    Check("largest", 2, ScalarType::Half, {groups});
    Check("order", 3, ScalarType::Int, {m.inputs});
    m.codes = static_cast<const uint8_t*>(tensors_[0].const_data_ptr());
    m.nibbles = static_cast<const uint32_t*>(tensors_[1].const_data_ptr());
    m.largest = static_cast<const uint16_t*>(tensors_[2].const_data_ptr());
    m.order = tensors_[3].const_data_ptr<int32_t>();
    for (int64_t i = 0; i < m.inputs && tensors_[3].is_cpu(); ++i) {
      STD_TORCH_CHECK(m.order[i] >= 0 && m.order[i] < m.inputs, name_, ": order names input ",
                      m.order[i], " of ", m.inputs);
    }
    return m;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 32;

  void Check(const char* part, size_t index, ScalarType dtype, Sizes shape) const {
    CheckSameDevice(name_.c_str(), "codes", tensors_[0], part, tensors_[index]);
    CheckContiguous(name_.c_str(), part, tensors_[index], dtype, shape);
  }

  std::string name_;
  const Tensor* tensors_;
  const std::vector<int64_t>& layout_;
};

inline GroupsMatrix SectionsOf(const char* op, const std::vector<Tensor>& tensors,
                               const std::vector<int64_t>& layout) {
  STD_TORCH_CHECK(tensors.size() == SectionTensors::kTensors, op, ": ", tensors.size(),
                  " tensors, and a matrix in sections has ", SectionTensors::kTensors);
  return SectionTensors(op, tensors.data(), layout).Matrix();
}

// CUDA kernels load codes and the order in pieces of so many bytes.
inline void CheckSectionsAligned(const GroupsMatrix& m) {
  for (const void* part : {static_cast<const void*>(m.codes), static_cast<const void*>(m.order)}) {
    STD_TORCH_CHECK(
        reinterpret_cast<uintptr_t>(part) % 16 == 0,
        "linear_packed: codes and order must begin at a multiple of 16 bytes; copy them");
  }
}

// exkv::linear_packed of a matrix in sections.
template <typename Launch>
Tensor LinearSections(const Tensor& x, const std::vector<Tensor>& tensors,
                      const std::vector<int64_t>& layout, int64_t outputs,
                      const std::optional<Tensor>& bias, const Launch& launch) {
  const char* op = "linear_packed";
  GroupsParams p{};
  p.matrix = SectionsOf(op, tensors, layout);
  STD_TORCH_CHECK(outputs == p.matrix.outputs, op, ": ", outputs, " outputs of ", p.matrix.outputs);
  CheckGroupsInput(op, x, tensors[0], p.matrix, bias);
  p.dtype = *KernelFloatType(x.scalar_type());
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor out = NewEmpty(x, {shape.data(), shape.size()});
  p.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) p.rows *= x.size(d);
  std::optional<Tensor> added;
  if (bias) {
    added = Contiguous(*bias);
    p.bias = added->const_data_ptr();
  }
  p.out = out.mutable_data_ptr();
  std::vector<GroupsParams> layers{p};
  if (out.numel() > 0) launch(Contiguous(x).const_data_ptr(), layers);
  return out;
}

// exkv::dequantize_packed of such a matrix.
template <typename Launch>
Tensor DequantizeSections(const std::vector<Tensor>& tensors, const std::vector<int64_t>& layout,
                          int64_t inputs, int64_t begin, int64_t end, ScalarType dtype,
                          const Launch& launch) {
  const char* op = "dequantize_packed";
  const GroupsMatrix m = SectionsOf(op, tensors, layout);
  STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= m.outputs && m.inputs == inputs, op,
                  ": rows ", begin, " to ", end, " of ", inputs, " inputs, of a matrix of ",
                  m.outputs, " and ", m.inputs);
  return DequantizedRows(op, tensors[0], m, end - begin, dtype, launch);
}

}  // namespace exkv

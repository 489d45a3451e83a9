// Between torch and the kernels for rows that are packed as checkpoints have them: checks the
// tensors, makes the output and fills the params. What the tensors are: exkv/weights/tiles.py.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/linear_packed.h"
#include "linear_binding.h"

namespace exkv {

// The tensors of one matrix, as a layout of four numbers says how they lie.
class PackedTensors {
 public:
  PackedTensors(std::string name, const Tensor* tensors, const std::vector<int64_t>& layout)
      : name_(std::move(name)), tensors_(tensors), layout_(layout) {}

  static bool IsPacked(const std::vector<int64_t>& layout) { return layout[0] < 0; }
  static bool IsTrellis(const std::vector<int64_t>& layout) {
    return layout[0] == -1 - static_cast<int64_t>(Packing::kTrellis);
  }

  // Whether weights are integers times scales.
  static bool AreIntegers(const std::vector<int64_t>& layout) {
    return layout.size() == 4 && (layout[0] == -1 - static_cast<int64_t>(Packing::kGgml) ||
                                  layout[0] == -1 - static_cast<int64_t>(Packing::kFloat4));
  }

  // ggml's types of points, for which CUDA has no kernels.
  static bool IsOfPoints(const std::vector<int64_t>& layout) {
    return layout.size() > 1 && layout[0] == -1 && exkv::IsOfPoints(GgmlType(layout[1]));
  }

  static size_t Count(const std::vector<int64_t>& layout) {
    CheckLayout("a layout of packed rows", layout);
    switch (static_cast<Packing>(-layout[0] - 1)) {
      case Packing::kGgml:
      case Packing::kTrellis:
        return 1;
      case Packing::kTable:
        return layout[2] != 0 ? 6 : 3;
      default:
        return 2;
    }
  }

  // Contiguous tensors of the right types and shapes, on one device; the first `outputs` rows.
  PackedMatrix Matrix(int64_t outputs) const {
    CheckLayout(name_, layout_);
    PackedMatrix m{};
    m.packing = static_cast<Packing>(-layout_[0] - 1);
    if (m.packing == Packing::kTrellis) return Trellis(m, outputs);
    const Tensor& rows = tensors_[0];
    STD_TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous(), name_, ": weight ", ShapeText(rows),
                    rows.is_contiguous() ? "" : ", not contiguous", ", must have 2 dimensions");
    STD_TORCH_CHECK(outputs >= 0 && outputs <= rows.size(0), name_, ": ", outputs, " outputs of ",
                    rows.size(0));
    m.outputs = outputs;
    m.row_bytes = rows.size(1);
    m.rows = static_cast<const uint8_t*>(rows.const_data_ptr());
    if (m.packing == Packing::kGgml) SetGgml(&m);
    if (m.packing == Packing::kFloat8) SetFloat8(&m);
    if (m.packing == Packing::kTable) SetTable(&m);
    if (m.packing == Packing::kFloat4) SetFloat4(&m);
    return m;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 40;  // weights that share a scale

  static void CheckLayout(const std::string& name, const std::vector<int64_t>& layout) {
    const bool known = layout.size() == 4 && layout[0] >= -6 && layout[0] <= -1 && layout[0] != -4;
    STD_TORCH_CHECK(known, name,
                    ": a layout is 4 numbers, of which the first is -1, -2, -3, -5 or -6");
  }

  void SetGgml(PackedMatrix* m) const {
    m->type = static_cast<GgmlType>(layout_[1]);
    const GgmlSize size = SizeOf(m->type);
    STD_TORCH_CHECK(size.bytes > 0, name_, ": ggml's type ", layout_[1], " has no kernel");
    CheckRows(ScalarType::Byte);
    STD_TORCH_CHECK(m->row_bytes > 0 && m->row_bytes % size.bytes == 0, name_, ": rows of ",
                    m->row_bytes, " bytes are no blocks of ", size.bytes);
    m->inputs = m->row_bytes / size.bytes * size.weights;
  }

  void SetFloat8(PackedMatrix* m) const {
    CheckRows(ScalarType::Float8_e4m3fn);
    m->inputs = m->row_bytes;
    CheckInputs(*m);
    m->high = layout_[1] == 0 ? std::max<int64_t>(tensors_[0].size(0), 1) : layout_[1];
    m->wide = layout_[2] == 0 ? m->inputs : layout_[2];
    STD_TORCH_CHECK(m->high > 0 && m->wide > 0 && m->wide % kPackedChunk == 0 &&
                        std::max(m->high, m->wide) < kMost,
                    name_, ": scales of ", m->high, " x ", m->wide,
                    " weights must be of a multiple of ", kPackedChunk, " inputs");
    const Tensor& scale = tensors_[1];
    switch (scale.scalar_type()) {
      case ScalarType::Float:
        m->scale_type = ScaleType::kFloat32;
        break;
      case ScalarType::Half:
        m->scale_type = ScaleType::kFloat16;
        break;
      case ScalarType::BFloat16:
        m->scale_type = ScaleType::kBFloat16;
        break;
      default:
        m->scale_type = ScaleType::kPowers;
    }
    const ScalarType type =
        m->scale_type == ScaleType::kPowers ? ScalarType::Byte : scale.scalar_type();
    const int64_t rows = tensors_[0].size(0);
    const int64_t shape[2] = {(rows + m->high - 1) / m->high, (m->inputs + m->wide - 1) / m->wide};
    Check("scale", scale, type, {shape, 2});
    m->scale = scale.const_data_ptr();
  }

  void SetTable(PackedMatrix* m) const {
    CheckRows(ScalarType::Byte);
    m->inputs = 2 * m->row_bytes;
    CheckInputs(*m);
    m->block = layout_[1];
    STD_TORCH_CHECK(
        m->block >= kPackedChunk && m->block < kMost && (m->block & (m->block - 1)) == 0, name_,
        ": blocks of ", m->block, " weights must be of a power of two, ", kPackedChunk, " or more");
    const bool nested = layout_[2] != 0;
    const int64_t blocks = Ceil(tensors_[0].size(0) * m->inputs, m->block);
    Check("absmax", tensors_[1], nested ? ScalarType::Byte : ScalarType::Float, {&blocks, 1});
    m->magnitudes = tensors_[1].const_data_ptr();
    m->table = Floats("quant_map", 2, 16);
    if (!nested) return;
    m->nested = Floats("nested_absmax", 3, Ceil(blocks, 256));
    m->nested_table = Floats("nested_quant_map", 4, 256);
    m->offset = Floats("nested_offset", 5, 1);
  }

  void SetFloat4(PackedMatrix* m) const {
    CheckRows(ScalarType::Byte);
    m->inputs = 2 * m->row_bytes;
    CheckInputs(*m);
    m->scale_type = ScaleType::kPowers;
    const int64_t shape[2] = {tensors_[0].size(0), m->chunks()};
    Check("scales", tensors_[1], ScalarType::Byte, {shape, 2});
    m->scale = tensors_[1].const_data_ptr();
  }

  PackedMatrix Trellis(PackedMatrix m, int64_t outputs) const {
    const Tensor& tiles = tensors_[0];
    m.words = layout_[1];
    STD_TORCH_CHECK(
        m.words >= 16 && m.words <= 128 && m.words % 8 == 0 && layout_[2] >= 0 && layout_[2] <= 2,
        name_, ": tiles of ", m.words, " words with codebook ", layout_[2],
        "; there are 16 to 128, multiples of 8, and codebooks 0 to 2");
    m.codebook = static_cast<Codebook>(layout_[2]);
    STD_TORCH_CHECK(tiles.dim() == 3 && tiles.size(2) == m.words, name_, ": trellis ",
                    ShapeText(tiles), " must have 3 dimensions, the last of ", m.words);
    CheckContiguous(name_.c_str(), "trellis", tiles, ScalarType::Short, tiles.sizes());
    STD_TORCH_CHECK(outputs >= 0 && outputs <= kTrellisTile * tiles.size(0), name_, ": ", outputs,
                    " outputs of ", kTrellisTile * tiles.size(0));
    m.outputs = outputs;
    m.inputs = kTrellisTile * tiles.size(1);
    CheckInputs(m);
    m.row_bytes = m.inputs * m.words / 128;
    m.rows = static_cast<const uint8_t*>(tiles.const_data_ptr());
    return m;
  }

  static int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

  const float* Floats(const char* part, size_t index, int64_t count) const {
    Check(part, tensors_[index], ScalarType::Float, {&count, 1});
    return tensors_[index].const_data_ptr<float>();
  }

  void CheckRows(ScalarType type) const { Check("weight", tensors_[0], type, tensors_[0].sizes()); }

  void CheckInputs(const PackedMatrix& m) const {
    STD_TORCH_CHECK(m.inputs > 0 && m.inputs % kPackedChunk == 0, name_, ": ", m.inputs,
                    " inputs are no multiple of ", kPackedChunk);
  }

  void Check(const char* part, const Tensor& x, ScalarType dtype, Sizes shape) const {
    CheckSameDevice(name_.c_str(), "weight", tensors_[0], part, x);
    CheckContiguous(name_.c_str(), part, x, dtype, shape);
  }

  std::string name_;
  const Tensor* tensors_;
  const std::vector<int64_t>& layout_;
};

inline PackedMatrix PackedMatrixOf(const char* op, const std::vector<Tensor>& tensors,
                                   const std::vector<int64_t>& layout, int64_t outputs) {
  const size_t expected = PackedTensors::Count(layout);
  STD_TORCH_CHECK(tensors.size() == expected, op, ": ", tensors.size(),
                  " tensors, and a matrix of this layout has ", expected);
  return PackedTensors(op, tensors.data(), layout).Matrix(outputs);
}

// The references, which are ops of their own (exkv/ops/registry.py), reached through torch's
// dispatcher; `format` is the number of its name.
inline Tensor LinearPackedReference(const Tensor& x, const std::vector<Tensor>& tensors,
                                    int64_t format, const std::vector<int64_t>& layout,
                                    int64_t outputs, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(x),      from(tensors), from(format),
                                    from(layout), from(outputs), from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("exkv::linear_packed_reference", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor LinearPackedPromptReference(const Tensor& x, const std::vector<Tensor>& tensors,
                                          int64_t format, const std::vector<int64_t>& layout,
                                          int64_t outputs, const std::optional<Tensor>& bias,
                                          int64_t bits) {
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(x),       from(tensors), from(format), from(layout),
                                    from(outputs), from(bias),    from(bits)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("exkv::linear_packed_prompt_reference", "",
                                               stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor DequantizePackedReference(const std::vector<Tensor>& tensors, int64_t format,
                                        const std::vector<int64_t>& layout, int64_t inputs,
                                        int64_t begin, int64_t end, ScalarType dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(tensors), from(format), from(layout), from(inputs),
                                    from(begin),   from(end),    from(dtype)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("exkv::dequantize_packed_reference", "",
                                               stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// launch(x, params) fills the output, where there is something to compute; their `input` is its
// own.
template <typename Launch>
Tensor LinearPacked(const char* op, const Tensor& x, const std::vector<Tensor>& tensors,
                    const std::vector<int64_t>& layout, int64_t outputs,
                    const std::optional<Tensor>& bias, const Launch& launch) {
  PackedParams p{};
  p.matrix = PackedMatrixOf(op, tensors, layout, outputs);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == p.matrix.inputs, op, ": x ", ShapeText(x),
                  " must end in ", p.matrix.inputs, ", the weight's inputs");
  p.dtype = CheckFloats(op, "x", x.scalar_type());
  CheckSameDevice(op, "x", x, "weight", tensors[0]);
  std::optional<Tensor> added;
  if (bias) {
    CheckSameDevice(op, "x", x, "bias", *bias);
    STD_TORCH_CHECK(
        bias->dim() == 1 && bias->size(0) == outputs && bias->scalar_type() == x.scalar_type(), op,
        ": bias ", ShapeText(*bias), " of ", torch::headeronly::toString(bias->scalar_type()),
        " must have one entry of x's type for each of ", outputs, " outputs");
    added = Contiguous(*bias);
    p.bias = added->const_data_ptr();
  }
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor out = NewEmpty(x, {shape.data(), shape.size()});
  p.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) p.rows *= x.size(d);
  p.out = out.mutable_data_ptr();
  if (out.numel() > 0) launch(Contiguous(x).const_data_ptr(), p);
  return out;
}

// Kernels load rows in pieces of so many bytes.
inline void CheckAligned(const PackedMatrix& matrix, int64_t bytes) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(matrix.rows) % static_cast<uintptr_t>(bytes) == 0,
                  "linear_packed: rows must begin at a multiple of ", bytes, " bytes; copy them");
}

template <typename Launch>
Tensor DequantizePacked(const std::vector<Tensor>& tensors, const std::vector<int64_t>& layout,
                        int64_t inputs, int64_t begin, int64_t end, ScalarType dtype,
                        const Launch& launch) {
  const char* op = "dequantize_packed";
  STD_TORCH_CHECK(begin >= 0 && begin <= end, op, ": rows ", begin, " to ", end);
  const PackedMatrix m = PackedMatrixOf(op, tensors, layout, end);
  STD_TORCH_CHECK(m.inputs == inputs, op, ": rows have ", m.inputs, " inputs, not ", inputs);
  return DequantizedRows(op, tensors[0], m, end - begin, dtype, launch);
}

}  // namespace exkv

// What the bindings of ops over stores of keys and values share: a store's tensors, checked against
// its format, and block tables. Formats and their names: exkv/ops/kv_formats.py.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "attention_binding.h"

namespace exkv {

// The text behind a handle, which it gives back. torch's own way to a std::string (2.11 to 2.13)
// never frees the one that it makes.
inline std::string TakeText(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// After the reference of an op was asked for a format that the kernels don't know. Its own words
// are lost on the way here.
inline void CheckHandedOn(AOTITorchError code, const char* op, const std::string& k_format,
                          const std::string& v_format) {
  const bool k = FindKvFormat(k_format) == nullptr;
  STD_TORCH_CHECK(code == AOTI_TORCH_SUCCESS, op, ": ", k ? "k" : "v", "_format is '",
                  k ? k_format : v_format, "', which the kernels don't know (they know ",
                  KvFormatNames(kGroup), "), and the reference didn't take it or its tensors");
}

// What a store is checked beside: keys or queries (B, T, heads, D) of an op.
struct StoreUse {
  const char* op;
  const char* beside_name;
  const Tensor& beside;
  const char* rows;  // in words: how many the store may have
  bool paged;
};

// One store: its tensors, checked against their format, which the kernels know.
class KvStore {
 public:
  KvStore(const StoreUse& use, std::string name, const std::string& format,
          const std::vector<Tensor>& tensors)
      : use_(use),
        name_(std::move(name)),
        format_name_(format),
        format_(FindKvFormat(format)->format) {
    const size_t wanted = TraitsOf(format_).tensors;
    bool right = tensors.size() == wanted;
    for (const Tensor& tensor : tensors) right = right && tensor.dim() == 4;
    STD_TORCH_CHECK(right, use_.op, ": ", name_, " must be ", wanted, " tensors (", use_.rows,
                    ", S, H_kv, ...) to be ", format_name_, "; it is ", tensors.size(), " tensors",
                    Shapes(tensors));
    rows_ = tensors[0].size(0);
    tokens_ = tensors[0].size(1);
    heads_ = tensors[0].size(2);
    if (use_.paged) CheckPage();
  }

  // Each tensor as the format lays out so many tokens and heads: exactly, or with entries to spare.
  void CheckLayout(const std::vector<Tensor>& tensors, ScalarType floats, int64_t tokens,
                   int64_t heads, bool exact) const {
    const bool by_channel = IsByChannel(format_);
    const int64_t dim = use_.beside.size(3);
    const int64_t entries = by_channel ? NumGroups(tokens) : tokens;
    const int64_t scales = by_channel ? dim : NumGroups(dim);
    const Shape values{rows_, tokens, heads, ValuesOf(dim)};
    CheckTensor("", tensors[0], TypeOfValues(floats), values, exact);
    const Shape groups{rows_, entries, heads, scales};
    if (tensors.size() > 1) CheckTensor("'s scale", tensors[1], ScalarType::Half, groups, exact);
    if (tensors.size() > 2) CheckTensor("'s offset", tensors[2], ScalarType::Half, groups, exact);
  }

  KvFormat format() const { return format_; }
  int64_t rows() const { return rows_; }  // or pages
  int64_t tokens() const { return tokens_; }
  int64_t heads() const { return heads_; }

 private:
  using Shape = std::array<int64_t, 4>;

  static std::string Shapes(const std::vector<Tensor>& tensors) {
    std::string text;
    for (const Tensor& tensor : tensors) text += " " + ShapeText(tensor);
    return text;
  }

  void CheckPage() const {
    STD_TORCH_CHECK(tokens_ > 0 && tokens_ % kPageStep == 0, use_.op, ": ", name_, " has pages of ",
                    tokens_, " tokens; they must be a multiple of ", kPageStep);
    STD_TORCH_CHECK(!IsByChannel(format_) || tokens_ % kGroup == 0, use_.op, ": ", name_,
                    " has pages of ", tokens_, " tokens, and ", format_name_, " encodes ", kGroup,
                    " together; make pages a multiple of that");
  }

  // Entries of the values' last dimension for so many values.
  int64_t ValuesOf(int64_t dim) const {
    return format_ == KvFormat::kFloat ? dim : (dim * TraitsOf(format_).bits + 7) / 8;
  }

  ScalarType TypeOfValues(ScalarType floats) const {
    return format_ == KvFormat::kFloat  ? floats
           : format_ == KvFormat::kInt8 ? ScalarType::Char
                                        : ScalarType::Byte;
  }

  void CheckTensor(const char* part, const Tensor& x, ScalarType dtype, const Shape& shape,
                   bool exact) const {
    const bool roomy = exact ? x.size(1) == shape[1] : x.size(1) >= shape[1];
    const bool fits = x.scalar_type() == dtype && x.size(0) == shape[0] && roomy &&
                      x.size(2) == shape[2] && x.size(3) == shape[3];
    if (fits && x.device() == use_.beside.device() && x.stride(3) == 1) return;
    const std::string label = name_ + part;  // which takes longer than all that is above
    CheckSameDevice(use_.op, use_.beside_name, use_.beside, label.c_str(), x);
    STD_TORCH_CHECK(fits, use_.op, ": ", label, " must be ", torch::headeronly::toString(dtype),
                    " ", SizesText({shape.data(), shape.size()}),
                    exact ? "" : ", or have more than " + std::to_string(shape[1]) + " entries,",
                    " to be ", format_name_, " beside ", use_.beside_name, " ",
                    ShapeText(use_.beside), "; it is ",
                    torch::headeronly::toString(x.scalar_type()), " ", ShapeText(x));
    CheckLastContiguous(use_.op, label.c_str(), x);
  }

  const StoreUse use_;
  const std::string name_;
  const std::string format_name_;
  const KvFormat format_;
  int64_t rows_;
  int64_t tokens_;
  int64_t heads_;
};

inline void CheckTable(const char* op, const Tensor& table, const Tensor& q, int64_t kv_len,
                       int64_t page) {
  CheckSameDevice(op, "q", q, "block_table", table);
  STD_TORCH_CHECK(
      table.scalar_type() == ScalarType::Int && table.dim() == 2 && table.size(0) == q.size(0), op,
      ": block_table must be int32 (", q.size(0), ", pages), a list of pages for each row; it is ",
      torch::headeronly::toString(table.scalar_type()), " ", ShapeText(table));
  STD_TORCH_CHECK(kv_len <= table.size(1) * page, op, ": kv_len ", kv_len, " must be at most the ",
                  table.size(1) * page, " tokens of block_table's ", table.size(1), " pages of ",
                  page);
}

}  // namespace exkv

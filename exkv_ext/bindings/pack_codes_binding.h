// Between torch and what puts codes of weights into order: exkv/ops/weight_groups.py.
#pragma once

#include <optional>
#include <vector>

#include "../cpu/pack_codes.h"
#include "binding.h"

namespace exkv {

inline Tensor EmptyCodes(const Tensor& beside, int64_t rows, int64_t inputs, int64_t bits) {
  const int64_t blocks = (rows + kGroupsBlock - 1) / kGroupsBlock;
  return NewEmpty(beside, {blocks, inputs / kGroupsChunk, kGroupsChunk * bits}, ScalarType::Byte);
}

inline void CheckBits(const char* op, int64_t bits) {
  STD_TORCH_CHECK((bits >= 2 && bits <= 6) || bits == 8, op, ": codes of ", bits,
                  " bits; they must have 2 to 6, or 8");
}

// exkv::pack_codes; parallel(blocks, inputs, run(begin, end)).
template <typename Parallel>
Tensor PackCodes(const Tensor& codes, int64_t bits, const Parallel& parallel) {
  CheckBits("pack_codes", bits);
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 2 &&
                      codes.size(1) % kGroupsChunk == 0,
                  "pack_codes: codes must be uint8 (out, in), in a multiple of ", kGroupsChunk,
                  "; they are ", torch::headeronly::toString(codes.scalar_type()), " ",
                  ShapeText(codes));
  const Tensor from = Contiguous(codes);
  const int64_t rows = codes.size(0), inputs = codes.size(1);
  Tensor packed = EmptyCodes(codes, rows, inputs, bits);
  if (packed.numel() == 0) return packed;
  const auto* read = static_cast<const uint8_t*>(from.const_data_ptr());
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  parallel(packed.size(0), inputs, [&](int64_t begin, int64_t end) {
    PackCodes(read, rows, inputs, bits, begin, end, to);
  });
  return packed;
}

// exkv::pack_words; words may lie in any strides.
template <typename Parallel>
Tensor PackWords(const Tensor& words, int64_t bits, int64_t inputs,
                 const std::optional<Tensor>& order, const Parallel& parallel) {
  const char* op = "pack_words";
  CheckBits(op, bits);
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Int && words.dim() == 2, op,
                  ": words must be int32 (out, words); they are ",
                  torch::headeronly::toString(words.scalar_type()), " ", ShapeText(words));
  STD_TORCH_CHECK(inputs >= 0 && inputs % kGroupsChunk == 0 && words.size(1) >= inputs * bits / 32,
                  op, ": ", inputs, " inputs of ", bits, " bits must be a multiple of ",
                  kGroupsChunk, " and fit in ", words.size(1), " words");
  CodeWords from{static_cast<const uint32_t*>(words.const_data_ptr()), words.stride(0),
                 words.stride(1), words.size(0), nullptr};
  if (order) {
    CheckSameDevice(op, "words", words, "order", *order);
    CheckContiguous(op, "order", *order, ScalarType::Long, {&inputs, 1});
    from.order = order->const_data_ptr<int64_t>();
    for (int64_t i = 0; i < inputs; ++i) {
      STD_TORCH_CHECK(from.order[i] >= 0 && from.order[i] < inputs, op, ": order has ",
                      from.order[i], ", and there are ", inputs, " inputs");
    }
  }
  Tensor packed = EmptyCodes(words, words.size(0), inputs, bits);
  if (packed.numel() == 0) return packed;
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  parallel(packed.size(0), inputs,
           [&](int64_t begin, int64_t end) { PackWords(from, inputs, bits, begin, end, to); });
  return packed;
}

// exkv::pack_awq
template <typename Parallel>
Tensor PackAwq(const Tensor& words, const Parallel& parallel) {
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Int && words.dim() == 2 &&
                      words.size(0) % kGroupsChunk == 0,
                  "pack_awq: words must be int32 (in, out / 8), inputs in a multiple of ",
                  kGroupsChunk, "; they are ", torch::headeronly::toString(words.scalar_type()),
                  " ", ShapeText(words));
  const Tensor from = Contiguous(words);
  const int64_t inputs = words.size(0), blocks = words.size(1);
  Tensor packed = EmptyCodes(words, blocks * kGroupsBlock, inputs, 4);
  if (packed.numel() == 0) return packed;
  const auto* read = static_cast<const uint32_t*>(from.const_data_ptr());
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  parallel(blocks, inputs,
           [&](int64_t begin, int64_t end) { PackAwq(read, inputs, blocks, begin, end, to); });
  return packed;
}

// exkv::split_blocks
template <typename Parallel>
std::vector<Tensor> SplitBlocks(const Tensor& blocks, int64_t number, const Parallel& parallel) {
  const auto type = static_cast<SplitType>(number);
  const SplitLayout layout = LayoutOf(type);
  STD_TORCH_CHECK(layout.bytes > 0, "split_blocks: ggml's type ", number,
                  " has no codes with one scale");
  STD_TORCH_CHECK(blocks.scalar_type() == ScalarType::Byte && blocks.dim() == 2 &&
                      blocks.size(1) % layout.bytes == 0,
                  "split_blocks: rows must be uint8 (out, bytes), whole blocks of ", layout.bytes,
                  " bytes; they are ", torch::headeronly::toString(blocks.scalar_type()), " ",
                  ShapeText(blocks));
  const Tensor from = Contiguous(blocks);
  const int64_t rows = blocks.size(0), groups = blocks.size(1) / layout.bytes;
  const int64_t inputs = groups * kGroupsChunk;
  std::vector<Tensor> made{EmptyCodes(blocks, rows, inputs, layout.bits),
                           NewEmpty(blocks, {rows, groups}, ScalarType::Half)};
  if (layout.offset) made.push_back(NewEmpty(blocks, {rows, groups}, ScalarType::Half));
  if (made[0].numel() == 0) return made;
  const auto* read = static_cast<const uint8_t*>(from.const_data_ptr());
  auto* packed = static_cast<uint8_t*>(made[0].mutable_data_ptr());
  auto* scale = static_cast<uint16_t*>(made[1].mutable_data_ptr());
  auto* offset = layout.offset ? static_cast<uint16_t*>(made[2].mutable_data_ptr()) : nullptr;
  parallel(made[0].size(0), inputs, [&](int64_t begin, int64_t end) {
    SplitBlocks(read, type, rows, inputs, begin, end, packed, scale, offset);
  });
  return made;
}

}  // namespace exkv

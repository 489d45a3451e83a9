// The formats of keys and values that the kernels know, each in one line. They are described, with
// those that have no kernels, in exkv/ops/kv_formats.py, and a test holds both together. Free of
// torch, so that kernels stay so too.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace exkv {

enum class KvFormat { kFloat, kInt8, kInt4, kInt2, kInt4Channel, kInt2Channel };

struct KvFormatTraits {
  const char* name;
  KvFormat format;
  int64_t bits;     // of a stored value; 0 for floats of any size
  int64_t tensors;  // values, scales, offsets: so many of them
  int64_t tokens;   // encoded together
};

inline constexpr std::array<KvFormatTraits, 6> kKvFormats = {
    {{"float", KvFormat::kFloat, 0, 1, 1},
     {"int8", KvFormat::kInt8, 8, 2, 1},
     {"int4", KvFormat::kInt4, 4, 3, 1},
     {"int2", KvFormat::kInt2, 2, 3, 1},
     {"int4c", KvFormat::kInt4Channel, 4, 3, 32},
     {"int2c", KvFormat::kInt2Channel, 2, 3, 32}}};

// Null for a format that the kernels don't know.
inline const KvFormatTraits* FindKvFormat(const std::string& name) {
  for (const KvFormatTraits& traits : kKvFormats) {
    if (name == traits.name) return &traits;
  }
  return nullptr;
}

inline const KvFormatTraits& TraitsOf(KvFormat format) {
  return kKvFormats[static_cast<size_t>(format)];
}

inline bool IsByChannel(KvFormat format) { return TraitsOf(format).tokens > 1; }

// The names of those that encode so many tokens together, or fewer, for messages.
inline std::string KvFormatNames(int64_t most_tokens) {
  std::string names;
  for (const KvFormatTraits& traits : kKvFormats) {
    if (traits.tokens <= most_tokens)
      names += (names.empty() ? "" : ", ") + std::string(traits.name);
  }
  return names;
}

// A name as a number: FNV-1a (Fowler, Noll, Vo) over its bytes, without the last bit. Texts that
// are handed on to a reference travel so, since torch (2.11 to 2.13) keeps a copy of each for good.
inline int64_t TextNumber(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : text) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return static_cast<int64_t>(hash >> 1);
}

}  // namespace exkv

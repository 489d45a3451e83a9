// Eight neighbouring values of a key or value, as one thread loads and widens them, for every way
// to store them (exkv/ops/kv_formats.py). A load and its widening are two steps, so that several
// loads are under way before the first is looked at.
#pragma once

#include "../params/attention_params.h"
#include "launch.cuh"

namespace exkv {

constexpr int kFragment = 8;
static_assert(kGroup % kFragment == 0, "a fragment's values share a scale");

// The formats, with floats told apart by their type.
enum class Kind { kFloat32, kFloat16, kBFloat16, kInt8, kInt4, kInt2, kInt4Channel, kInt2Channel };

// The stored keys or values as the kernel walks along them; steps in bytes.
struct Plane {
  const unsigned char* data;
  int64_t row;
  int64_t token;  // of scales by channel: 32 tokens
  int64_t head;
};

struct Store {
  Kind kind;
  bool aligned;  // every whole fragment may be loaded at once
  Plane values;
  Plane scale;
  Plane offset;
};

__host__ __device__ constexpr int BitsOfKind(Kind kind) {
  switch (kind) {
    case Kind::kFloat32:
      return 32;
    case Kind::kFloat16:
    case Kind::kBFloat16:
      return 16;
    case Kind::kInt8:
      return 8;
    case Kind::kInt4:
    case Kind::kInt4Channel:
      return 4;
    default:
      return 2;
  }
}

__host__ __device__ constexpr bool IsByChannel(Kind kind) {
  return kind == Kind::kInt4Channel || kind == Kind::kInt2Channel;
}

__host__ __device__ constexpr bool IsPacked(Kind kind) { return BitsOfKind(kind) < 8; }

// What is loaded at once: bytes that never straddle elements, up to 16.
template <int kBytes>
struct alignas(kBytes) Chunk {
  unsigned char bytes[kBytes];
};
template <>
struct alignas(16) Chunk<16> {
  uint32_t words[4];
};
template <>
struct alignas(8) Chunk<8> {
  uint32_t words[2];
};
template <>
struct alignas(4) Chunk<4> {
  uint32_t words[1];
};

template <Kind kKind>
struct Raw {
  static constexpr int kBytes = kFragment * BitsOfKind(kKind) / 8;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];
  uint16_t scale;
  uint16_t offset;
};

// Scales and offsets of a fragment's channels, which a group of tokens shares.
struct Channels {
  float scale[kFragment];
  float offset[kFragment];
};

// A fragment's place in one head: its first value, and how many of its values there are.
struct Span {
  int first;
  int count;
};

// Where a lane's fragments begin in one head of one row. The same for all formats, so that
// registers hold it once.
struct Cursor {
  const unsigned char* values;
  const unsigned char* scale;
  const unsigned char* offset;
  int count;  // values of the lane's fragments: fewer than eight at a head's end
};

__device__ __forceinline__ const unsigned char* HeadOf(const Plane& plane, int row, int head) {
  return plane.data + row * plane.row + head * plane.head;
}

__device__ __forceinline__ Cursor FindCursor(const Store& store, int row, int head,
                                             const Span& span) {
  const int scale = IsByChannel(store.kind) ? span.first : span.first / static_cast<int>(kGroup);
  Cursor cursor;
  cursor.values = HeadOf(store.values, row, head) + span.first * BitsOfKind(store.kind) / 8;
  cursor.scale = HeadOf(store.scale, row, head) + scale * sizeof(uint16_t);
  cursor.offset = HeadOf(store.offset, row, head) + scale * sizeof(uint16_t);
  cursor.count = span.count;
  return cursor;
}

// A fragment whose values can't be loaded at once, element by element (or byte by byte).
template <Kind kKind>
__device__ __forceinline__ void LoadPieces(const unsigned char* from, int count, Raw<kKind>* raw) {
  constexpr int kBits = BitsOfKind(kKind);
  const int bytes = (count * kBits + 7) / 8;
#pragma unroll
  for (int i = 0; i < Raw<kKind>::kBytes; i += kBits < 8 ? 1 : kBits / 8) {
    if (i >= bytes) break;
    if constexpr (kBits == 32) {
      raw->words[i / 4] = *reinterpret_cast<const uint32_t*>(from + i);
    } else if constexpr (kBits == 16) {
      raw->words[i / 4] |= uint32_t{*reinterpret_cast<const uint16_t*>(from + i)} << (i % 4 * 8);
    } else {
      raw->words[i / 4] |= uint32_t{from[i]} << (i % 4 * 8);
    }
  }
}

template <Kind kKind>
__device__ __forceinline__ void LoadWhole(const unsigned char* from, Raw<kKind>* raw) {
  constexpr int kBytes = Raw<kKind>::kBytes;
  if constexpr (kBytes == 2) {
    raw->words[0] = *reinterpret_cast<const uint16_t*>(from);
  } else {
    constexpr int kOnce = kBytes < 16 ? kBytes : 16;
#pragma unroll
    for (int i = 0; i < kBytes; i += kOnce) {
      const auto chunk = *reinterpret_cast<const Chunk<kOnce>*>(from + i);
#pragma unroll
      for (int word = 0; word < kOnce / 4; ++word) raw->words[i / 4 + word] = chunk.words[word];
    }
  }
}

__device__ __forceinline__ uint16_t HalfAt(const unsigned char* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}

// Where a key lies: its page (0 where rows have none; the cursor knows the row; below 0 where there
// is no such page) and its token there.
struct Spot {
  int page;
  int token;
};

__device__ __forceinline__ int64_t Steps(const Plane& plane, int page, int token) {
  return page * plane.row + token * plane.token;
}

constexpr uint16_t kHalfNaN = 0x7fff;

// What widens to NaN only, whatever the channels' scales.
template <Kind kKind>
__device__ __forceinline__ Raw<kKind> NoPage() {
  Raw<kKind> raw;
#pragma unroll
  for (uint32_t& word : raw.words) word = 0xffffffffu;
  raw.scale = raw.offset = kHalfNaN;
  return raw;
}

// All zero where nothing is to be read, all NaN where there is no page to read from.
template <Kind kKind>
__device__ __forceinline__ Raw<kKind> Load(const Store& store, const Cursor& cursor,
                                           const Spot& spot, bool read) {
  Raw<kKind> raw = {};
  if (!read || cursor.count == 0) return raw;
  if (spot.page < 0) return NoPage<kKind>();
  const unsigned char* from = cursor.values + Steps(store.values, spot.page, spot.token);
  if (store.aligned && cursor.count == kFragment) {
    LoadWhole<kKind>(from, &raw);
  } else {
    LoadPieces<kKind>(from, cursor.count, &raw);
  }
  if constexpr (kKind == Kind::kInt8 || (IsPacked(kKind) && !IsByChannel(kKind))) {
    raw.scale = HalfAt(cursor.scale + Steps(store.scale, spot.page, spot.token));
    if constexpr (IsPacked(kKind)) {
      raw.offset = HalfAt(cursor.offset + Steps(store.offset, spot.page, spot.token));
    }
  }
  return raw;
}

// Of the group that a token is in; nothing for formats that have none.
template <Kind kKind>
__device__ __forceinline__ Channels LoadChannels(const Store& store, const Cursor& cursor,
                                                 const Spot& spot) {
  Channels channels = {};
  if constexpr (IsByChannel(kKind)) {
    const int group = spot.token / static_cast<int>(kGroup);
    const unsigned char* scale = cursor.scale + Steps(store.scale, spot.page, group);
    const unsigned char* offset = cursor.offset + Steps(store.offset, spot.page, group);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (i >= cursor.count) break;
      const bool there = spot.page >= 0;
      const uint16_t own = there ? HalfAt(scale + i * sizeof(uint16_t)) : kHalfNaN;
      const uint16_t added = there ? HalfAt(offset + i * sizeof(uint16_t)) : kHalfNaN;
      channels.scale[i] = __half2float(__ushort_as_half(own));
      channels.offset[i] = __half2float(__ushort_as_half(added));
    }
  }
  return channels;
}

// A whole number below 2^23 as float: the lowest bits of 2^23, which conversion instructions take
// four to eight times as long for.
__device__ __forceinline__ float LevelToFloat(uint32_t level, float zero) {
  return __uint_as_float(0x4b000000u | level) - zero;
}

template <Kind kKind>
__device__ __forceinline__ void Widen(const Raw<kKind>& raw, const Channels& channels,
                                      float (&x)[kFragment]) {
  constexpr int kBits = BitsOfKind(kKind);
  constexpr float kZero = 8388608.0f;  // 2^23
  const float scale = __half2float(__ushort_as_half(raw.scale));
  const float offset = __half2float(__ushort_as_half(raw.offset));
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
    const uint32_t bits = raw.words[i * kBits / 32] >> (i * kBits % 32);
    if constexpr (kKind == Kind::kFloat32) {
      x[i] = __uint_as_float(bits);
    } else if constexpr (kKind == Kind::kBFloat16) {
      x[i] = __uint_as_float(bits << 16);
    } else if constexpr (kKind == Kind::kFloat16) {
      x[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    } else if constexpr (kKind == Kind::kInt8) {
      x[i] = LevelToFloat((bits & 0xff) ^ 0x80, kZero + 128) * scale;
    } else {
      const float level = LevelToFloat(bits & ((1u << kBits) - 1), kZero);
      // The products are exact, so that this rounds as the reference does.
      if constexpr (IsByChannel(kKind)) {
        x[i] = fmaf(level, channels.scale[i], channels.offset[i]);
      } else {
        x[i] = fmaf(level, scale, offset);
      }
    }
  }
}

}  // namespace exkv

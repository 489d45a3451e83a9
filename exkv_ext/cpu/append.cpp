#include "append.h"

#include <cstring>
#include <vector>

namespace exkv {
namespace {

// Where a token is kept: a row of the stores, or a page, and the token in it.
struct AppendPlace {
  int64_t row;
  int64_t token;
};

int64_t BytesOf(FloatType dtype) { return dtype == FloatType::kFloat32 ? 4 : 2; }

// Copies one token's heads from the arguments into a store.
class Append {
 public:
  Append(const AppendParams& p, const RowKernels& rope, const KvQuantKernels& encode)
      : p_(p),
        rope_kernels_(rope),
        encode_(encode),
        bytes_(BytesOf(p.dtype)),
        heads_(static_cast<size_t>(p.heads * p.dim * bytes_)),
        space_(static_cast<size_t>(p.block)) {}

  void Run(int64_t row, int64_t token, const AppendPlace& place) {
    for (const AppendSide& side : p_.sides) {
      if (&side == p_.sides && p_.width > 0) {
        Rotate(side, row, token);
      } else {
        Copy(side, row, token);
      }
      if (p_.block > 0) Transform();
      Store(side, place);
    }
  }

 private:
  static const char* At(const TokenView& view, int64_t bytes, int64_t row, int64_t token) {
    return static_cast<const char*>(view.data) + (row * view.row + token * view.token) * bytes;
  }

  void Rotate(const AppendSide& side, int64_t row, int64_t token) {
    RopeParams rope{};
    rope.dtype = p_.dtype;
    rope.rows = rope.length = 1;
    rope.head_dim = p_.dim;
    rope.width = p_.width;
    rope.cos = {At(p_.cos, bytes_, row, token), 0, 0, 0};
    rope.sin = {At(p_.sin, bytes_, row, token), 0, 0, 0};
    rope.heads[0] = {{At(side.x, bytes_, row, token), 0, 0, side.x.head}, p_.heads, heads_.data()};
    rope_kernels_.rope(rope, 0, 1);
  }

  void Copy(const AppendSide& side, int64_t row, int64_t token) {
    const char* from = At(side.x, bytes_, row, token);
    const int64_t size = p_.dim * bytes_;
    for (int64_t head = 0; head < p_.heads; ++head) {
      std::memcpy(&heads_[head * size], from + head * side.x.head * bytes_, size);
    }
  }

  void Transform() {
    HadamardParams transform{};
    transform.dtype = p_.dtype;
    transform.rows = p_.heads;
    transform.dim = p_.dim;
    transform.block = p_.block;
    transform.factor = p_.factor;
    transform.x = transform.out = heads_.data();
    encode_.hadamard(transform, space_.data(), 0, p_.heads);
  }

  void Store(const AppendSide& side, const AppendPlace& place) {
    for (int64_t head = 0; head < p_.heads; ++head) {
      const char* x = &heads_[head * p_.dim * bytes_];
      switch (side.format) {
        case KvFormat::kFloat:
          std::memcpy(To<char>(side.values, place, head, bytes_), x, p_.dim * bytes_);
          break;
        case KvFormat::kInt8:
          Quantize(side, place, head, x);
          break;
        default:
          Pack(side, place, head, x);
      }
    }
  }

  template <typename T>
  static T* To(const TokenView& view, const AppendPlace& place, int64_t head, int64_t items = 1) {
    const int64_t at = place.row * view.row + place.token * view.token + head * view.head;
    return static_cast<T*>(const_cast<void*>(view.data)) + at * items;
  }

  int64_t Groups() const { return (p_.dim + kGroup - 1) / kGroup; }

  void Quantize(const AppendSide& side, const AppendPlace& place, int64_t head, const void* x) {
    QuantizeParams quantize{};
    quantize.dtype = p_.dtype;
    quantize.rows = 1;
    quantize.dim = p_.dim;
    quantize.groups = Groups();
    quantize.x = x;
    quantize.values = To<int8_t>(side.values, place, head);
    quantize.scales = To<uint16_t>(side.scale, place, head);
    encode_.quantize(quantize, 0, 1);
  }

  void Pack(const AppendSide& side, const AppendPlace& place, int64_t head, const void* x) {
    PackParams pack{};
    pack.dtype = p_.dtype;
    pack.bits = TraitsOf(side.format).bits;
    pack.rows = 1;
    pack.dim = p_.dim;
    pack.groups = Groups();
    pack.bytes = side.items;
    pack.x = x;
    pack.packed = To<uint8_t>(side.values, place, head);
    pack.scales = To<uint16_t>(side.scale, place, head);
    pack.offsets = To<uint16_t>(side.offset, place, head);
    encode_.pack(pack, 0, 1);
  }

  const AppendParams& p_;
  const RowKernels& rope_kernels_;
  const KvQuantKernels& encode_;
  int64_t bytes_;
  std::vector<char> heads_;  // (H_kv, D) of dtype
  std::vector<float> space_;
};

AppendPlace PlaceOf(const AppendParams& p, int64_t row, int64_t token) {
  const int64_t place = PlaceInRow(p, row, token);
  if (p.block_table == nullptr) return {StoreRow(p.store_rows, row), place};
  return {p.block_table[row * p.table_row + place / p.page], place % p.page};
}

}  // namespace

void AppendTokens(const AppendParams& p, const RowKernels& rope, const KvQuantKernels& encode,
                  int64_t begin, int64_t end) {
  Append append(p, rope, encode);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / p.length, token = i % p.length;
    const AppendedTokens written = TokensWritten(p, row);
    if (token < written.begin || token >= written.end) continue;
    append.Run(row, token, PlaceOf(p, row, token));
  }
}

}  // namespace exkv

// Between torch and the kernel for whole decoder layers: checks the tensors, makes the output and
// the memory between, fills the params.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../cpu/decoder.h"
#include "attention_binding.h"
#include "layer_binding.h"
#include "rope_binding.h"

namespace exkv {

// What doesn't change from call to call of the same layers.
struct Layers {
  std::vector<Tensor> weights;
  std::vector<std::optional<Tensor>> biases;
  std::vector<Tensor> stored;
  int64_t head_dim;
  double eps;
  double scale;
  std::vector<int64_t> windows;
  double softcap;
  bool gelu;

  size_t count() const { return windows.size(); }
  bool quantized() const { return stored.size() == 4 * count(); }
};

struct DecoderArguments {
  const Tensor& x;
  const Layers& layers;
  const Tensor& past_lens;
  int64_t kv_len;
  const Tensor& cos;
  const Tensor& sin;
};

inline constexpr size_t kNorms = 2;
inline constexpr const char* kMapNames[kMaps] = {"q", "k", "v", "out", "gate", "up", "down"};

// Tensors of one layer, which the messages name.
class DecoderLayer {
 public:
  DecoderLayer(const DecoderArguments& a, const DecoderParams& p, size_t layer)
      : a_(a), p_(p), layer_(layer) {}

  LayerParams Params() const {
    LayerParams params{};
    const Tensor* weights = &a_.layers.weights[layer_ * (kNorms + kMaps)];
    params.norm = Data("norm", weights[0], {p_.hidden});
    params.second_norm = Data("second norm", weights[1], {p_.hidden});
    const int64_t q = p_.heads * p_.dim, kv = p_.kv_heads * p_.dim;
    const int64_t shapes[kMaps][2] = {
        {q, p_.hidden},        {kv, p_.hidden},       {kv, p_.hidden},      {p_.hidden, q},
        {p_.inner, p_.hidden}, {p_.inner, p_.hidden}, {p_.hidden, p_.inner}};
    for (size_t map = 0; map < kMaps; ++map) {
      const auto [outputs, inputs] = shapes[map];
      params.maps[map].weight = Data(kMapNames[map], weights[kNorms + map], {outputs, inputs});
      const std::optional<Tensor>& bias = a_.layers.biases[layer_ * kMaps + map];
      if (bias) params.maps[map].bias = Data(kMapNames[map], *bias, {outputs});
    }
    Store(&params);
    return params;
  }

 private:
  const void* Data(const char* name, const Tensor& x, Sizes shape) const {
    CheckAlike("decoder_layers", "x", a_.x, name, x);
    bool fits = x.dim() == static_cast<int64_t>(shape.size()) && x.is_contiguous();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = x.size(static_cast<int64_t>(i)) == shape[i];
    }
    STD_TORCH_CHECK(fits, "decoder_layers: layer ", layer_, "'s ", name, " is ", ShapeText(x),
                    x.is_contiguous() ? "" : ", and not contiguous", "; its first layer and x ",
                    ShapeText(a_.x), " ask for ", SizesText(shape));
    return x.const_data_ptr();
  }

  static std::string SizesText(Sizes shape) {
    std::string text = "(" + std::to_string(shape[0]);
    return text + (shape.size() > 1 ? ", " + std::to_string(shape[1]) : "") + ")";
  }

  void Store(LayerParams* params) const {
    const size_t kept = a_.layers.quantized() ? 4 : 2, each = kept / 2;
    const Tensor* stored = &a_.layers.stored[layer_ * kept];
    const ScalarType dtype = a_.layers.quantized() ? ScalarType::Char : a_.x.scalar_type();
    const Tensor &k = stored[0], &v = stored[each];
    CheckStore("k_stored", k, dtype, p_.dim);
    CheckStore("v_stored", v, dtype, p_.dim);
    AttentionParams& attention = params->attention;
    attention.dtype = p_.dtype;
    attention.quantized = a_.layers.quantized();
    attention.rows = p_.rows;
    attention.length = p_.length;
    attention.heads = p_.heads;
    attention.kv_heads = p_.kv_heads;
    attention.dim = p_.dim;
    attention.kv_len = p_.kv_len;
    attention.scale = static_cast<float>(a_.layers.scale);
    attention.window = a_.layers.windows[layer_];
    attention.softcap = static_cast<float>(a_.layers.softcap);
    AppendParams& append = params->append;
    append.dtype = p_.dtype;
    append.rows = p_.rows;
    append.length = p_.length;
    append.heads = p_.kv_heads;
    append.dim = p_.dim;
    append.width = p_.width;
    append.cos = p_.cos;
    append.sin = p_.sin;
    append.past_lens = p_.past_lens;
    append.room = append.page = k.size(1);
    attention.k = append.sides[0].values = WrittenView(k);
    attention.v = append.sides[1].values = WrittenView(v);
    for (AppendSide& side : append.sides) {
      side.format = a_.layers.quantized() ? KvFormat::kInt8 : KvFormat::kFloat;
      side.items = p_.dim;
    }
    if (!a_.layers.quantized()) return;
    CheckStore("k_scale", stored[1], ScalarType::Half, NumGroups(p_.dim));
    CheckStore("v_scale", stored[3], ScalarType::Half, NumGroups(p_.dim));
    attention.k_scale = append.sides[0].scale = WrittenView(stored[1]);
    attention.v_scale = append.sides[1].scale = WrittenView(stored[3]);
  }

  void CheckStore(const char* name, const Tensor& x, ScalarType dtype, int64_t last) const {
    CheckSameDevice("decoder_layers", "x", a_.x, name, x);
    STD_TORCH_CHECK(x.dim() == 4 && x.size(0) >= p_.rows && x.size(1) >= p_.kv_len &&
                        x.size(2) == p_.kv_heads && x.size(3) == last &&
                        (last <= 1 || x.stride(3) == 1) && x.scalar_type() == dtype,
                    "decoder_layers: layer ", layer_, "'s ", name, " ", ShapeText(x), " of ",
                    torch::headeronly::toString(x.scalar_type()), " has no room for ", p_.kv_len,
                    " tokens in ", p_.rows, " rows, of ", p_.kv_heads, " heads of ", last, " ",
                    torch::headeronly::toString(dtype), " beside each other");
  }

  const DecoderArguments& a_;
  const DecoderParams& p_;
  const size_t layer_;
};

inline void CheckCounts(const DecoderArguments& a) {
  const auto check = [&](const char* name, size_t count, size_t each) {
    STD_TORCH_CHECK(a.layers.count() > 0 && count == each * a.layers.count(),
                    "decoder_layers: ", name, " are ", count, "; ", a.layers.count(),
                    " layers have ", each * a.layers.count());
  };
  check("weights", a.layers.weights.size(), kNorms + kMaps);
  check("biases", a.layers.biases.size(), kMaps);
  check("stored", a.layers.stored.size(), a.layers.quantized() ? 4 : 2);
}

// What x and the first layer's weights say of all layers.
inline DecoderParams CommonParams(const DecoderArguments& a) {
  DecoderParams params{};
  params.dtype = CheckRows("decoder_layers", "x", a.x);
  STD_TORCH_CHECK(a.x.dim() == 3 && a.x.is_contiguous(),
                  "decoder_layers: x must be (B, T, hidden) and contiguous; it is ",
                  ShapeText(a.x));
  params.rows = a.x.size(0);
  params.length = a.x.size(1);
  params.hidden = a.x.size(2);
  const auto outputs = [&](Map map) {
    const Tensor& weight = a.layers.weights[kNorms + map];
    STD_TORCH_CHECK(weight.dim() == 2, "decoder_layers: weight ", kMapNames[map],
                    " must be (out, in); it is ", ShapeText(weight));
    return weight.size(0);
  };
  params.dim = a.layers.head_dim;
  STD_TORCH_CHECK(a.layers.head_dim > 0 && outputs(kQ) % a.layers.head_dim == 0 &&
                      outputs(kK) > 0 && outputs(kK) % a.layers.head_dim == 0 &&
                      outputs(kQ) % outputs(kK) == 0,
                  "decoder_layers: ", outputs(kQ), " queries and ", outputs(kK),
                  " keys of a token are not of heads of ", a.layers.head_dim);
  params.heads = outputs(kQ) / a.layers.head_dim;
  params.kv_heads = outputs(kK) / a.layers.head_dim;
  params.inner = outputs(kGate);
  params.kv_len = a.kv_len;
  params.eps = static_cast<float>(a.layers.eps);
  params.gelu = a.layers.gelu;
  return params;
}

inline void CheckTurns(const DecoderArguments& a, const DecoderParams& p) {
  CheckSameShape("decoder_layers", "cos", a.cos, "sin", a.sin);
  for (const Tensor* x : {&a.cos, &a.sin}) {
    CheckAlike("decoder_layers", "x", a.x, "cos or sin", *x);
    STD_TORCH_CHECK(x->dim() == 3 && (x->size(0) == p.rows || x->size(0) == 1) &&
                        x->size(1) == p.length && x->size(2) % 2 == 0 && x->size(2) <= p.dim,
                    "decoder_layers: cos and sin must be (", p.rows, ", ", p.length,
                    ", R), R even and at most ", p.dim, "; they are ", ShapeText(*x));
  }
}

// exkv::decoder_layers, once its counts are checked; `run` takes the params and memory between the
// parts.
template <typename Run>
Tensor DecoderLayers(const DecoderArguments& a, const Run& run) {
  DecoderParams params = CommonParams(a);
  CheckTurns(a, params);
  CheckEnds("decoder_layers", a.x, a.past_lens, a.kv_len);
  for (const int64_t window : a.layers.windows) {
    CheckScores("decoder_layers", a.layers.scale, window, a.layers.softcap);
  }
  const Tensor cos = InLine(a.cos), sin = InLine(a.sin), past_lens = Contiguous(a.past_lens);
  params.width = cos.size(2);
  params.cos = FactorView(cos);
  params.sin = FactorView(sin);
  params.past_lens = past_lens.const_data_ptr<int32_t>();
  for (size_t layer = 0; layer < a.layers.count(); ++layer) {
    params.layers.push_back(DecoderLayer(a, params, layer).Params());
  }
  Tensor out = NewEmpty(a.x, a.x.sizes());
  if (a.x.numel() == 0) return out;
  params.x = a.x.const_data_ptr();
  params.out = out.mutable_data_ptr();
  Tensor space = NewEmpty(a.x, {DecoderBytes(params)}, ScalarType::Byte);
  run(params, static_cast<char*>(space.mutable_data_ptr()));
  return out;
}

// Layers of calls to come by their numbers, for all threads: to hand some hundred tensors over
// takes longer than to look at them.
class Holder {
 public:
  int64_t Hold(Layers layers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_.emplace(next_, std::make_shared<const Layers>(std::move(layers)));
    return next_++;
  }

  // Stays while the caller has it, whoever releases it meanwhile.
  std::shared_ptr<const Layers> Find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = held_.find(number);
    STD_TORCH_CHECK(found != held_.end(), "no layers are held by the number ", number,
                    ": it is what hold_layers returned, until release_layers takes it");
    return found->second;
  }

  void Release(int64_t number) {
    std::shared_ptr<const Layers> last = Find(number);  // let go without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    held_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Layers>> held_;
  int64_t next_ = 0;
};

}  // namespace exkv

// Between torch and the kernel of bound runs: what is bound is checked once, and again where a
// tensor has got other memory; a call's own tensors are checked in each call.
// What the arguments are: exkv/ops/bound_run.py.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../cpu/decoder.h"
#include "append_binding.h"
#include "linear_groups_binding.h"
#include "linear_packed_binding.h"
#include "router_binding.h"
#include "sections_binding.h"

namespace exkv {

inline constexpr const char* kNormNames[kNorms] = {"norm before attention", "norm after attention",
                                                   "norm before the MLP",   "norm after the MLP",
                                                   "norm of queries",       "norm of keys"};
inline constexpr const char* kProjectionNames[kProjections] = {"query", "key", "value", "output",
                                                               "gate",  "up",  "down"};

// The tensors of a matrix, and how they lie: zeros for floats, a layout of groups, or, where the
// first number is negative, of packed rows.
struct WeightArguments {
  std::vector<Tensor> tensors;
  std::vector<int64_t> layout;
  int64_t hadamard = 0;  // inputs of a block of the transform that x goes through first, or 0

  Stored stored() const {
    if (layout[0] == 0) return Stored::kFloats;
    if (SectionTensors::IsSections(layout)) return Stored::kGroups;
    return PackedTensors::IsPacked(layout) ? Stored::kPacked : Stored::kGroups;
  }
  // Rows, as far as it has any.
  int64_t outputs() const {
    if (SectionTensors::IsSections(layout)) return layout[1];
    const Tensor& first = tensors[stored() == Stored::kGroups ? 1 : 0];
    if (PackedTensors::IsTrellis(layout))
      return first.dim() == 3 ? kTrellisTile * first.size(0) : 0;
    return first.dim() == 2 ? first.size(0) : 0;
  }
};

// Before a layout of groups: that, and a number, WeightArguments::hadamard. TRANSFORMED of
// exkv/ops/bound_run.py.
inline constexpr int64_t kTransformed = -8;

// The matrices whose tensors and layouts follow each other.
inline std::vector<WeightArguments> SplitWeights(const std::vector<Tensor>& tensors,
                                                 const std::vector<int64_t>& layouts) {
  constexpr size_t kNumbers = 4;
  std::vector<WeightArguments> weights;
  size_t taken = 0;
  for (size_t i = 0; i < layouts.size();) {
    int64_t hadamard = 0;
    if (layouts[i] == kTransformed && i + 2 < layouts.size()) {
      hadamard = layouts[i + 1];
      STD_TORCH_CHECK(hadamard > 0 && HadamardBlock(hadamard) == hadamard && layouts[i + 2] > 0,
                      "bound run: inputs are transformed in blocks of ", hadamard,
                      ", which must be a power of two, and of a matrix in groups");
      i += 2;
    }
    const int64_t* first = layouts.data() + i;
    const bool whole = i + kNumbers <= layouts.size();
    const bool sections = whole && first[0] == SectionTensors::kMark;
    const size_t numbers = sections ? SectionTensors::Numbers(first) : kNumbers;
    STD_TORCH_CHECK(whole && i + numbers <= layouts.size(), "bound run: layouts are ",
                    layouts.size(), " numbers, and must be ", kNumbers,
                    " for each matrix, or those of its sections");
    const std::vector<int64_t> layout(first, first + numbers);
    i += numbers;
    const size_t count = layout[0] == 0                    ? 1
                         : sections                        ? SectionTensors::kTensors
                         : PackedTensors::IsPacked(layout) ? PackedTensors::Count(layout)
                                                           : GroupsTensors::Count(layout);
    STD_TORCH_CHECK(taken + count <= tensors.size(), "bound run: ", tensors.size(),
                    " tensors of weights are fewer than their layouts have");
    weights.push_back(
        {{tensors.begin() + taken, tensors.begin() + taken + count}, layout, hadamard});
    taken += count;
  }
  STD_TORCH_CHECK(taken == tensors.size(), "bound run: ", tensors.size(),
                  " tensors of weights, and their layouts have ", taken);
  return weights;
}

inline WeightArguments OneWeight(const std::vector<Tensor>& tensors,
                                 const std::vector<int64_t>& layout) {
  std::vector<WeightArguments> weights = SplitWeights(tensors, layout);
  STD_TORCH_CHECK(weights.size() == 1, "bound run: ", weights.size(), " matrices in place of one");
  return std::move(weights[0]);
}

// By config.json's name.
inline Act ActOf(const std::string& name) {
  std::string known;
  for (int act = 0; act < kActs; ++act) {
    if (name == kActNames[act]) return static_cast<Act>(act);
    known += std::string(act > 0 ? ", " : "") + kActNames[act];
  }
  STD_TORCH_CHECK(false, "bound run: act is ", name, "; it must be one of ", known);
  return kActs;
}

// What an adapter adds to a projection for some rows, of all where last is -1.
struct LowRankArguments {
  int64_t projection;  // of a layer, or kLogits
  Tensor a;            // (rank, in)
  Tensor b;            // (out, rank)
  int64_t first;
  int64_t last;
};

// The projection to logits, for low-rank parts.
inline constexpr int64_t kLogits = -1;

struct EmbeddingArguments {
  WeightArguments table;
  double scale;
};

// The experts of a layer: weights and biases of the router, unless calls bring choices; of the
// gate, up and down of each expert that is not elsewhere, or without gates if not `gated`; of the
// shared one's gate; and of the projections before and after those that are routed to, if `narrow`.
struct ExpertsArguments {
  std::vector<WeightArguments> weights;
  std::vector<std::optional<Tensor>> biases;
  std::optional<Tensor> correction;
  Act act;
  int64_t experts;
  bool shared;
  std::vector<int64_t> elsewhere;  // in ascending order
  RouterArguments router;
  bool gated;
  bool weighs_inputs;
  bool narrow;
  double alpha;
  double limit;

  int64_t of_each() const { return gated ? 3 : 2; }
  int64_t own() const { return experts - static_cast<int64_t>(elsewhere.size()); }
};

struct StateArguments;  // state_mixer_binding.h

// Whether the layer has attention beside its state.
bool IsBeside(const StateArguments& state);

// Latent attention of a layer. Weights and biases: of queries, of what is stored, of the output,
// and of queries' low ranks if they have a norm; then of each head's keys, and of each one's
// values.
struct LatentArguments {
  std::vector<std::optional<Tensor>> norms;  // of latent vectors, and of queries' low ranks
  std::vector<double> eps;
  std::vector<WeightArguments> weights;
  std::vector<std::optional<Tensor>> biases;
  int64_t heads;
  int64_t rotated;
};

// What few layers have: see the op add_details.
struct DetailsArguments {
  bool no_attention = false;
  bool no_mlp = false;
  bool normed_rotated = false;
  int64_t query_factors = -1;
  int64_t chunk = 0;
  std::optional<Tensor> sinks = {};
  std::vector<WeightArguments> gates = {};  // one or none
  bool soft_plus = false;
  double input_scale = 1.0;
  std::vector<double> factors = {};  // of each of the layer's weights, or none
};

struct LayerArguments {
  std::vector<std::optional<Tensor>> norms;
  std::vector<double> eps;
  std::vector<int64_t> kinds;
  std::vector<std::optional<Tensor>> norm_biases;
  std::vector<WeightArguments> weights;
  std::vector<std::optional<Tensor>> biases;
  int64_t head_dim;
  Act act;
  int64_t interleaved;
  double residual;
  bool parallel;
  int64_t rotary;
  double scale;
  int64_t window;
  double softcap;
  std::vector<Tensor> k_stored;
  std::string k_format;
  std::vector<Tensor> v_stored;
  std::string v_format;
  int64_t ring;
  bool hadamard;
  bool paged;  // the stores are pools of pages
  bool gated;  // queries' projection makes gates, too
  std::vector<LowRankArguments> low_rank = {};
  std::optional<ExpertsArguments> experts = {};
  std::shared_ptr<const StateArguments> state = {};
  std::optional<LatentArguments> latent = {};
  DetailsArguments details = {};

  // Its weights are the projections in order, or without those of attention, the MLP's gate, or all
  // of the MLP.
  bool attends() const { return weights.size() >= kGate; }
  size_t of_mlp() const { return weights.size() - (attends() ? kGate : 0); }
  // Where a projection is among the weights, if it is.
  std::optional<size_t> Index(size_t projection) const {
    const size_t before = attends() ? kGate : 0;
    if (projection < kGate) return attends() ? std::optional(projection) : std::nullopt;
    const size_t first = kProjections - of_mlp();  // of the MLP's
    if (projection < first || projection >= kProjections) return std::nullopt;
    return before + projection - first;
  }
};

struct HeadArguments {
  Tensor norm;
  std::optional<Tensor> norm_bias;
  double eps;
  int64_t kind;
  WeightArguments weight;
  std::optional<Tensor> bias;
  std::vector<LowRankArguments> low_rank = {};
};

// What a norm's kind says, as a sum.
inline constexpr int64_t kOffset = 1, kCentered = 2;

// Tensors of one part of a run, which the messages name. All that are read are noted, with where
// their memory is.
class BoundTensors {
 public:
  BoundTensors(const Tensor& like, int64_t hidden) : like_(like), hidden_(hidden) {}

  const void* Data(const std::string& name, const Tensor& x, Sizes shape) {
    return Data(name, x, shape, like_.scalar_type());
  }

  const void* Data(const std::string& name, const Tensor& x, Sizes shape, ScalarType dtype) {
    const std::string label = "bound run: " + name;
    STD_TORCH_CHECK(x.device() == like_.device(), label, " is on ", DeviceName(x),
                    " and the run on ", DeviceName(like_));
    STD_TORCH_CHECK(x.scalar_type() == dtype, label, " is ",
                    torch::headeronly::toString(x.scalar_type()), " and the run ",
                    torch::headeronly::toString(dtype));
    bool fits = x.dim() == static_cast<int64_t>(shape.size()) && x.is_contiguous();
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = x.size(static_cast<int64_t>(i)) == shape[i];
    }
    STD_TORCH_CHECK(fits, label, " is ", ShapeText(x),
                    x.is_contiguous() ? "" : ", and not contiguous", "; the run asks for ",
                    SizesText(shape));
    Note(x);
    return x.const_data_ptr();
  }

  // A matrix, without its bias.
  Matrix MatrixOf(const std::string& name, const WeightArguments& a, int64_t outputs,
                  int64_t inputs) {
    Matrix m{};
    m.inputs = inputs;
    m.outputs = outputs;
    m.stored = a.stored();
    m.hadamard = a.hadamard;
    STD_TORCH_CHECK(a.hadamard == 0 || inputs % a.hadamard == 0, "bound run: ", name, " has ",
                    inputs, " inputs, which blocks of ", a.hadamard, " don't divide");
    if (m.stored == Stored::kFloats) {
      m.weight = Data(name, a.tensors[0], {outputs, inputs});
      return m;
    }
    const std::string label = "bound run: " + name;
    if (m.stored == Stored::kGroups) {
      m.groups = SectionTensors::IsSections(a.layout)
                     ? SectionTensors(label, a.tensors.data(), a.layout).Matrix()
                     : GroupsTensors(label, a.tensors.data(), a.layout).Matrix();
      m.weight = m.groups.codes;
      CheckMatrix(label, a, {m.groups.outputs, m.groups.inputs}, {outputs, inputs});
    } else {
      m.packed = PackedTensors(label, a.tensors.data(), a.layout).Matrix(a.outputs());
      m.weight = m.packed.rows;
      CheckMatrix(label, a, {m.packed.outputs, m.packed.inputs}, {outputs, inputs});
    }
    return m;
  }

  // The same of one that may be of float32.
  Matrix ExactMatrixOf(const std::string& name, const WeightArguments& a, int64_t outputs,
                       int64_t inputs) {
    const bool exact = a.stored() == Stored::kFloats && a.tensors[0].scalar_type() != dtype();
    if (!exact) return MatrixOf(name, a, outputs, inputs);
    Matrix m{};
    m.inputs = inputs;
    m.outputs = outputs;
    m.exact = true;
    m.weight = Data(name, a.tensors[0], {outputs, inputs}, ScalarType::Float);
    return m;
  }

  // Adds what an adapter does to a matrix.
  void AddLowRank(const std::string& name, const LowRankArguments& a, Matrix* matrix) {
    const int64_t rank = a.a.dim() == 2 ? a.a.size(0) : 0;
    STD_TORCH_CHECK(rank > 0, "bound run: ", name, "'s low-rank A must be (rank, in); it is ",
                    ShapeText(a.a));
    STD_TORCH_CHECK(a.first >= 0 && (a.last == -1 || a.first < a.last), "bound run: ", name,
                    "'s low-rank part is for rows ", a.first, " to ", a.last);
    for (const LowRank& other : matrix->low_rank) {
      const bool apart = other.last >= 0 && other.last <= a.first;
      STD_TORCH_CHECK(apart, "bound run: ", name, "'s low-rank parts must be of rows in order");
    }
    const void* first = Data(name + "'s low-rank A", a.a, {rank, matrix->inputs});
    const void* second = Data(name + "'s low-rank B", a.b, {matrix->outputs, rank});
    matrix->low_rank.push_back({a.first, a.last, rank, first, second});
    rows_ = std::max(rows_, a.last);
  }

  // That a call must have at least.
  int64_t rows() const { return rows_; }

  void Note(const Tensor& x) { noted_.emplace_back(x, x.const_data_ptr()); }

  // Whether all memory is where it was when it was noted.
  bool InPlace() const {
    for (const auto& [tensor, data] : noted_) {
      if (tensor.const_data_ptr() != data) return false;
    }
    return true;
  }

  void Clear() {
    noted_.clear();
    rows_ = 0;
  }

  const Tensor& like() const { return like_; }
  ScalarType dtype() const { return like_.scalar_type(); }
  int64_t hidden() const { return hidden_; }

 private:
  void CheckMatrix(const std::string& label, const WeightArguments& a,
                   std::pair<int64_t, int64_t> found, std::pair<int64_t, int64_t> expected) {
    CheckSameDevice(label.c_str(), "weight", a.tensors[0], "the run", like_);
    STD_TORCH_CHECK(found == expected, label, " is (", found.first, ", ", found.second,
                    "); the run asks for (", expected.first, ", ", expected.second, ")");
    for (const Tensor& tensor : a.tensors) Note(tensor);
  }

  Tensor like_;
  int64_t hidden_;
  int64_t rows_ = 0;
  std::vector<std::pair<Tensor, const void*>> noted_;
};

}  // namespace exkv

#include "state_mixer_binding.h"

namespace exkv {

// The params of a layer's experts.
inline Mixture MixtureOf(BoundTensors* tensors, const ExpertsArguments& a, size_t layer) {
  const std::string name = "layer " + std::to_string(layer) + "'s ";
  bool known = true;
  std::vector<bool> elsewhere(static_cast<size_t>(std::max(a.experts, int64_t{0})));
  for (size_t i = 0; i < a.elsewhere.size(); ++i) {
    const int64_t expert = a.elsewhere[i];
    known = known && expert >= 0 && expert < a.experts && (i == 0 || a.elsewhere[i - 1] < expert);
    if (known) elsewhere[expert] = true;
  }
  STD_TORCH_CHECK(known, "bound run: ", name, "experts that are elsewhere must be some of ",
                  a.experts, ", in ascending order");
  STD_TORCH_CHECK(a.elsewhere.empty() || !(a.weighs_inputs || a.narrow), "bound run: ", name,
                  "experts that are elsewhere must get what the layer gets");
  const int64_t hidden = tensors->hidden(), each = a.of_each();
  const int64_t of_experts = (a.own() + a.shared) * each;
  const auto count = static_cast<int64_t>(a.weights.size());
  const bool routed = a.shared || a.narrow || count != of_experts;
  const int64_t behind = routed + of_experts;
  const bool has_gate = a.shared && count == behind + 1 + 2 * a.narrow;
  STD_TORCH_CHECK(a.experts > 0 && (has_gate || count == behind + 2 * a.narrow),
                  "bound run: ", name, count, " matrices are not the router's and ",
                  each == 3 ? "three" : "two", " of each of ", a.own(), " experts");
  STD_TORCH_CHECK(a.biases.size() == a.weights.size(), "bound run: ", name, a.biases.size(),
                  " biases of ", count, " matrices");
  Mixture mixture{};
  mixture.router = a.router.Params("bound run: " + name + "experts", a.experts);
  const auto add_bias = [&](int64_t index, const std::string& of, Matrix* m) {
    const std::optional<Tensor>& bias = a.biases[index];
    const ScalarType dtype = m->exact ? ScalarType::Float : tensors->dtype();
    if (bias) m->bias = tensors->Data(of + "'s bias", *bias, {m->outputs}, dtype);
  };
  const auto matrix = [&](int64_t index, const std::string& of, int64_t outputs, int64_t inputs) {
    Matrix m = tensors->MatrixOf(of, a.weights[index], outputs, inputs);
    add_bias(index, of, &m);
    return m;
  };
  if (routed) {
    mixture.gate = tensors->ExactMatrixOf(name + "router", a.weights[0], a.experts, hidden);
    add_bias(0, name + "router", &mixture.gate);
  }
  mixture.asks = !a.elsewhere.empty();
  mixture.router.dtype =
      mixture.gate.exact ? FloatType::kFloat32 : *KernelFloatType(tensors->like().scalar_type());
  if (a.correction) {
    const void* data =
        tensors->Data(name + "correction", *a.correction, {a.experts}, ScalarType::Float);
    mixture.router.correction = static_cast<const float*>(data);
  }
  mixture.shared = a.shared;
  mixture.act = a.act;
  mixture.alpha = static_cast<float>(a.alpha);
  mixture.limit = static_cast<float>(a.limit);
  STD_TORCH_CHECK(a.limit == 0.0 || (a.limit > 0.0 && a.gated), "bound run: ", name, "limit is ",
                  a.limit, "; it must be 0, or more with gates");
  mixture.weighs_inputs = a.weighs_inputs;
  mixture.inner = a.own() > 0 ? a.weights[routed].outputs() : 0;
  mixture.shared_inner = a.shared ? a.weights[behind - each].outputs() : 0;
  const int64_t narrow = count - 2;
  mixture.features = a.narrow ? a.weights[narrow].outputs() : hidden;
  int64_t at = routed;
  for (int64_t i = 0; i < a.experts + a.shared; ++i) {
    if (i < a.experts && elsewhere[i]) {
      mixture.experts.push_back({});
      continue;
    }
    const std::string of =
        i < a.experts ? name + "expert " + std::to_string(i) + "'s " : name + "shared expert's ";
    const int64_t inner = i < a.experts ? mixture.inner : mixture.shared_inner;
    const int64_t inputs = i < a.experts ? mixture.features : hidden;
    STD_TORCH_CHECK(inner > 0 && inputs > 0, "bound run: ", of, a.gated ? "gate" : "up",
                    " must be (inner, hidden); it is ", ShapeText(a.weights[at].tensors[0]));
    Expert expert{};
    if (a.gated) expert.gate = matrix(at, of + "gate", inner, inputs);
    expert.up = matrix(at + each - 2, of + "up", inner, inputs);
    expert.down = matrix(at + each - 1, of + "down", inputs, inner);
    mixture.experts.push_back(std::move(expert));
    at += each;
  }
  if (has_gate) mixture.shared_gate = matrix(at, name + "shared expert's gate", 1, hidden);
  if (!a.narrow) return mixture;
  mixture.before = matrix(narrow, name + "projection before experts", mixture.features, hidden);
  mixture.after = matrix(narrow + 1, name + "projection after experts", hidden, mixture.features);
  return mixture;
}

// The params of a layer's latent attention, and the projections of the layer.
inline Latent LatentOf(BoundTensors* tensors, const LatentArguments& a, const std::string& name,
                       Matrix* projections) {
  constexpr Projection kOrder[] = {kQ, kK, kOut, kV};
  const auto count = static_cast<int64_t>(a.weights.size());
  const bool low = a.norms.size() == 2 && a.norms[1];
  const int64_t first = 3 + low;
  STD_TORCH_CHECK(a.norms.size() == 2 && a.eps.size() == 2 && a.norms[0] && a.heads > 0 &&
                      count == first + 2 * a.heads && a.biases.size() == a.weights.size(),
                  "bound run: ", name, a.norms.size(), " norms, ", count, " matrices and ",
                  a.biases.size(), " biases are not those of latent attention of ", a.heads,
                  " heads");
  const int64_t q = a.weights[0].outputs(), stored = a.weights[1].outputs();
  Latent latent{};
  latent.heads = a.heads;
  latent.rotated = a.rotated;
  latent.plain = q / a.heads - a.rotated;
  latent.rank = stored - a.rotated;
  latent.values = a.weights[first + a.heads].outputs();
  STD_TORCH_CHECK(q % a.heads == 0 && a.rotated > 0 && a.rotated % 2 == 0 && latent.plain > 0 &&
                      latent.rank > 0 && latent.values > 0,
                  "bound run: ", name, q, " queries of ", a.heads, " heads and ", stored,
                  " stored features don't have ", a.rotated, " rotated ones each");
  const int64_t hidden = tensors->hidden(), inputs = low ? a.weights[3].outputs() : hidden;
  const int64_t shapes[][2] = {
      {q, inputs}, {stored, hidden}, {hidden, a.heads * latent.values}, {inputs, hidden}};
  for (int64_t i = 0; i < first; ++i) {
    const std::string of = name + (i == 3 ? "queries' low ranks" : kProjectionNames[kOrder[i]]);
    Matrix& matrix = projections[kOrder[i]];
    matrix = tensors->MatrixOf(of, a.weights[i], shapes[i][0], shapes[i][1]);
    if (a.biases[i]) matrix.bias = tensors->Data(of + "'s bias", *a.biases[i], {matrix.outputs});
  }
  const auto norm = [&](size_t i, const char* of, int64_t dim) {
    const void* data = tensors->Data(name + of, *a.norms[i], {dim});
    return NormWeights{data, dim, static_cast<float>(a.eps[i]), false, false, nullptr};
  };
  latent.norm = norm(0, "norm of latent vectors", latent.rank);
  if (low) latent.query_norm = norm(1, "norm of queries' low ranks", inputs);
  for (int64_t head = 0; head < a.heads; ++head) {
    const std::string of = name + "head " + std::to_string(head) + "'s ";
    const int64_t keys = first + head, values = keys + a.heads;
    STD_TORCH_CHECK(!a.biases[keys] && !a.biases[values], "bound run: ", of,
                    "keys and values take no bias");
    latent.key_up.push_back(
        tensors->MatrixOf(of + "keys", a.weights[keys], latent.rank, latent.plain));
    latent.value_up.push_back(
        tensors->MatrixOf(of + "values", a.weights[values], latent.values, latent.rank));
  }
  return latent;
}

// One layer's params, of arguments that fit each other and the run.
class LayerBinding {
 public:
  LayerBinding(BoundTensors* tensors, const LayerArguments& a, size_t index)
      : tensors_(*tensors), a_(a), index_(index), name_("layer " + std::to_string(index) + "'s ") {}

  LayerParams Params() {
    LayerParams params{};
    CheckCounts();
    const DetailsArguments& details = a_.details;
    params.no_attention = details.no_attention;
    params.no_mlp = details.no_mlp;
    params.asks_attention = !params.no_attention && a_.k_stored.empty() && a_.v_stored.empty();
    params.asks_whole = !params.no_attention && !a_.latent && !a_.attends();
    params.asks_mlp = !params.no_mlp && a_.of_mlp() == 0 && !a_.experts;
    params.dim = a_.head_dim;
    params.gated = a_.gated;
    params.normed_rotated = details.normed_rotated;
    params.query_factors = details.query_factors;
    params.chunk = details.chunk;
    params.input_scale = static_cast<float>(details.input_scale);
    CheckDetails();
    SetProjections(&params);
    SetNorms(&params);
    STD_TORCH_CHECK(!params.asks_whole || (params.asks_attention && !a_.parallel &&
                                           !a_.norms[kOfQueries] && !a_.norms[kOfKeys]),
                    "bound run: ", name_, "stores, norms of heads, and an MLP beside attention ",
                    "need its projections");
    if (a_.experts) {
      const Mixture mixture = MixtureOf(&tensors_, *a_.experts, index_);
      params.mixture = std::make_shared<Mixture>(mixture);
    }
    params.act = a_.act;
    params.residual = static_cast<float>(a_.residual);
    params.parallel = a_.parallel;
    params.interleaved = a_.interleaved;
    const bool pairs = a_.interleaved >= 0 && a_.interleaved % 2 == 0;
    STD_TORCH_CHECK(pairs && a_.interleaved <= a_.head_dim, "bound run: ", name_, "interleaved ",
                    a_.interleaved, " must be an even part of heads of ", a_.head_dim);
    const bool normed = a_.norms[kAfterAttention] || a_.norms[kAfterMlp];
    STD_TORCH_CHECK(!a_.parallel || a_.residual == 1.0, "bound run: ", name_, "residual ",
                    a_.residual, " must be 1 in a parallel layer");
    STD_TORCH_CHECK(!a_.parallel || (a_.norms[kBeforeAttention] && !normed), "bound run: ", name_,
                    "norms must stand before attention and not behind it, in a parallel layer");
    if (a_.state != nullptr) {
      params.mixer =
          std::make_shared<StateMixer>(MixerBinding(&tensors_, *a_.state, index_).Params());
      params.beside = IsBeside(*a_.state);
      if (!params.beside) {
        params.asks_attention = params.asks_whole = false;
        return params;
      }
    }
    params.rotary = a_.rotary;
    STD_TORCH_CHECK(a_.rotary >= 0, "bound run: ", name_, "rotary table ", a_.rotary,
                    " must be 0 or more");
    if (params.asks_attention || params.no_attention) return params;
    SetStores(&params);
    SetAttention(&params);
    return params;
  }

 private:
  void CheckCounts() const {
    const auto check = [&](const char* what, size_t found, size_t expected) {
      STD_TORCH_CHECK(found == expected, "bound run: ", name_, what, " are ", found,
                      ", and must be ", expected);
    };
    check("norms", a_.norms.size(), kNorms);
    check("epsilons", a_.eps.size(), kNorms);
    check("kinds of norms", a_.kinds.size(), kNorms);
    check("biases of norms", a_.norm_biases.size(), kNorms);
    // Of attention, of an MLP with or without a gate, of both, or of none.
    const size_t count = a_.weights.size(), of_mlp = a_.of_mlp();
    const bool part = of_mlp == 0 || of_mlp == 2 || of_mlp == kProjections - kGate;
    check("weights", count, part ? count : size_t{kProjections});
    check("biases", a_.biases.size(), count);
  }

  void CheckDetails() const {
    const DetailsArguments& of = a_.details;
    STD_TORCH_CHECK(of.factors.empty() || of.factors.size() == a_.weights.size(),
                    "bound run: ", name_, of.factors.size(), " factors of ", a_.weights.size(),
                    " matrices");
    STD_TORCH_CHECK(of.gates.size() <= 1 && of.chunk >= 0 && of.query_factors >= -1,
                    "bound run: ", name_, of.gates.size(), " matrices of gates, chunk ", of.chunk,
                    " and factors of queries ", of.query_factors,
                    "; there may be one matrix, a chunk of 0 or more and factors from -1 on");
    const bool none = of.no_attention && of.no_mlp;
    const bool both = (of.no_attention && (a_.attends() || a_.latent || a_.state)) ||
                      (of.no_mlp && (a_.of_mlp() > 0 || a_.experts));
    STD_TORCH_CHECK(!none && !both, "bound run: ", name_,
                    "attention or MLP is said to be missing: one of them, which has no matrices");
    const bool projected = a_.attends();
    STD_TORCH_CHECK(projected || (!of.sinks && of.gates.empty() && !of.normed_rotated),
                    "bound run: ", name_, "sinks, gates and norms need attention's projections");
  }

  int64_t Outputs(Projection projection) const {
    const std::optional<size_t> index = a_.Index(projection);
    if (!index) return 0;
    const WeightArguments& weight = a_.weights[*index];
    STD_TORCH_CHECK(weight.outputs() > 0, "bound run: ", name_, kProjectionNames[projection],
                    " must be (out, in); it is ", ShapeText(weight.tensors[0]));
    return weight.outputs();
  }

  void SetProjections(LayerParams* params) {
    const int64_t hidden = tensors_.hidden();
    const int64_t made = Outputs(kQ), kv = Outputs(kK), q = a_.gated ? made / 2 : made;
    const int64_t inner = Outputs(kUp);
    if (a_.latent) {
      params->latent =
          std::make_shared<Latent>(LatentOf(&tensors_, *a_.latent, name_, params->projections));
    }
    STD_TORCH_CHECK(params->asks_whole || params->no_attention || a_.latent ||
                        (a_.head_dim > 0 && q > 0 && kv > 0 && q % a_.head_dim == 0 &&
                         kv % a_.head_dim == 0 && q % kv == 0),
                    "bound run: ", name_, q, " queries and ", kv,
                    " keys of a token are not of heads of ", a_.head_dim);
    const int64_t shapes[kProjections][2] = {{made, hidden}, {kv, hidden},    {kv, hidden},
                                             {hidden, q},    {inner, hidden}, {inner, hidden},
                                             {hidden, inner}};
    for (size_t i = 0; i < kProjections; ++i) {
      const std::optional<size_t> index = a_.Index(i);
      if (!index) continue;
      const auto [outputs, inputs] = shapes[i];
      const std::string name = name_ + kProjectionNames[i];
      Matrix& matrix = params->projections[i];
      matrix = tensors_.MatrixOf(name, a_.weights[*index], outputs, inputs);
      const std::optional<Tensor>& bias = a_.biases[*index];
      if (bias) matrix.bias = tensors_.Data(name + "'s bias", *bias, {outputs});
      if (!a_.details.factors.empty()) {
        matrix.scale = static_cast<float>(a_.details.factors[*index]);
      }
    }
    SetGates(q, params);
    for (const LowRankArguments& added : a_.low_rank) {
      const std::string name = name_ + kProjectionNames[added.projection];
      tensors_.AddLowRank(name, added, &params->projections[added.projection]);
    }
  }

  // For each feature of attention's output, or each head.
  void SetGates(int64_t q, LayerParams* params) {
    if (a_.details.gates.empty()) return;
    const WeightArguments& weight = a_.details.gates[0];
    const int64_t gates = weight.outputs();
    STD_TORCH_CHECK(!a_.gated && (gates == q || gates == q / a_.head_dim), "bound run: ", name_,
                    gates, " gates are not one for each of ", q, " features or ", q / a_.head_dim,
                    " heads");
    params->gates.matrix = tensors_.MatrixOf(name_ + "gates", weight, gates, tensors_.hidden());
    params->gates.soft_plus = a_.details.soft_plus;
  }

  void SetNorms(LayerParams* params) {
    for (size_t i = 0; i < kNorms; ++i) {
      if (!a_.norms[i]) continue;
      const Tensor& weight = *a_.norms[i];
      const int64_t dim = weight.dim() == 1 ? weight.size(0) : 0;
      const int64_t all = i == kOfQueries ? params->queries()
                          : i == kOfKeys  ? params->projections[kK].outputs
                                          : tensors_.hidden();
      const bool of_heads = i == kOfQueries || i == kOfKeys;
      const int64_t expected = of_heads && dim == a_.head_dim ? dim : all;
      const void* data = tensors_.Data(name_ + kNormNames[i], weight, {expected});
      const void* bias = nullptr;
      if (const std::optional<Tensor>& added = a_.norm_biases[i]) {
        bias = tensors_.Data(name_ + kNormNames[i] + "'s bias", *added, {expected});
      }
      const int64_t kind = a_.kinds[i];
      params->norms[i] = {data,
                          expected,
                          static_cast<float>(a_.eps[i]),
                          (kind & kOffset) != 0,
                          (kind & kCentered) != 0,
                          bias};
    }
  }

  // As the op that stores checks them; heads of no token stand for those to come.
  void SetStores(LayerParams* params) {
    const int64_t heads = params->projections[kK].outputs / a_.head_dim;
    const Tensor none = NewEmpty(tensors_.like(), {1, 0, heads, a_.head_dim});
    const std::string op = "bound run: " + name_ + "stores";
    const AppendStores stores(
        op.c_str(), CheckedStore(op.c_str(), "k", a_.k_format, a_.k_stored, none, a_.paged),
        CheckedStore(op.c_str(), "v", a_.v_format, a_.v_stored, none, a_.paged));
    for (const std::vector<Tensor>* stored : {&a_.k_stored, &a_.v_stored}) {
      for (const Tensor& tensor : *stored) tensors_.Note(tensor);
    }
    AppendParams& append = params->append;
    append.dtype = *KernelFloatType(tensors_.like().scalar_type());
    append.heads = heads;
    append.dim = a_.head_dim;
    append.page = append.room = stores.k.tokens();
    append.pages = stores.k.rows();
    append.ring = a_.ring;
    params->paged = a_.paged;
    STD_TORCH_CHECK(!a_.paged || a_.ring == 0, "bound run: ", name_, "pages keep no ring");
    append.sides[0] = FillSide(stores.k, none, a_.k_stored);
    append.sides[1] = FillSide(stores.v, none, a_.v_stored);
    if (!a_.hadamard) return;
    append.block = HadamardBlock(append.dim);
    append.factor = HadamardFactor(append.block);
  }

  void SetAttention(LayerParams* params) {
    CheckScores("bound run", a_.scale, a_.window, a_.softcap);
    STD_TORCH_CHECK(a_.ring >= 0 && a_.rotary >= 0, "bound run: ", name_, "ring ", a_.ring,
                    " and rotary table ", a_.rotary, " must be 0 or more");
    const AppendSide &k = params->append.sides[0], &v = params->append.sides[1];
    AttentionParams& attention = params->attention;
    attention.dtype = params->append.dtype;
    attention.heads = params->queries() / a_.head_dim;
    attention.kv_heads = params->append.heads;
    attention.dim = a_.head_dim;
    attention.k = k.values;
    attention.v = v.values;
    attention.k_scale = k.scale;
    attention.v_scale = v.scale;
    attention.scale = static_cast<float>(a_.scale);
    attention.window = a_.window;
    attention.softcap = static_cast<float>(a_.softcap);
    const bool alike = k.format == v.format;
    attention.quantized = alike && k.format == KvFormat::kInt8;
    params->in_part =
        a_.paged || !alike || (k.format != KvFormat::kInt8 && k.format != KvFormat::kFloat);
    if (const std::optional<Tensor>& sinks = a_.details.sinks) {
      params->sinks = tensors_.Data(name_ + "sinks", *sinks, {attention.heads});
      params->in_part = true;
    }
    params->part.k = StoreOf(k, a_.k_stored[0]);
    params->part.v = StoreOf(v, a_.v_stored[0]);
  }

  PartStore StoreOf(const AppendSide& side, const Tensor& values) const {
    PartStore store{};
    store.format = side.format;
    store.items = side.items;
    store.item_bytes = static_cast<int64_t>(values.element_size());
    if (side.format == KvFormat::kFloat) store.dtype = *KernelFloatType(values.scalar_type());
    store.offset = side.offset;
    return store;
  }

  BoundTensors& tensors_;
  const LayerArguments& a_;
  const size_t index_;
  const std::string name_;
};

struct RunCall {
  const Tensor& x;  // ids int64 (B, T), or (B, T, hidden)
  const Tensor& past_lens;
  const std::optional<Tensor>& new_lens;
  int64_t kv_len;
  const std::vector<Tensor>& factors;  // cos and sin of each rotary table
  LogitRows wanted;
  // Of a run that asks: the space of the call so far, the answer, and to which question, from 1.
  const std::optional<Tensor>& space;
  const std::optional<Tensor>& answer;
  int64_t at;
  // Where layers have pools of pages, int32 (B, pages): which of them are a row's.
  const std::optional<Tensor>& block_table;
  // Where they have rows, int32 (B,): which of them each row is of.
  const std::optional<Tensor>& store_rows;
};

// What is bound, and the params that follow from it.
class BoundRun {
 public:
  BoundRun(const Tensor& like, int64_t hidden) : tensors_(like, hidden) {
    STD_TORCH_CHECK(KernelFloatType(like.scalar_type()).has_value(),
                    "bound run: must be of float32, float16 or bfloat16, not ",
                    torch::headeronly::toString(like.scalar_type()));
    Bind();
  }

  void Add(EmbeddingArguments embedding) {
    embedding_ = std::move(embedding);
    Bind();
  }
  void Add(LayerArguments layer) {
    layers_.push_back(std::move(layer));
    BindLayer(layers_.size() - 1);
  }
  // To the layer that was added last, which had no MLP.
  void Add(ExpertsArguments experts) {
    const bool there = !layers_.empty() && params_.layers.size() == layers_.size();
    STD_TORCH_CHECK(there && params_.layers.back().asks_mlp,
                    "bound run: there is no layer without an MLP for experts");
    Mixture mixture = MixtureOf(&tensors_, experts, layers_.size() - 1);
    LayerParams& layer = params_.layers.back();
    layer.mixture = std::make_shared<Mixture>(std::move(mixture));
    layer.asks_mlp = false;
    questions_.pop_back();
    if (layer.asks_experts()) {
      questions_.push_back({Begin::kAfterExperts, params_.layers.size() - 1});
    }
    layers_.back().experts = std::move(experts);
  }
  // To the layer that was added last.
  void Add(DetailsArguments details) {
    CheckLayer();
    LayerArguments with = layers_.back();
    with.details = std::move(details);
    Replace(std::move(with));
  }
  // To the layer that was added last, in the place of attention or beside it.
  void Add(StateArguments state) {
    CheckLayer();
    if (!IsBeside(state)) CheckAddsAttention("a state");
    STD_TORCH_CHECK(!IsBeside(state) || layers_.back().attends(),
                    "bound run: there is no attention for a state beside it");
    LayerArguments with = layers_.back();
    with.state = std::make_shared<const StateArguments>(std::move(state));
    Replace(std::move(with));
  }
  // To the layer that was added last, which had no attention; `stored`: what else that has.
  void Add(LatentArguments latent, LayerArguments stored) {
    CheckAddsAttention("that over latent vectors");
    STD_TORCH_CHECK(latent.weights.size() > 1, "bound run: attention over latent vectors has ",
                    latent.weights.size(), " matrices");
    LayerArguments with = layers_.back();
    with.head_dim = latent.weights[1].outputs();
    with.interleaved = stored.interleaved;
    with.rotary = stored.rotary;
    with.scale = stored.scale;
    with.window = stored.window;
    with.k_stored = with.v_stored = std::move(stored.k_stored);
    with.k_format = with.v_format = std::move(stored.k_format);
    with.ring = stored.ring;
    with.hadamard = stored.hadamard;
    with.paged = stored.paged;
    with.latent = std::move(latent);
    Replace(std::move(with));
  }
  void Add(HeadArguments head) {
    head_ = std::move(head);
    BindHead();
  }

  // To the layer that was added last, or to the head.
  void Add(LowRankArguments low_rank) {
    if (low_rank.projection == kLogits) {
      STD_TORCH_CHECK(head_.has_value(), "bound run: there is no head for a low-rank part");
      head_->low_rank.push_back(std::move(low_rank));
    } else {
      const auto of = static_cast<size_t>(low_rank.projection);
      const bool own =
          !layers_.empty() && low_rank.projection >= 0 && layers_.back().Index(of).has_value();
      const bool there = own || (!layers_.empty() && layers_.back().latent && of <= kOut);
      STD_TORCH_CHECK(there, "bound run: there is no projection ", low_rank.projection,
                      " for a low-rank part");
      layers_.back().low_rank.push_back(std::move(low_rank));
    }
    bound_ = false;  // until the next call, with all that is added by then
  }

  // Checks the call, makes the output and hands all on: run(params, call, space). Returns the
  // output; or the space, and what the next question is about.
  template <typename Run>
  std::vector<Tensor> Call(const RunCall& a, const Run& run) {
    // Once a call: what answers a question moves nothing.
    if (!bound_ || (a.at == 0 && !tensors_.InPlace())) Bind();
    for (const LayerParams& layer : params_.layers) {
      STD_TORCH_CHECK(layer.mixture == nullptr || layer.mixture->gate.weight != nullptr,
                      "bound run: experts without a router are for chosen_of_run alone");
    }
    CallParams call{};
    SetRows(a, &call);
    STD_TORCH_CHECK(call.rows >= tensors_.rows(), "bound run: ", call.rows,
                    " rows, and low-rank parts are for ", tensors_.rows());
    const Tensor past_lens = Contiguous(a.past_lens);
    std::optional<Tensor> new_lens;
    if (a.new_lens) new_lens = Contiguous(*a.new_lens);
    std::optional<Tensor> table;
    if (a.block_table) table = SetTable(a, &call);
    std::optional<Tensor> store_rows;
    if (a.store_rows) store_rows = Contiguous(*a.store_rows);
    CheckEnds(a, past_lens, new_lens, store_rows, &call);
    std::vector<Tensor> factors;
    for (const Tensor& factor : a.factors) factors.push_back(InLine(factor));
    SetRotary(factors, &call);
    call.wanted = head_ ? a.wanted : LogitRows::kNone;
    std::vector<int64_t> shape{call.rows, call.length, tensors_.hidden()};
    if (call.wanted != LogitRows::kNone) shape[2] = params_.logits.outputs;
    if (call.wanted == LogitRows::kLast) shape[1] = 1;
    std::vector<Tensor> outs = Outputs(a, shape, &call);
    const int64_t bytes = RunBytes(params_, call);
    Tensor space = a.at > 0 ? *a.space : NewEmpty(tensors_.like(), {bytes}, ScalarType::Byte);
    CheckSameDevice("bound run", "x", a.x, "space", space);
    STD_TORCH_CHECK(space.scalar_type() == ScalarType::Byte && space.numel() == bytes,
                    "bound run: the space of this call is ", space.numel(), " bytes, and must be ",
                    bytes);
    run(params_, call, static_cast<char*>(space.mutable_data_ptr()));
    if (static_cast<size_t>(a.at) < questions_.size()) outs.insert(outs.begin(), space);
    return outs;
  }

  // What the experts of the only layer answer to x (..., hidden), by choices (..., K) of theirs:
  // run(params, call). Returns the weighted sums (..., hidden), or each choice's part,
  // (..., K, hidden). Choices are added to `counts` (experts).
  template <typename Run>
  Tensor Chosen(const Tensor& x, const Tensor& chosen, const Tensor& weights, bool sum,
                const std::optional<Tensor>& counts, const Run& run) {
    if (!bound_ || !tensors_.InPlace()) Bind();
    const bool only = params_.layers.size() == 1 && params_.layers[0].mixture != nullptr &&
                      params_.layers[0].mixture->gate.weight == nullptr;
    STD_TORCH_CHECK(only, "bound run: one layer of experts alone is asked for their answers");
    const RouterParams& router = params_.layers[0].mixture->router;
    CheckAlike("bound run", "the run", tensors_.like(), "x", x);
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    if (shape.empty()) shape.push_back(0);
    const auto of = [&](int64_t last) {
      shape.back() = last;
      return Sizes{shape.data(), shape.size()};
    };
    CheckContiguous("bound run", "x", x, tensors_.dtype(), of(params_.hidden));
    CheckContiguous("bound run", "chosen", chosen, ScalarType::Long, of(router.top_k));
    CheckContiguous("bound run", "weights", weights, ScalarType::Float, of(router.top_k));
    const int64_t rows = chosen.numel() / router.top_k;
    ChosenCall call{};
    call.rows = rows;
    call.x = x.const_data_ptr();
    call.chosen = chosen.const_data_ptr<int64_t>();
    call.weights = weights.const_data_ptr<float>();
    call.sum = sum;
    CheckChoices(call, *params_.layers[0].mixture);
    if (counts) {
      CheckContiguous("bound run", "counts", *counts, ScalarType::Long, {router.experts});
      auto* tally = counts->mutable_data_ptr<int64_t>();
      for (int64_t i = 0; i < chosen.numel(); ++i) ++tally[call.chosen[i]];
    }
    if (!sum) shape.push_back(0);
    if (!sum) shape[shape.size() - 2] = router.top_k;
    Tensor out = NewEmpty(tensors_.like(), of(params_.hidden));
    call.out = out.mutable_data_ptr();
    if (rows > 0) run(params_, call);
    return out;
  }

  FloatType dtype() const { return params_.dtype; }

 private:
  void CheckLayer() const {
    STD_TORCH_CHECK(!layers_.empty() && params_.layers.size() == layers_.size(),
                    "bound run: there is no layer to add to");
  }

  // Experts that there are, none twice for a token; a sum's are all here.
  static void CheckChoices(const ChosenCall& call, const Mixture& of) {
    const RouterParams& router = of.router;
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t* own = call.chosen + row * router.top_k;
      for (int64_t i = 0; i < router.top_k; ++i) {
        const bool there = own[i] >= 0 && own[i] < router.experts;
        STD_TORCH_CHECK(there && std::find(own, own + i, own[i]) == own + i,
                        "experts: chosen must name experts 0 to ", router.experts - 1,
                        ", none twice for a token");
        STD_TORCH_CHECK(!call.sum || of.experts[own[i]].down.weight != nullptr,
                        "experts: a sum of expert ", own[i], ", whose matrices are elsewhere");
      }
    }
  }

  void CheckAddsAttention(const char* what) const {
    const bool there = !layers_.empty() && params_.layers.size() == layers_.size();
    STD_TORCH_CHECK(there && params_.layers.back().asks_whole,
                    "bound run: there is no layer without attention for ", what);
  }

  // In the place of the layer that was added last.
  void Replace(LayerArguments with) {
    const size_t index = layers_.size() - 1;
    LayerParams params = LayerBinding(&tensors_, with, index).Params();
    while (!questions_.empty() && questions_.back().layer == index) questions_.pop_back();
    params_.layers.back() = std::move(params);
    layers_.back() = std::move(with);
    PutQuestions(index);
  }

  struct Question {
    Begin begin;  // with the answer
    size_t layer;
  };

  // Where the call begins, and tensors for what it gives.
  std::vector<Tensor> Outputs(const RunCall& a, const std::vector<int64_t>& shape,
                              CallParams* call) const {
    const auto questions = static_cast<int64_t>(questions_.size());
    STD_TORCH_CHECK(a.at >= 0 && a.at <= questions, "bound run: there is no question ", a.at,
                    "; there are ", questions);
    STD_TORCH_CHECK(a.at == 0 || (a.space && a.answer), "bound run: question ", a.at,
                    " needs an answer, and the space of the call");
    call->begin = Begin::kStart;
    if (a.at > 0) SetAnswer(a, call);
    std::vector<Tensor> outs;
    const auto make = [&](int64_t last) {
      outs.push_back(NewEmpty(tensors_.like(), {call->rows, call->length, last}));
      return outs.back().mutable_data_ptr();
    };
    if (a.at == questions) {
      outs.push_back(NewEmpty(tensors_.like(), {shape.data(), shape.size()}));
      call->out = outs.back().mutable_data_ptr();
      return outs;
    }
    const Question& next = questions_[a.at];
    const Matrix* of = params_.layers[next.layer].projections;
    call->asking = next.layer;
    call->asks_attention = next.begin == Begin::kAfterAttention;
    if (!call->asks_attention || params_.layers[next.layer].asks_whole) {
      call->y = make(params_.hidden);
    } else {
      call->q = make(params_.layers[next.layer].queries());
      call->k = make(of[kK].outputs);
      call->v = make(of[kV].outputs);
    }
    if (next.begin == Begin::kAfterExperts) {
      const int64_t top_k = params_.layers[next.layer].mixture->router.top_k;
      const int64_t choices[] = {call->rows, call->length, top_k};
      outs.push_back(NewEmpty(tensors_.like(), {choices, 3}, ScalarType::Long));
      call->chosen = outs.back().mutable_data_ptr<int64_t>();
      outs.push_back(NewEmpty(tensors_.like(), {choices, 3}, ScalarType::Float));
      call->weights = outs.back().mutable_data_ptr<float>();
    }
    return outs;
  }

  void SetAnswer(const RunCall& a, CallParams* call) const {
    const Question& asked = questions_[a.at - 1];
    const Matrix& out = params_.layers[asked.layer].projections[kOut];
    const bool whole = params_.layers[asked.layer].asks_whole;
    const bool hidden = whole || asked.begin == Begin::kAfterMlp;
    const int64_t last = hidden ? params_.hidden : out.inputs;
    const Tensor& answer = *a.answer;
    CheckAlike("bound run", "the run", tensors_.like(), "the answer", answer);
    std::vector<int64_t> shape{call->rows, call->length, last};
    if (asked.begin == Begin::kAfterExperts) {
      shape = {call->rows, call->length, params_.layers[asked.layer].mixture->router.top_k,
               params_.hidden};
    }
    bool fits = answer.is_contiguous() && answer.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = answer.size(static_cast<int64_t>(i)) == shape[i];
    }
    STD_TORCH_CHECK(fits, "bound run: the answer for layer ", asked.layer, " must be contiguous ",
                    SizesText({shape.data(), shape.size()}), "; it is ", ShapeText(answer));
    call->begin = asked.begin;
    call->layer = asked.layer;
    call->answer = answer.const_data_ptr();
  }

  void Bind() {
    bound_ = false;
    questions_.clear();
    tensors_.Clear();
    params_ = RunParams{};
    params_.dtype = *KernelFloatType(tensors_.like().scalar_type());
    params_.hidden = tensors_.hidden();
    if (embedding_) {
      const WeightArguments& table = embedding_->table;
      STD_TORCH_CHECK(table.hadamard == 0, "bound run: the embedding table is of transformed rows");
      STD_TORCH_CHECK(table.outputs() > 0, "bound run: the embedding table must be (vocabulary, ",
                      params_.hidden, "); it is ", ShapeText(table.tensors[0]));
      vocabulary_ = table.outputs();
      params_.table = tensors_.MatrixOf("embedding table", table, vocabulary_, params_.hidden);
      params_.scale = static_cast<float>(embedding_->scale);
    }
    for (size_t layer = 0; layer < layers_.size(); ++layer) BindLayer(layer);
    if (head_) BindHead();
    bound_ = true;
  }

  void BindLayer(size_t index) {
    params_.layers.push_back(LayerBinding(&tensors_, layers_[index], index).Params());
    PutQuestions(index);
  }

  void PutQuestions(size_t index) {
    const LayerParams& layer = params_.layers.back();
    if (layer.asks_attention) questions_.push_back({Begin::kAfterAttention, index});
    if (layer.asks_mlp) questions_.push_back({Begin::kAfterMlp, index});
    if (layer.asks_experts()) questions_.push_back({Begin::kAfterExperts, index});
  }

  void BindHead() {
    const int64_t hidden = params_.hidden;
    const void* norm = tensors_.Data("last norm", head_->norm, {hidden});
    const void* added = nullptr;
    if (head_->norm_bias) added = tensors_.Data("last norm's bias", *head_->norm_bias, {hidden});
    params_.last_norm = {norm,
                         hidden,
                         static_cast<float>(head_->eps),
                         (head_->kind & kOffset) != 0,
                         (head_->kind & kCentered) != 0,
                         added};
    const WeightArguments& weight = head_->weight;
    Matrix& logits = params_.logits;
    logits = tensors_.MatrixOf("projection to logits", weight, weight.outputs(), hidden);
    if (head_->bias) {
      logits.bias = tensors_.Data("the logits' bias", *head_->bias, {logits.outputs});
    }
    for (const LowRankArguments& added : head_->low_rank) {
      tensors_.AddLowRank("projection to logits", added, &logits);
    }
  }

  void SetRows(const RunCall& a, CallParams* call) const {
    const bool by_ids = params_.table.weight != nullptr;
    STD_TORCH_CHECK(a.x.device() == tensors_.like().device(), "bound run: x is on ",
                    DeviceName(a.x), " and the run on ", DeviceName(tensors_.like()));
    const bool fits = by_ids ? a.x.dim() == 2 && a.x.scalar_type() == ScalarType::Long
                             : a.x.dim() == 3 && a.x.size(2) == params_.hidden &&
                                   a.x.scalar_type() == tensors_.like().scalar_type();
    STD_TORCH_CHECK(fits && a.x.is_contiguous(), "bound run: x must be ",
                    by_ids ? "token ids, int64 (B, T)" : "hidden states (B, T, hidden)",
                    ", contiguous and of the run's dtype; it is ",
                    torch::headeronly::toString(a.x.scalar_type()), " ", ShapeText(a.x));
    call->rows = a.x.size(0);
    call->length = a.x.size(1);
    call->kv_len = a.kv_len;
    if (!by_ids) {
      call->x = a.x.const_data_ptr();
      return;
    }
    call->ids = a.x.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < call->tokens(); ++i) {
      STD_TORCH_CHECK(call->ids[i] >= 0 && call->ids[i] < vocabulary_, "bound run: token id ",
                      call->ids[i], " is outside the vocabulary of ", vocabulary_);
    }
  }

  static Tensor SetTable(const RunCall& a, CallParams* call) {
    const Tensor& given = *a.block_table;
    STD_TORCH_CHECK(given.scalar_type() == ScalarType::Int && given.dim() == 2 &&
                        given.size(0) == call->rows && given.device() == a.x.device(),
                    "bound run: block_table must be int32 (", call->rows,
                    ", pages) beside x; it is ", torch::headeronly::toString(given.scalar_type()),
                    " ", ShapeText(given));
    Tensor table = Contiguous(given);
    call->block_table = table.const_data_ptr<int32_t>();
    call->table_row = table.size(1);
    return table;
  }

  // Every entry that is read or written names a page.
  static void CheckPages(const AppendParams& append, size_t layer, const CallParams& call) {
    STD_TORCH_CHECK(call.block_table != nullptr, "bound run: layer ", layer,
                    " has pages, and the call no block_table");
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t end = call.End(row), pages = (end + append.page - 1) / append.page;
      STD_TORCH_CHECK(pages <= call.table_row, "bound run: row ", row, " has ", end,
                      " tokens, and block_table ", call.table_row, " pages of ", append.page);
      for (int64_t entry = 0; entry < pages; ++entry) {
        const int32_t found = call.block_table[row * call.table_row + entry];
        STD_TORCH_CHECK(found >= 0 && found < append.pages, "bound run: block_table's row ", row,
                        " has ", found, " as entry ", entry, "; layer ", layer, " has ",
                        append.pages, " pages, 0 to ", append.pages - 1);
      }
    }
  }

  // Every row is one of the layer's.
  static void CheckStoreRows(const AppendParams& append, size_t layer, const CallParams& call) {
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t own = StoreRow(call.store_rows, row);
      STD_TORCH_CHECK(own >= 0 && own < append.pages, "bound run: layer ", layer,
                      " has no room for row ", row, ", which is its row ", own, ": it has ",
                      append.pages, " rows of ", append.room);
    }
  }

  // Every row's tokens have their places, in every layer.
  void CheckEnds(const RunCall& a, const Tensor& past_lens, const std::optional<Tensor>& new_lens,
                 const std::optional<Tensor>& store_rows, CallParams* call) const {
    const auto numbers = [&](const char* name, const Tensor& x) {
      CheckRowNumbers("bound run", name, x, "x", a.x, call->rows);
      return x.const_data_ptr<int32_t>();
    };
    call->past_lens = numbers("past_lens", past_lens);
    call->new_lens = new_lens ? numbers("new_lens", *new_lens) : nullptr;
    call->store_rows = store_rows ? numbers("store_rows", *store_rows) : nullptr;
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t past = call->past_lens[row];
      const int64_t tokens = call->new_lens ? call->new_lens[row] : call->length;
      STD_TORCH_CHECK(
          past >= 0 && tokens >= 0 && tokens <= call->length && past + tokens <= call->kv_len,
          "bound run: row ", row, " has ", past, " tokens and gets ", tokens, " of ", call->length,
          ", but kv_len is ", call->kv_len);
    }
    int64_t page = 0, pages = 0;
    for (size_t layer = 0; layer < params_.layers.size(); ++layer) {
      if (const auto& mixer = params_.layers[layer].mixer) {
        STD_TORCH_CHECK(call->rows <= mixer->rows && call->store_rows == nullptr,
                        "bound run: layer ", layer, " has states of ", mixer->rows,
                        " rows, and the call ", call->rows,
                        call->store_rows == nullptr ? "" : " that are tokens of some");
      }
      if (params_.layers[layer].asks_attention || !params_.layers[layer].attends()) continue;
      CheckChunk(params_.layers[layer].chunk, layer, *call);
      const AppendParams& append = params_.layers[layer].append;
      if (params_.layers[layer].paged) {
        // Layers of one cache have pools of one shape: looked at once.
        if (page != append.page || pages != append.pages) CheckPages(append, layer, *call);
        page = append.page;
        pages = append.pages;
        continue;
      }
      const bool ring = append.ring > 0;
      const int64_t kept = ring ? std::min(append.ring, call->kv_len) : call->kv_len;
      CheckStoreRows(append, layer, *call);
      STD_TORCH_CHECK(kept <= append.room && kept > 0, "bound run: layer ", layer,
                      " has no room for ", kept, " tokens in ", call->rows, " rows: it has ",
                      append.pages, " of ", append.room);
      STD_TORCH_CHECK(!ring || (call->length == 1 && call->store_rows == nullptr),
                      "bound run: layer ", layer,
                      " keeps a ring, which takes a token of a row at a time, not ", call->length);
    }
  }

  // Attention in chunks of positions has a window for all rows.
  static void CheckChunk(int64_t chunk, size_t layer, const CallParams& call) {
    if (chunk == 0 || call.kv_len <= chunk) return;
    const int32_t past = call.past_lens[0];
    const bool alike = std::all_of(call.past_lens, call.past_lens + call.rows,
                                   [&](int32_t other) { return other == past; });
    STD_TORCH_CHECK(alike && call.length == 1, "bound run: layer ", layer, " has chunks of ", chunk,
                    " positions; of ", call.kv_len, " it takes a token ",
                    "of each row, and rows of one length");
  }

  void SetRotary(const std::vector<Tensor>& factors, CallParams* call) const {
    for (size_t i = 0; i + 1 < factors.size(); i += 2) {
      const Tensor &cos = factors[i], &sin = factors[i + 1];
      CheckSameShape("bound run", "cos", cos, "sin", sin);
      for (const Tensor* x : {&cos, &sin}) {
        CheckAlike("bound run", "the run", tensors_.like(), "cos or sin", *x);
        STD_TORCH_CHECK(x->dim() == 3 && (x->size(0) == call->rows || x->size(0) == 1) &&
                            x->size(1) == call->length && (x->size(2) % 2 == 0 || x->size(2) == 1),
                        "bound run: cos and sin must be (", call->rows, ", ", call->length,
                        ", R), R even, or 1 for factors of queries; they are ", ShapeText(*x));
      }
      call->rotary.push_back({cos.size(2), FactorView(cos), FactorView(sin)});
    }
    for (size_t layer = 0; layer < params_.layers.size(); ++layer) {
      const LayerParams& params = params_.layers[layer];
      if (params.asks_whole || !params.attends()) continue;
      const auto given = static_cast<int64_t>(call->rotary.size());
      const int64_t most = params.latent == nullptr ? params.dim : params.latent->rotated;
      const int64_t width = params.rotary < given ? call->rotary[params.rotary].width : 0;
      STD_TORCH_CHECK(width > 1 && width <= most, "bound run: layer ", layer, " rotates ", most,
                      " features by table ", params.rotary, " of ", given);
      STD_TORCH_CHECK(params.query_factors < given, "bound run: layer ", layer,
                      " multiplies queries by table ", params.query_factors, " of ", given);
    }
  }

  BoundTensors tensors_;
  std::optional<EmbeddingArguments> embedding_;
  std::vector<LayerArguments> layers_;
  std::optional<HeadArguments> head_;
  int64_t vocabulary_ = 0;
  std::vector<Question> questions_;  // in the order in which they come
  RunParams params_;
  bool bound_ = false;  // not where what was bound once no longer fits
};

// Runs by their handles, for all threads.
class BoundRuns {
 public:
  int64_t Add(std::shared_ptr<BoundRun> run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    runs_.emplace(next_, std::move(run));
    return next_++;
  }

  // Stays while the caller has it, whoever releases it meanwhile.
  std::shared_ptr<BoundRun> Find(const Tensor& handle) {
    STD_TORCH_CHECK(handle.scalar_type() == ScalarType::Long && handle.numel() >= 1,
                    "bound run: a handle is an int64 number; this is ", ShapeText(handle), " of ",
                    torch::headeronly::toString(handle.scalar_type()));
    const int64_t number = *handle.const_data_ptr<int64_t>();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = runs_.find(number);
    STD_TORCH_CHECK(found != runs_.end(), "bound run: there is none with the handle ", number,
                    ": it is what new_run returned, until release_run takes it");
    return found->second;
  }

  void Release(const Tensor& handle) {
    const std::shared_ptr<BoundRun> last = Find(handle);  // let go without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    runs_.erase(*handle.const_data_ptr<int64_t>());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<BoundRun>> runs_;
  int64_t next_ = 0;
};

}  // namespace exkv

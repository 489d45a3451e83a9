// Between torch and the layers with a state of bound runs: checks what is bound, fills the params.
// Part of decoder_binding.h, whose BoundTensors it uses. What the arguments are:
// exkv/ops/bound_run.py.
#pragma once

#include "../cpu/state_mixer.h"
#include "recurrent_binding.h"

namespace exkv {

struct StateArguments {
  std::string rule;
  // Of all projections, those of a selection behind the inputs, and that of the output last.
  std::vector<WeightArguments> weights;
  std::vector<std::optional<Tensor>> biases;
  std::vector<int64_t> sources;
  std::vector<int64_t> outputs;  // of times, gate, step and beta, and of what is convolved
  Tensor conv;
  std::optional<Tensor> conv_bias;
  std::optional<Tensor> step_bias;
  std::optional<Tensor> rates;
  std::optional<Tensor> skip;
  std::vector<Tensor> norms;  // one, or none; or three of a selection
  double eps;
  std::string gating;
  bool sigmoid;
  int64_t groups;
  int64_t order;
  double largest_beta;
  double least_step;
  double most_step;
  Tensor inputs;
  std::optional<Tensor> state;
  std::vector<double> factors;  // of each projection's outputs
  double input_scale;
  bool beside;
};

inline bool IsBeside(const StateArguments& state) { return state.beside; }

// The params of one layer.
class MixerBinding {
 public:
  MixerBinding(BoundTensors* tensors, const StateArguments& a, size_t layer)
      : tensors_(*tensors), a_(a), name_("layer " + std::to_string(layer) + "'s ") {}

  StateMixer Params() {
    m_.rule = RuleOf();
    SetProjections();
    SetOutputs();
    SetConv();
    if (m_.rule == StateRule::kScan) {
      SetScan();
    } else if (m_.rule != StateRule::kConv) {
      SetRecurrence();
    }
    m_.out = MatrixOf("output", a_.weights.size() - 1, tensors_.hidden(), m_.inner());
    m_.input_scale = static_cast<float>(a_.input_scale);
    CheckWidths();
    return m_;
  }

 private:
  template <typename... Parts>
  void Check(bool right, const Parts&... parts) const {
    STD_TORCH_CHECK(right, "bound run: ", name_, parts...);
  }

  StateRule RuleOf() const {
    constexpr const char* kNames[] = {"delta", "ssd", "scan", "conv"};
    constexpr StateRule kRules[] = {StateRule::kDelta, StateRule::kSsd, StateRule::kScan,
                                    StateRule::kConv};
    for (size_t i = 0; i < 4; ++i) {
      if (a_.rule == kNames[i]) return kRules[i];
    }
    Check(false, "rule is ", a_.rule, "; it must be delta, ssd, scan or conv");
    return StateRule::kConv;
  }

  Gating GatingOf() const {
    constexpr const char* kNames[] = {"norm_then_gate", "gate_then_norm", "normed_and_gated",
                                      "gate"};
    constexpr Gating kOrders[] = {Gating::kNormThenGate, Gating::kGateThenNorm,
                                  Gating::kNormedAndGated, Gating::kGate};
    for (size_t i = 0; i < 4; ++i) {
      if (a_.gating == kNames[i]) return kOrders[i];
    }
    Check(false, "gating is ", a_.gating, "; it must be norm_then_gate, gate_then_norm, ",
          "normed_and_gated or gate");
    return Gating::kGate;
  }

  void SetProjections() {
    const size_t count = a_.weights.size(), others = m_.rule == StateRule::kScan ? 3 : 1;
    Check(count > others && count - others <= kMostInputs && a_.biases.size() == count &&
              a_.sources.size() == count - others && a_.factors.size() == count,
          "layer with a state has ", count, " projections, ", a_.biases.size(), " biases, ",
          a_.factors.size(), " factors and ", a_.sources.size(), " sources; it takes ", 1 + others,
          " to ", kMostInputs + others,
          " projections, a bias and a factor each, and a source of all but the last ", others);
    m_.sources = a_.sources;
    for (size_t i = 0; i + others < count; ++i) {
      const int64_t source = a_.sources[i], outputs = a_.weights[i].outputs();
      Check(source < static_cast<int64_t>(i) && outputs > 0, "projection ", i, " of projection ",
            source, " must come behind it, and be (out, in); it is ",
            ShapeText(a_.weights[i].tensors[0]));
      const int64_t inputs = source < 0 ? tensors_.hidden() : m_.inputs[source].outputs;
      m_.inputs.push_back(MatrixOf("projection " + std::to_string(i), i, outputs, inputs));
    }
  }

  Matrix MatrixOf(const std::string& what, size_t index, int64_t outputs, int64_t inputs) {
    const std::string name = name_ + what;
    Matrix matrix = tensors_.MatrixOf(name, a_.weights[index], outputs, inputs);
    const std::optional<Tensor>& bias = a_.biases[index];
    if (bias) matrix.bias = tensors_.Data(name + "'s bias", *bias, {outputs});
    matrix.scale = static_cast<float>(a_.factors[index]);
    return matrix;
  }

  void SetOutputs() {
    constexpr size_t kNumbers = 5, kNamed = 4;
    const size_t count = a_.outputs.size() / kNumbers;
    Check(a_.outputs.size() % kNumbers == 0 && count > kNamed && count <= kNamed + kConvInputs,
          a_.outputs.size(), " numbers are not ", kNumbers, " of each of ", kNamed + 1, " to ",
          kNamed + kConvInputs, " parts of projections");
    Outputs* const named[kNamed] = {&m_.times, &m_.gate, &m_.step, &m_.beta};
    for (size_t i = 0; i < count; ++i) {
      const int64_t* from = a_.outputs.data() + kNumbers * i;
      const Outputs of{from[0], from[1], from[2], from[3], from[4]};
      if (of.projection >= 0 || i >= kNamed) CheckOutputs(of);
      if (i < kNamed) {
        *named[i] = of.projection < 0 ? Outputs{-1, 0, 1, 0, 0} : of;
      } else {
        m_.mixed.push_back(of);
      }
    }
  }

  void CheckOutputs(const Outputs& of) const {
    const auto count = static_cast<int64_t>(m_.inputs.size());
    const bool there = of.projection >= 0 && of.projection < count;
    const int64_t all = there ? m_.inputs[of.projection].outputs : 0;
    const bool sane = there && of.offset >= 0 && of.size > 0 && of.count > 0 && of.step >= 0 &&
                      std::max({of.offset, of.size, of.count, of.step}) <= all;
    Check(sane && of.offset + (of.count - 1) * of.step + of.size <= all, of.count, " heads of ",
          of.size, " from ", of.offset, ", ", of.step, " apart, are not among the ", all,
          " outputs of projection ", of.projection);
  }

  void SetConv() {
    ConvRowsParams& conv = m_.conv;
    const Tensor& weight = a_.conv;
    Check(weight.dim() == 3 && weight.size(1) == 1 && weight.size(2) > 0,
          "convolution must be (C, 1, K); it is ", ShapeText(weight));
    conv.dtype = *KernelFloatType(tensors_.dtype());
    conv.channels = weight.size(0);
    conv.taps = weight.size(2);
    conv.weight = tensors_.Data(name_ + "convolution", weight, {conv.channels, 1, conv.taps});
    if (a_.conv_bias) {
      conv.bias = tensors_.Data(name_ + "convolution's bias", *a_.conv_bias, {conv.channels});
    }
    conv.silu = m_.rule != StateRule::kConv;
    for (size_t i = 0; i < m_.mixed.size(); ++i) {
      conv.ends[i] = (i > 0 ? conv.ends[i - 1] : 0) + m_.mixed[i].width();
    }
    m_.rows = a_.inputs.dim() == 3 ? a_.inputs.size(0) : 0;
    conv.state = StateOf("inputs of the convolution", a_.inputs, tensors_.dtype(),
                         {m_.rows, conv.taps - 1, conv.channels}, &conv.state_row);
  }

  // All rows' states, which may lie apart.
  void* StateOf(const char* what, const Tensor& x, ScalarType dtype, Sizes shape, int64_t* step) {
    const std::string label = "bound run: " + name_ + what;
    CheckSameDevice(label.c_str(), "the state", x, "the run", tensors_.like());
    bool fits = x.scalar_type() == dtype && x.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) {
      fits = x.size(static_cast<int64_t>(i)) == shape[i];
    }
    STD_TORCH_CHECK(fits, label, " are ", torch::headeronly::toString(x.scalar_type()), " ",
                    ShapeText(x), ", and must be ", torch::headeronly::toString(dtype), " ",
                    SizesText(shape));
    CheckContiguousRows(label.c_str(), x);
    tensors_.Note(x);
    *step = x.stride(0);
    return x.mutable_data_ptr();
  }

  void SetRecurrence() {
    const bool alone = GatingOf() == Gating::kGate;
    Check(a_.state && a_.state->dim() == 4 && a_.step_bias && a_.rates &&
              a_.norms.size() == (alone ? 0 : 1) && a_.groups > 0,
          "recurrence needs a state (B, H, keys, values), step_bias, rates, a norm and groups");
    m_.heads = a_.state->size(1);
    m_.keys = a_.state->size(2);
    m_.values = a_.state->size(3);
    Check(m_.heads % a_.groups == 0 && m_.heads > 0, m_.heads, " heads are not those of ",
          a_.groups, " groups");
    m_.sharing = m_.heads / a_.groups;
    m_.state = static_cast<float*>(StateOf("states", *a_.state, ScalarType::Float,
                                           {m_.rows, m_.heads, m_.keys, m_.values}, &m_.state_row));
    const bool delta = m_.rule == StateRule::kDelta;
    m_.channels = delta && m_.step.width() == m_.heads * m_.keys ? m_.keys : 1;
    m_.step_bias = NumbersOf("bias of steps", *a_.step_bias, m_.heads * m_.channels);
    m_.rates = NumbersOf("rates", *a_.rates, m_.heads);
    if (!delta) {
      Check(a_.skip.has_value(), "recurrence needs what skips it");
      m_.skip = static_cast<const float*>(
          tensors_.Data(name_ + "skip", *a_.skip, {m_.heads}, ScalarType::Float));
    }
    m_.least_step = static_cast<float>(a_.least_step);
    m_.most_step = static_cast<float>(a_.most_step);
    m_.largest_beta = static_cast<float>(a_.largest_beta);
    SetNorm(delta);
  }

  // Of the selective scan, whose channels are what the convolution gives.
  void SetScan() {
    Check(
        a_.state && a_.state->dim() == 3 && a_.rates && a_.skip && a_.norms.size() == 3 &&
            GatingOf() == Gating::kGate,
        "scan needs a state (B, N, channels), rates, what skips it, three norms and a gate alone");
    m_.heads = m_.sharing = 1;
    m_.keys = a_.state->size(1);
    m_.channels = m_.values = m_.conv.channels;
    m_.state = static_cast<float*>(StateOf("states", *a_.state, ScalarType::Float,
                                           {m_.rows, m_.keys, m_.values}, &m_.state_row));
    m_.rates = NumbersOf("rates", *a_.rates, m_.values * m_.keys);
    m_.skip = static_cast<const float*>(
        tensors_.Data(name_ + "skip", *a_.skip, {m_.values}, ScalarType::Float));
    Selection& of = m_.selection;
    const Tensor& first = a_.norms[0];
    const int64_t rank = first.dim() == 1 ? first.size(0) : 0;
    const int64_t dims[] = {rank, m_.keys, m_.keys};
    for (size_t i = 0; i < 3; ++i) {
      const void* data = tensors_.Data(name_ + "norm of a selection", a_.norms[i], {dims[i]});
      of.norms[i] = {data, dims[i], static_cast<float>(a_.eps), false, false, nullptr};
    }
    const size_t count = m_.inputs.size();
    of.low = MatrixOf("selection", count, rank + 2 * m_.keys, m_.values);
    of.steps = MatrixOf("steps", count + 1, m_.values, rank);
    GatedNormParams& norm = m_.norm;
    norm.dtype = m_.conv.dtype;
    norm.groups = norm.heads = 1;
    norm.dim = m_.values;
    norm.gating = Gating::kGate;
    Check(m_.gate.size % norm.dim == 0, "gates of ", m_.gate.size, " side by side are not of ",
          norm.dim);
  }

  // A vector in one of two types, of any shape.
  Numbers NumbersOf(const char* what, const Tensor& x, int64_t count) {
    const bool wide = x.scalar_type() == ScalarType::Float;
    Check(x.numel() == count, what, " are ", x.numel(), " numbers, and must be ", count);
    std::vector<int64_t> shape;
    for (int64_t i = 0; i < x.dim(); ++i) shape.push_back(x.size(i));
    const void* data = tensors_.Data(name_ + what, x, {shape.data(), shape.size()},
                                     wide ? ScalarType::Float : tensors_.dtype());
    return {data, wide ? FloatType::kFloat32 : m_.conv.dtype};
  }

  void SetNorm(bool delta) {
    GatedNormParams& norm = m_.norm;
    norm.dtype = m_.conv.dtype;
    norm.gating = GatingOf();
    norm.groups = delta || a_.norms.empty() ? m_.heads : a_.groups;
    norm.dim = m_.inner() / norm.groups;
    if (!a_.norms.empty()) {
      norm.weight = tensors_.Data(name_ + "norm", a_.norms[0], {delta ? norm.dim : m_.inner()});
      norm.weight_step = delta ? 0 : norm.dim;
    }
    norm.eps = static_cast<float>(a_.eps);
    norm.sigmoid = a_.sigmoid;
    norm.heads = a_.order;
    Check(a_.order > 0 && norm.groups % a_.order == 0, norm.groups, " heads have no order by ",
          a_.order);
    Check(m_.gate.size % norm.dim == 0, "gates of ", m_.gate.size, " side by side are not of ",
          norm.dim);
  }

  void CheckWidths() const {
    const auto check = [&](const char* what, int64_t found, int64_t expected) {
      Check(found == expected, what, " are ", found, " outputs, and must be ", expected);
    };
    const bool recurs = m_.rule != StateRule::kConv;
    const int64_t channels = m_.conv.channels;
    check("inputs of the convolution", m_.conv.ends[m_.mixed.size() - 1], channels);
    check("gates", m_.gate.width(), m_.inner());
    if (m_.times.projection >= 0) check("factors of inputs", m_.times.width(), channels);
    if (!recurs || m_.rule == StateRule::kScan) return;
    check("channels of the convolution", channels, m_.inner() + 2 * a_.groups * m_.keys);
    check("steps", m_.step.width(), m_.heads * m_.channels);
    if (m_.rule == StateRule::kDelta) check("betas", m_.beta.width(), m_.heads);
  }

  BoundTensors& tensors_;
  const StateArguments& a_;
  const std::string name_;
  StateMixer m_{};
};

}  // namespace exkv

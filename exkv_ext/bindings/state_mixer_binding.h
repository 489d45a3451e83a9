// Between torch and the layers with a state of bound runs: checks what is bound, fills the params.
// Part of decoder_binding.h, whose BoundTensors it uses. What the arguments are:
// exkv/ops/bound_run.py.
#pragma once

#include "../cpu/state_mixer.h"
#include "recurrent_binding.h"

namespace exkv {

struct StateArguments {
  std::string rule;
  std::vector<WeightArguments> weights;  // of all projections, that of the output last
  std::vector<std::optional<Tensor>> biases;
  std::vector<int64_t> sources;
  std::vector<int64_t> outputs;  // of times, gate, step and beta, and of what is convolved
  Tensor conv;
  std::optional<Tensor> conv_bias;
  std::optional<Tensor> step_bias;
  std::optional<Tensor> rates;
  std::optional<Tensor> skip;
  std::optional<Tensor> norm;
  double eps;
  bool sigmoid;
  int64_t groups;
  int64_t order;
  double largest_beta;
  double least_step;
  double most_step;
  Tensor inputs;
  std::optional<Tensor> state;
};

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
    if (m_.rule != StateRule::kConv) SetRecurrence();
    const auto count = static_cast<int64_t>(m_.inputs.size());
    const std::string out = name_ + "output";
    m_.out = tensors_.MatrixOf(out, a_.weights[count], tensors_.hidden(), m_.inner());
    SetBias(out, count, &m_.out);
    CheckWidths();
    return m_;
  }

 private:
  template <typename... Parts>
  void Check(bool right, const Parts&... parts) const {
    STD_TORCH_CHECK(right, "bound run: ", name_, parts...);
  }

  StateRule RuleOf() const {
    Check(a_.rule == "delta" || a_.rule == "ssd" || a_.rule == "conv", "rule is ", a_.rule,
          "; it must be delta, ssd or conv");
    return a_.rule == "delta" ? StateRule::kDelta
           : a_.rule == "ssd" ? StateRule::kSsd
                              : StateRule::kConv;
  }

  void SetProjections() {
    const size_t count = a_.weights.size();
    Check(count > 1 && count - 1 <= kMostInputs && a_.biases.size() == count &&
              a_.sources.size() == count - 1,
          "layer with a state has ", count, " projections, ", a_.biases.size(), " biases and ",
          a_.sources.size(), " sources; it takes 2 to ", kMostInputs + 1,
          " projections, a bias each, and a source of all but the last");
    m_.sources = a_.sources;
    for (size_t i = 0; i + 1 < count; ++i) {
      const int64_t source = a_.sources[i], outputs = a_.weights[i].outputs();
      const std::string name = name_ + "projection " + std::to_string(i);
      Check(source < static_cast<int64_t>(i) && outputs > 0, "projection ", i, " of projection ",
            source, " must come behind it, and be (out, in); it is ",
            ShapeText(a_.weights[i].tensors[0]));
      const int64_t inputs = source < 0 ? tensors_.hidden() : m_.inputs[source].outputs;
      m_.inputs.push_back(tensors_.MatrixOf(name, a_.weights[i], outputs, inputs));
      SetBias(name, i, &m_.inputs.back());
    }
  }

  void SetBias(const std::string& name, size_t index, Matrix* matrix) {
    const std::optional<Tensor>& bias = a_.biases[index];
    if (bias) matrix->bias = tensors_.Data(name + "'s bias", *bias, {matrix->outputs});
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
    Check(a_.state && a_.state->dim() == 4 && a_.step_bias && a_.rates && a_.norm && a_.groups > 0,
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
    norm.groups = delta ? m_.heads : a_.groups;
    norm.dim = m_.inner() / norm.groups;
    norm.weight = tensors_.Data(name_ + "norm", *a_.norm, {delta ? norm.dim : m_.inner()});
    norm.weight_step = delta ? 0 : norm.dim;
    norm.eps = static_cast<float>(a_.eps);
    norm.sigmoid = a_.sigmoid;
    norm.gate_first = !delta;
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
    if (!recurs) return;
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

// The ops of exkv_ext/cuda on CPU tensors, as torch.ops.exkv_emulated.<name>: the same checks and
// launchers as on a GPU, with every kernel run by cuda_emulation.h.
#include "../../exkv_ext/bindings/append_binding.h"
#include "../../exkv_ext/bindings/decode_binding.h"
#include "../../exkv_ext/bindings/experts_binding.h"
#include "../../exkv_ext/bindings/kv_groups_binding.h"
#include "../../exkv_ext/bindings/kv_quant_binding.h"
#include "../../exkv_ext/bindings/linear_binding.h"
#include "../../exkv_ext/bindings/linear_groups_binding.h"
#include "../../exkv_ext/bindings/linear_packed_binding.h"
#include "../../exkv_ext/bindings/reference.h"
#include "../../exkv_ext/bindings/rope_binding.h"
#include "../../exkv_ext/bindings/rows_binding.h"
#include "../../exkv_ext/bindings/sections_binding.h"
#include "../../exkv_ext/cuda/append.cuh"
#include "../../exkv_ext/cuda/attention.cuh"
#include "../../exkv_ext/cuda/code.cuh"
#include "../../exkv_ext/cuda/experts.cuh"
#include "../../exkv_ext/cuda/kv_groups.cuh"
#include "../../exkv_ext/cuda/kv_quant.cuh"
#include "../../exkv_ext/cuda/linear.cuh"
#include "../../exkv_ext/cuda/linear_groups.cuh"
#include "../../exkv_ext/cuda/linear_packed.cuh"
#include "../../exkv_ext/cuda/prefill.cuh"
#include "../../exkv_ext/cuda/rows.cuh"
#include "selftest.cuh"

namespace exkv {
namespace {

DevicesWithCode devices;

bool HasCode(int32_t) {
  return devices.Has(0, HasCodeHere, [] { Warn(WithoutCode("the emulated device")); });
}

// Whether the device that is emulated is one that the kernels are built for.
void SetCode(bool has_code) {
  emulation::device.has_code = has_code;
  devices.Forget();
}

std::tuple<Tensor, Tensor> QuantizeKvEmulated(const Tensor& x) {
  return QuantizeKv(x, [](const QuantizeParams& p) { LaunchQuantize(p, nullptr); });
}

Tensor DequantizeKvEmulated(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  return DequantizeKv(q, scale, dtype,
                      [](const DequantizeParams& p) { LaunchDequantize(p, nullptr); });
}

std::tuple<Tensor, Tensor, Tensor> QuantizeGroupsEmulated(const Tensor& x, int64_t bits) {
  return QuantizeGroups(x, bits, [](const PackParams& p) { LaunchPack(p, nullptr); });
}

Tensor DequantizeGroupsEmulated(const Tensor& packed, const Tensor& scale, const Tensor& offset,
                                int64_t bits, int64_t dim, ScalarType dtype) {
  return DequantizeGroups(packed, scale, offset, bits, dim, dtype,
                          [](const UnpackParams& p) { LaunchUnpack(p, nullptr); });
}

Tensor HadamardEmulated(const Tensor& x) {
  return HadamardTransform(
      x, [](const HadamardParams& p) { LaunchHadamard(p, nullptr); }, kMostHadamard);
}

// Enough for a few splits of a short row, in small batches only.
constexpr int64_t kProcessors = 8;

auto DecodeEmulated(const Tensor& q) {
  return [&q](const AttentionParams& params) {
    Decode(q, params, kProcessors,
           [](const AttentionParams& p, const DecodePlan& plan, float* state) {
             float* kept = emulation::KeptByGraph(state, plan.state_floats);
             LaunchDecode(p, plan, kept, nullptr);
           });
  };
}

void PrefillEmulated(const AttentionParams& params) { LaunchPrefill(params, nullptr); }

Tensor AttentionEmulated(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& past_lens,
                         int64_t kv_len, bool ragged, double scale, int64_t window,
                         double softcap) {
  return AttentionOrReference(
      AttentionArguments{q, k, v, past_lens, kv_len, ragged, scale, window, softcap},
      DecodeEmulated(q), PrefillEmulated);
}

Tensor AttentionInt8Emulated(const Tensor& q, const Tensor& k, const Tensor& k_scale,
                             const Tensor& v, const Tensor& v_scale, const Tensor& past_lens,
                             int64_t kv_len, double scale, int64_t window, double softcap) {
  return AttentionOrReference(
      AttentionInt8Arguments{q, k, k_scale, v, v_scale, past_lens, kv_len, scale, window, softcap},
      DecodeEmulated(q), PrefillEmulated);
}

std::tuple<Tensor, Tensor> AttentionPartEmulated(const PartArguments& a) {
  if (!HasCode(0)) return Reference(a);
  return AttentionOrReference(a, DecodeEmulated(a.q), PrefillEmulated);
}

// Bytes that the decode kernel allocates for a call of this shape, in rows or in pages, or -1 where
// it doesn't take it.
int64_t DecodeScratch(int64_t rows, int64_t queries, int64_t heads, int64_t kv_heads, int64_t dim,
                      int64_t kv_len, int64_t processors, bool shared) {
  if (!DecodeTakes({rows, queries, heads, kv_heads, dim, kv_len})) return -1;
  PartParams part{};
  part.row_queries = queries;
  AttentionParams params{};
  params.rows = shared ? 1 : rows;
  params.length = shared ? rows * queries : queries;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.dim = dim;
  params.kv_len = kv_len;
  params.part = &part;
  int64_t floats = PlanDecode(params, processors).state_floats;
  const int32_t table = 0;
  part.block_table = &table;
  if (!shared) floats = std::max(floats, PlanDecode(params, processors).state_floats);
  return floats * static_cast<int64_t>(sizeof(float));
}

void AppendKvEmulated(const AppendArguments& a) {
  if (!HasCode(0)) return Reference(a);
  AppendKv(a, [](const AppendParams& p) { LaunchAppend(p, nullptr); }, kAppendDim);
}

// Pieces that a row's keys are cut into.
int64_t DecodeSplits(int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t kv_len,
                     int64_t processors, int64_t blocks_at_once) {
  AttentionParams params{};
  params.rows = rows;
  params.length = 1;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.dim = dim;
  params.kv_len = kv_len;
  const int before = std::exchange(emulation::device.blocks_at_once, blocks_at_once);
  const DecodePlan plan = PlanDecode(params, processors);
  emulation::device.blocks_at_once = before;
  return plan.splits;
}

// Launches from here on are kept as well as run, until ReplayGraph.
void CaptureGraph() { emulation::graph = {}, emulation::graph.capturing = true; }

// Runs what was captured once more: the same launches, over what memory holds now.
void ReplayGraph() {
  emulation::graph.capturing = false;
  for (const emulation::Launched& launch : emulation::graph.launches) launch.Run();
}

// Whether the kernel for many queries takes a call of this shape.
bool PrefillTaken(int64_t rows, int64_t queries, int64_t heads, int64_t kv_heads, int64_t dim,
                  int64_t kv_len) {
  return PrefillTakes({rows, queries, heads, kv_heads, dim, kv_len});
}

void LinearLayers(const std::vector<LinearParams>& layers) {
  LaunchLinear(layers, kProcessors, nullptr);
}

Tensor LinearEmulated(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  return Linear(x, weight, bias, MostLinearRows, LinearLayers);
}

std::vector<Tensor> LinearsEmulated(const Tensor& x, std::vector<Tensor> weights,
                                    std::vector<Tensor> biases) {
  return Linears(x, weights, biases, MostLinearRows, LinearLayers);
}

// Runs the kernel of layers whose weights are in groups.
auto LinearGroupsHere() {
  return [](const void* data, const std::vector<GroupsParams>& layers) {
    for (const GroupsParams& layer : layers) {
      STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(layer.matrix.codes) % 16 == 0,
                      "linear_groups: codes must begin at a multiple of 16 bytes; copy them");
      LaunchLinearGroups(layer, data, nullptr);
    }
  };
}

Tensor LinearGroupsEmulated(const Tensor& x, std::vector<Tensor> tensors,
                            std::vector<int64_t> layout, std::optional<Tensor> bias) {
  return LinearsGroups("linear_groups", x, tensors, layout, {bias}, LinearGroupsHere())[0];
}

std::vector<Tensor> LinearsGroupsEmulated(const Tensor& x, std::vector<Tensor> tensors,
                                          std::vector<int64_t> layout, std::vector<Tensor> biases) {
  return LinearsGroups(x, tensors, layout, biases, LinearGroupsHere());
}

Tensor DequantizeWeightEmulated(std::vector<Tensor> tensors, std::vector<int64_t> layout,
                                int64_t begin, int64_t end, ScalarType dtype) {
  if (!HasCode(-1)) return DequantizeWeightReference(tensors, layout, begin, end, dtype);
  return DequantizeWeight(tensors, layout, begin, end, dtype,
                          [&](const GroupsMatrix& m, FloatType type, void* out) {
                            LaunchDequantizeWeight(m, type, begin, end, out, nullptr);
                          });
}

Tensor LinearPackedEmulated(const Tensor& x, std::vector<Tensor> tensors, StringHandle format,
                            std::vector<int64_t> layout, int64_t outputs,
                            std::optional<Tensor> bias) {
  const int64_t name = TextNumber(TakeText(format));
  if (!HasCode(-1)) {
    return LinearPackedReference(x, tensors, name, layout, outputs, bias);
  }
  if (SectionTensors::IsSections(layout)) {
    return LinearSections(x, tensors, layout, outputs, bias,
                          [](const void* data, const std::vector<GroupsParams>& layers) {
                            CheckSectionsAligned(layers[0].matrix);
                            LaunchLinearSections(layers[0], data, nullptr);
                          });
  }
  return LinearPacked(Aligned(x), tensors, layout, outputs, bias,
                      [&](const void* data, const PackedParams& p) {
                        CheckAligned(p.matrix, AlignmentOf(p.matrix));
                        LaunchLinearPacked(p, data, nullptr);
                      });
}

Tensor DequantizePackedEmulated(std::vector<Tensor> tensors, StringHandle format,
                                std::vector<int64_t> layout, int64_t inputs, int64_t begin,
                                int64_t end, ScalarType dtype) {
  const int64_t name = TextNumber(TakeText(format));
  STD_TORCH_CHECK(!tensors.empty(), "dequantize_packed: no tensors");
  if (!HasCode(-1)) {
    return DequantizePackedReference(tensors, name, layout, inputs, begin, end, dtype);
  }
  if (SectionTensors::IsSections(layout)) {
    return DequantizeSections(tensors, layout, inputs, begin, end, dtype,
                              [&](const GroupsMatrix& m, FloatType type, void* out) {
                                LaunchDequantizeSections(m, type, begin, end, out, nullptr);
                              });
  }
  return DequantizePacked(tensors, layout, inputs, begin, end, dtype,
                          [&](const PackedMatrix& m, FloatType type, void* out) {
                            CheckAligned(m, AlignmentOf(m));
                            LaunchDequantizePacked(m, type, begin, end, out, nullptr);
                          });
}

Tensor ExpertProductsEmulated(const Tensor& x, const Tensor& chosen, std::vector<Tensor> weights) {
  return ExpertProducts(x, chosen, weights,
                        [](const ExpertsParams& p) { LaunchExpertProducts(p, nullptr); });
}

Tensor RmsNormEmulated(const Tensor& x, const Tensor& weight, double eps, bool offset) {
  return RmsNorm(x, weight, eps, offset, [](const NormParams& p) { LaunchNorm(p, nullptr); });
}

std::tuple<Tensor, Tensor> AddRmsNormEmulated(const Tensor& x, const Tensor& residual,
                                              const Tensor& weight, double eps, bool offset) {
  return AddRmsNorm(x, residual, weight, eps, offset,
                    [](const NormParams& p) { LaunchNorm(p, nullptr); });
}

void SiluMulEmulated(Tensor gate, const Tensor& up) {
  GateMul("silu_mul_", gate, up, [](const GateParams& p) { LaunchSiluMul(p, nullptr); });
}

void GeluMulEmulated(Tensor gate, const Tensor& up) {
  GateMul("gelu_mul_", gate, up, [](const GateParams& p) { LaunchGeluMul(p, nullptr); });
}

std::tuple<Tensor, Tensor> RopeEmulated(const Tensor& q, const Tensor& k, const Tensor& cos,
                                        const Tensor& sin) {
  return Rope(q, k, cos, sin, [](const RopeParams& p) { LaunchRope(p, nullptr); });
}

Tensor SelfTest(const Tensor& x, int64_t mistake) {
  Tensor out = torch::stable::new_empty(x, {1});
  LaunchSelfTest(static_cast<const float*>(x.const_data_ptr()),
                 static_cast<float*>(out.mutable_data_ptr()), x.numel(), mistake);
  return out;
}

// x y, or x y^T, of 16 x 16 values of 16 bits.
Tensor MatrixProduct(const Tensor& x, const Tensor& y, bool transposed, bool plain) {
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Float);
  LaunchMatrix(x.const_data_ptr(), y.const_data_ptr(), static_cast<float*>(out.mutable_data_ptr()),
               x.scalar_type() == ScalarType::Half, transposed, plain);
  return out;
}

}  // namespace
}  // namespace exkv

STABLE_TORCH_LIBRARY(exkv_emulated, m) {
  m.def("quantize_kv(Tensor x) -> (Tensor, Tensor)");
  m.def("dequantize_kv(Tensor q, Tensor scale, ScalarType dtype) -> Tensor");
  m.def("quantize_groups(Tensor x, int bits) -> (Tensor, Tensor, Tensor)");
  m.def(
      "dequantize_groups(Tensor packed, Tensor scale, Tensor offset, int bits, int head_dim, "
      "ScalarType dtype) -> Tensor");
  m.def("hadamard(Tensor x) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  m.def("linear_groups(Tensor x, Tensor[] tensors, int[] layout, Tensor? bias) -> Tensor");
  m.def("linears_groups(Tensor x, Tensor[] tensors, int[] layout, Tensor[] biases) -> Tensor[]");
  m.def(
      "dequantize_weight(Tensor[] tensors, int[] layout, int begin, int end, ScalarType dtype) "
      "-> Tensor");
  m.def(
      "linear_packed(Tensor x, Tensor[] tensors, str format, int[] layout, int outputs, "
      "Tensor? bias) -> Tensor");
  m.def(
      "dequantize_packed(Tensor[] tensors, str format, int[] layout, int inputs, int begin, "
      "int end, ScalarType dtype) -> Tensor");
  m.def("expert_products(Tensor x, Tensor chosen, Tensor[] weights) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool offset=False) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool offset=False) "
      "-> (Tensor, Tensor)");
  m.def("silu_mul_(Tensor(a!) gate, Tensor up) -> ()");
  m.def("gelu_mul_(Tensor(a!) gate, Tensor up) -> ()");
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor past_lens, int kv_len, bool ragged, "
      "float scale, int window=0, float softcap=0.0) -> Tensor");
  m.def(
      "attention_int8(Tensor q, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, "
      "Tensor past_lens, int kv_len, float scale, int window=0, float softcap=0.0) -> Tensor");
  m.def(
      "attention_part(Tensor q, Tensor[] k, str k_format, Tensor[] v, str v_format, "
      "Tensor past_lens, Tensor key_start, Tensor key_count, int kv_len, float scale, "
      "int window=0, float softcap=0.0, Tensor? block_table=None) -> (Tensor, Tensor)");
  m.def(
      "append_kv(Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!)[] k_stored, "
      "str k_format, Tensor(b!)[] v_stored, str v_format, Tensor past_lens, "
      "Tensor? new_lens=None, Tensor? block_table=None, int ring=0, bool hadamard=False) -> ()");
  m.def(
      "decode_scratch(int rows, int queries, int heads, int kv_heads, int dim, int kv_len, "
      "int processors, bool shared) -> int");
  m.def(
      "prefill_taken(int rows, int queries, int heads, int kv_heads, int dim, int kv_len) "
      "-> bool");
  m.def(
      "decode_splits(int rows, int heads, int kv_heads, int dim, int kv_len, int processors, "
      "int blocks_at_once) -> int");
  m.def("set_code(bool has_code) -> ()");
  m.def("capture_graph() -> ()");
  m.def("replay_graph() -> ()");
  m.def("selftest(Tensor x, int mistake) -> Tensor");
  m.def("matrix_product(Tensor x, Tensor y, bool transposed, bool plain) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exkv_emulated, CPU, m) {
  EXKV_IMPL(m, quantize_kv, exkv::QuantizeKvEmulated, exkv::HasCode);
  EXKV_IMPL(m, dequantize_kv, exkv::DequantizeKvEmulated, exkv::HasCode);
  EXKV_IMPL(m, quantize_groups, exkv::QuantizeGroupsEmulated, exkv::HasCode);
  EXKV_IMPL(m, dequantize_groups, exkv::DequantizeGroupsEmulated, exkv::HasCode);
  EXKV_IMPL(m, hadamard, exkv::HadamardEmulated, exkv::HasCode);
  EXKV_IMPL(m, linear, exkv::LinearEmulated, exkv::HasCode);
  EXKV_IMPL(m, linears, exkv::LinearsEmulated, exkv::HasCode);
  EXKV_IMPL(m, linear_groups, exkv::LinearGroupsEmulated, exkv::HasCode);
  EXKV_IMPL(m, linears_groups, exkv::LinearsGroupsEmulated, exkv::HasCode);
  m.impl("dequantize_weight", TORCH_BOX(&exkv::DequantizeWeightEmulated));
  m.impl("linear_packed", TORCH_BOX(&exkv::LinearPackedEmulated));
  m.impl("dequantize_packed", TORCH_BOX(&exkv::DequantizePackedEmulated));
  EXKV_IMPL(m, expert_products, exkv::ExpertProductsEmulated, exkv::HasCode);
  EXKV_IMPL(m, rms_norm, exkv::RmsNormEmulated, exkv::HasCode);
  EXKV_IMPL(m, add_rms_norm, exkv::AddRmsNormEmulated, exkv::HasCode);
  EXKV_IMPL(m, silu_mul_, exkv::SiluMulEmulated, exkv::HasCode);
  EXKV_IMPL(m, gelu_mul_, exkv::GeluMulEmulated, exkv::HasCode);
  EXKV_IMPL(m, rope, exkv::RopeEmulated, exkv::HasCode);
  EXKV_IMPL(m, attention, exkv::AttentionEmulated, exkv::HasCode);
  EXKV_IMPL(m, attention_int8, exkv::AttentionInt8Emulated, exkv::HasCode);
  m.impl("attention_part", TORCH_BOX(&exkv::AttentionPartOp<exkv::AttentionPartEmulated>));
  m.impl("append_kv", TORCH_BOX(&exkv::AppendKvOp<exkv::AppendKvEmulated>));
  m.impl("selftest", TORCH_BOX(&exkv::SelfTest));
  m.impl("matrix_product", TORCH_BOX(&exkv::MatrixProduct));
}

STABLE_TORCH_LIBRARY_IMPL(exkv_emulated, CompositeExplicitAutograd, m) {
  m.impl("decode_splits", TORCH_BOX(&exkv::DecodeSplits));
  m.impl("set_code", TORCH_BOX(&exkv::SetCode));
  m.impl("capture_graph", TORCH_BOX(&exkv::CaptureGraph));
  m.impl("replay_graph", TORCH_BOX(&exkv::ReplayGraph));
  m.impl("decode_scratch", TORCH_BOX(&exkv::DecodeScratch));
  m.impl("prefill_taken", TORCH_BOX(&exkv::PrefillTaken));
}

extern "C" __attribute__((visibility("default"))) void exkv_emulation_set_backward(int backward) {
  exkv::emulation::SetBackward(backward != 0);
}

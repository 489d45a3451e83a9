// The ops of exkv_ext/cuda on CPU tensors, as torch.ops.exkv_emulated.<name>: the same checks and
// launchers as on a GPU, with every kernel run by cuda_emulation.h.
#include "../../exkv_ext/bindings/reference.h"
#include "../../exkv_ext/cuda/attention.cuh"
#include "../../exkv_ext/cuda/code.cuh"
#include "../../exkv_ext/params/experts_params.h"
#include "selftest.cuh"

namespace exkv {
namespace {

using emulation::OnDevice;

DevicesWithCode devices_with_code;

// All tensors are on one device, whose number is set: torch has them on the CPU.
template <typename AnyTensor>
int32_t DeviceOf(const AnyTensor&) {
  return emulation::tensors_on;
}

cudaStream_t CurrentStream(int32_t) { return nullptr; }

// Enough for a few splits of a short row, in small batches only.
int64_t Processors(int32_t) { return 8; }

bool HasCode(int32_t device) {
  const auto warn = [] { Warn(WithoutCode("the emulated device")); };
  return devices_with_code.Has(device, HasCodeHere, warn);
}

std::string LaunchFailure() { return ""; }

// Stands before the launcher of this name in cuda_ops.h: a graph that is captured keeps the memory.
void LaunchDecode(const AttentionParams& params, const DecodePlan& plan, float* state,
                  cudaStream_t stream) {
  exkv::LaunchDecode(params, plan, emulation::KeptByGraph(state, plan.state_floats), stream);
}

ChosenMatrix* KeptByGraph(ChosenMatrix* own, int64_t count) {
  const int64_t floats = count * static_cast<int64_t>(sizeof(ChosenMatrix) / sizeof(float));
  float* kept = emulation::KeptByGraph(reinterpret_cast<float*>(own), floats);
  return reinterpret_cast<ChosenMatrix*>(kept);
}

}  // namespace
}  // namespace exkv

#include "../../exkv_ext/bindings/cuda_ops.h"

namespace exkv {
namespace {

// Whether the devices that are emulated are ones that the kernels are built for.
void SetCode(bool has_code) {
  for (emulation::Device& each : emulation::devices) each.has_code = has_code;
  devices_with_code.Forget();
}

// Makes two devices unlike each other: the second has no tensor cores and room for fewer blocks.
void MakeUnlike(bool unlike) {
  emulation::devices[1] = emulation::devices[0];
  if (!unlike) return;
  emulation::devices[1].tensor_cores = false;
  emulation::devices[1].blocks_at_once = 1;
}

// The device that tensors are on, and the one that is current before an op.
void PlaceTensors(int64_t tensors_on, int64_t current) {
  emulation::tensors_on = static_cast<int>(tensors_on);
  emulation::current = static_cast<int>(current);
}

// The device that is current, and how many questions and launches so far met one that tensors are
// not on.
std::tuple<int64_t, int64_t> WrongDevice() { return {emulation::current, emulation::wrong}; }

// Bytes that the decode kernel allocates for a call of this shape, in rows or in pages and with
// queries of float32 or of 16 bits, or -1 where it doesn't take it.
int64_t DecodeScratch(int64_t rows, int64_t queries, int64_t heads, int64_t kv_heads, int64_t dim,
                      int64_t kv_len, int64_t processors, bool shared, bool narrow) {
  if (!DecodeTakes({rows, queries, heads, kv_heads, dim, kv_len})) return -1;
  PartParams part{};
  part.row_queries = queries;
  AttentionParams params{};
  params.dtype = narrow ? FloatType::kBFloat16 : FloatType::kFloat32;
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
  const int before = std::exchange(emulation::devices[0].blocks_at_once, blocks_at_once);
  const DecodePlan plan = PlanDecode(params, processors);
  emulation::devices[0].blocks_at_once = before;
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
  m.def("expert_products(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases) -> Tensor");
  m.def(
      "chosen_products(Tensor x, Tensor chosen, Tensor[] tensors, str format, int[] layout, "
      "int outputs, Tensor[] biases) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool offset=False) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool offset=False) "
      "-> (Tensor, Tensor)");
  m.def("silu_mul_(Tensor(a!) gate, Tensor up) -> ()");
  m.def("gelu_mul_(Tensor(a!) gate, Tensor up) -> ()");
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? new_lens) "
      "-> Tensor");
  m.def(
      "gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor(a!) state, "
      "Tensor? new_lens) -> Tensor");
  m.def(
      "ssd(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, Tensor(a!) state, "
      "Tensor? new_lens) -> Tensor");
  m.def(
      "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d, "
      "Tensor(a!) state, Tensor? new_lens) -> Tensor");
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
      "int processors, bool shared, bool narrow) -> int");
  m.def(
      "prefill_taken(int rows, int queries, int heads, int kv_heads, int dim, int kv_len) "
      "-> bool");
  m.def(
      "decode_splits(int rows, int heads, int kv_heads, int dim, int kv_len, int processors, "
      "int blocks_at_once) -> int");
  m.def("set_code(bool has_code) -> ()");
  m.def("make_unlike(bool unlike) -> ()");
  m.def("place_tensors(int tensors_on, int current) -> ()");
  m.def("wrong_device() -> (int, int)");
  m.def("capture_graph() -> ()");
  m.def("replay_graph() -> ()");
  m.def("selftest(Tensor x, int mistake) -> Tensor");
  m.def("matrix_product(Tensor x, Tensor y, bool transposed, bool plain) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exkv_emulated, CPU, m) {
  exkv::RegisterKernels(m);
  m.impl("selftest", TORCH_BOX(&exkv::SelfTest));
  m.impl("matrix_product", TORCH_BOX(&exkv::MatrixProduct));
}

STABLE_TORCH_LIBRARY_IMPL(exkv_emulated, CompositeExplicitAutograd, m) {
  m.impl("decode_splits", TORCH_BOX(&exkv::DecodeSplits));
  m.impl("set_code", TORCH_BOX(&exkv::SetCode));
  m.impl("make_unlike", TORCH_BOX(&exkv::MakeUnlike));
  m.impl("place_tensors", TORCH_BOX(&exkv::PlaceTensors));
  m.impl("wrong_device", TORCH_BOX(&exkv::WrongDevice));
  m.impl("capture_graph", TORCH_BOX(&exkv::CaptureGraph));
  m.impl("replay_graph", TORCH_BOX(&exkv::ReplayGraph));
  m.impl("decode_scratch", TORCH_BOX(&exkv::DecodeScratch));
  m.impl("prefill_taken", TORCH_BOX(&exkv::PrefillTaken));
}

extern "C" __attribute__((visibility("default"))) void exkv_emulation_set_backward(int backward) {
  exkv::emulation::SetBackward(backward != 0);
}

// The kernels of exkv_ext/cuda behind torch's ops: checks, allocation of outputs, launches.
//
// Everything here runs with the device of the call's tensors as the current one, since launch plans
// depend on what a device says of itself. Who includes this says before what a device is: OnDevice
// (a guard), DeviceOf(tensor or handle), CurrentStream, Processors, HasCode, LaunchFailure,
// KeptByGraph. That is cuda.cpp, and tests/cuda_emulation for devices that a CPU emulates.
#pragma once

#include "../cuda/append.cuh"
#include "../cuda/attention.cuh"
#include "../cuda/code.cuh"
#include "../cuda/experts.cuh"
#include "../cuda/kv_groups.cuh"
#include "../cuda/kv_quant.cuh"
#include "../cuda/linear.cuh"
#include "../cuda/linear_groups.cuh"
#include "../cuda/linear_packed.cuh"
#include "../cuda/prefill.cuh"
#include "../cuda/recurrent.cuh"
#include "../cuda/rows.cuh"
#include "append_binding.h"
#include "conv_binding.h"
#include "decode_binding.h"
#include "delta_binding.h"
#include "experts_binding.h"
#include "kv_groups_binding.h"
#include "kv_quant_binding.h"
#include "linear_binding.h"
#include "linear_groups_binding.h"
#include "linear_packed_binding.h"
#include "reference.h"
#include "rope_binding.h"
#include "rows_binding.h"
#include "scan_binding.h"
#include "sections_binding.h"
#include "ssd_binding.h"

namespace exkv {
namespace {

// Runs a launcher on the tensor's device, which is the current one, and reports what the launch
// itself found wrong.
template <typename Launcher, typename... Params>
void LaunchOn(const Tensor& tensor, const char* op, Launcher launcher, const Params&... params) {
  launcher(params..., CurrentStream(DeviceOf(tensor)));
  const std::string why = LaunchFailure();
  STD_TORCH_CHECK(why.empty(), op, " on ", DeviceName(tensor), " failed to launch: ", why);
}

std::tuple<Tensor, Tensor> QuantizeKvCuda(const Tensor& x) {
  return QuantizeKv(
      x, [&](const QuantizeParams& p) { LaunchOn(x, "quantize_kv", LaunchQuantize, p); });
}

Tensor DequantizeKvCuda(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  return DequantizeKv(q, scale, dtype, [&](const DequantizeParams& p) {
    LaunchOn(q, "dequantize_kv", LaunchDequantize, p);
  });
}

std::tuple<Tensor, Tensor, Tensor> QuantizeGroupsCuda(const Tensor& x, int64_t bits) {
  return QuantizeGroups(
      x, bits, [&](const PackParams& p) { LaunchOn(x, "quantize_groups", LaunchPack, p); });
}

Tensor DequantizeGroupsCuda(const Tensor& packed, const Tensor& scale, const Tensor& offset,
                            int64_t bits, int64_t dim, ScalarType dtype) {
  return DequantizeGroups(packed, scale, offset, bits, dim, dtype, [&](const UnpackParams& p) {
    LaunchOn(packed, "dequantize_groups", LaunchUnpack, p);
  });
}

Tensor HadamardCuda(const Tensor& x) {
  return HadamardTransform(
      x, [&](const HadamardParams& p) { LaunchOn(x, "hadamard", LaunchHadamard, p); },
      kMostHadamard);
}

// Runs the decode kernel of an op on q's device.
auto DecodeOn(const Tensor& q, const char* op) {
  return [&q, op](const AttentionParams& params) {
    Decode(q, params, Processors(DeviceOf(q)),
           [&](const AttentionParams& p, const DecodePlan& plan, float* state) {
             LaunchOn(q, op, LaunchDecode, p, plan, state);
           });
  };
}

// The same for prefill.
auto PrefillOn(const Tensor& q, const char* op) {
  return [&q, op](const AttentionParams& params) { LaunchOn(q, op, LaunchPrefill, params); };
}

Tensor AttentionCuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& past_lens,
                     int64_t kv_len, bool ragged, double scale, int64_t window, double softcap) {
  return AttentionOrReference(
      AttentionArguments{q, k, v, past_lens, kv_len, ragged, scale, window, softcap},
      DecodeOn(q, "attention"), PrefillOn(q, "attention"));
}

Tensor AttentionInt8Cuda(const Tensor& q, const Tensor& k, const Tensor& k_scale, const Tensor& v,
                         const Tensor& v_scale, const Tensor& past_lens, int64_t kv_len,
                         double scale, int64_t window, double softcap) {
  return AttentionOrReference(
      AttentionInt8Arguments{q, k, k_scale, v, v_scale, past_lens, kv_len, scale, window, softcap},
      DecodeOn(q, "attention_int8"), PrefillOn(q, "attention_int8"));
}

std::tuple<Tensor, Tensor> AttentionPartCuda(const PartArguments& a) {
  const OnDevice here(DeviceOf(a.q));
  if (!HasCode(DeviceOf(a.q))) return Reference(a);
  return AttentionOrReference(a, DecodeOn(a.q, "attention_part"), PrefillOn(a.q, "attention_part"));
}

void AppendKvCuda(const AppendArguments& a) {
  const OnDevice here(DeviceOf(a.k));
  if (!HasCode(DeviceOf(a.k))) return Reference(a);
  AppendKv(
      a, [&](const AppendParams& p) { LaunchOn(a.k, "append_kv", LaunchAppend, p); }, kAppendDim);
}

// Runs the kernel of linear layers on x's device.
auto LinearOn(const Tensor& x, const char* op) {
  return [&x, op](const std::vector<LinearParams>& layers) {
    LaunchOn(x, op, LaunchLinear, layers, Processors(DeviceOf(x)));
  };
}

Tensor LinearCuda(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  return Linear(x, weight, bias, MostLinearRows, LinearOn(x, "linear"));
}

std::vector<Tensor> LinearsCuda(const Tensor& x, std::vector<Tensor> weights,
                                std::vector<Tensor> biases) {
  return Linears(x, weights, biases, MostLinearRows, LinearOn(x, "linears"));
}

void CheckCodesAligned(const char* op, const GroupsMatrix& m) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(m.codes) % 16 == 0, op,
                  ": codes must begin at a multiple of 16 bytes; copy them");
}

// Runs the kernel of layers whose weights are in groups.
auto LinearGroupsOn(const Tensor& x) {
  return [&x](const void* data, const std::vector<GroupsParams>& layers) {
    for (const GroupsParams& layer : layers) {
      CheckCodesAligned("linear_groups", layer.matrix);
      LaunchOn(x, "linear_groups", LaunchLinearGroups, layer, data);
    }
  };
}

Tensor LinearGroupsCuda(const Tensor& x, std::vector<Tensor> tensors, std::vector<int64_t> layout,
                        std::optional<Tensor> bias) {
  return LinearsGroups("linear_groups", Aligned(x), tensors, layout, {bias}, LinearGroupsOn(x))[0];
}

std::vector<Tensor> LinearsGroupsCuda(const Tensor& x, std::vector<Tensor> tensors,
                                      std::vector<int64_t> layout, std::vector<Tensor> biases) {
  return LinearsGroups(Aligned(x), tensors, layout, biases, LinearGroupsOn(x));
}

Tensor DequantizeWeightCuda(std::vector<Tensor> tensors, std::vector<int64_t> layout, int64_t begin,
                            int64_t end, ScalarType dtype) {
  STD_TORCH_CHECK(!tensors.empty(), "dequantize_weight: no tensors");
  const OnDevice here(DeviceOf(tensors[0]));
  if (!HasCode(DeviceOf(tensors[0]))) {
    return DequantizeWeightReference(tensors, layout, begin, end, dtype);
  }
  return DequantizeWeight(
      tensors, layout, begin, end, dtype, [&](const GroupsMatrix& m, FloatType type, void* out) {
        LaunchOn(tensors[0], "dequantize_weight", LaunchDequantizeWeight, m, type, begin, end, out);
      });
}

Tensor LinearPackedCuda(const Tensor& x, std::vector<Tensor> tensors, StringHandle format,
                        std::vector<int64_t> layout, int64_t outputs, std::optional<Tensor> bias) {
  const int64_t name = TextNumber(TakeText(format));
  const OnDevice here(DeviceOf(x));
  if (!HasCode(DeviceOf(x)) || PackedTensors::IsOfPoints(layout)) {
    return LinearPackedReference(x, tensors, name, layout, outputs, bias);
  }
  if (SectionTensors::IsSections(layout)) {
    return LinearSections(x, tensors, layout, outputs, bias,
                          [&](const void* data, const std::vector<GroupsParams>& layers) {
                            CheckSectionsAligned(layers[0].matrix);
                            LaunchOn(x, "linear_packed", LaunchLinearSections, layers[0], data);
                          });
  }
  return LinearPacked("linear_packed", Aligned(x), tensors, layout, outputs, bias,
                      [&](const void* data, const PackedParams& p) {
                        CheckAligned(p.matrix, AlignmentOf(p.matrix));
                        LaunchOn(x, "linear_packed", LaunchLinearPacked, p, data);
                      });
}

Tensor DequantizePackedCuda(std::vector<Tensor> tensors, StringHandle format,
                            std::vector<int64_t> layout, int64_t inputs, int64_t begin, int64_t end,
                            ScalarType dtype) {
  const int64_t name = TextNumber(TakeText(format));
  STD_TORCH_CHECK(!tensors.empty(), "dequantize_packed: no tensors");
  const OnDevice here(DeviceOf(tensors[0]));
  if (!HasCode(DeviceOf(tensors[0])) || PackedTensors::IsOfPoints(layout)) {
    return DequantizePackedReference(tensors, name, layout, inputs, begin, end, dtype);
  }
  if (SectionTensors::IsSections(layout)) {
    return DequantizeSections(tensors, layout, inputs, begin, end, dtype,
                              [&](const GroupsMatrix& m, FloatType type, void* out) {
                                LaunchOn(tensors[0], "dequantize_packed", LaunchDequantizeSections,
                                         m, type, begin, end, out);
                              });
  }
  return DequantizePacked(tensors, layout, inputs, begin, end, dtype,
                          [&](const PackedMatrix& m, FloatType type, void* out) {
                            CheckAligned(m, AlignmentOf(m));
                            LaunchOn(tensors[0], "dequantize_packed", LaunchDequantizePacked, m,
                                     type, begin, end, out);
                          });
}

Tensor ExpertProductsCuda(const Tensor& x, const Tensor& chosen, std::vector<Tensor> weights,
                          std::vector<Tensor> biases) {
  return ExpertProducts(x, chosen, weights, biases, [&](const ExpertsParams& p) {
    LaunchOn(x, "expert_products", LaunchExpertProducts, p);
  });
}

Tensor ChosenProductsCuda(const Tensor& x, const Tensor& chosen, std::vector<Tensor> tensors,
                          StringHandle format, std::vector<int64_t> layout, int64_t outputs,
                          std::vector<Tensor> biases) {
  const char* op = "chosen_products";
  const int64_t name = TextNumber(TakeText(format));
  const OnDevice here(DeviceOf(x));
  const bool is_short =
      KernelFloatType(x.scalar_type()).value_or(FloatType::kFloat32) != FloatType::kFloat32;
  if (!HasCode(DeviceOf(x)) || !HasTensorCores() || !is_short || !AreChosenOnDevice(layout)) {
    return ChosenProductsReference(x, chosen, tensors, name, layout, outputs, biases);
  }
  const auto run = [&](auto kernel) {
    return [&, kernel](const void* data, const auto& p, ChoiceParams* choice, int64_t taken) {
      choice->found = KeptByGraph(choice->found, choice->pairs);
      LaunchOn(x, op, LaunchFindChosen, *choice);
      LaunchOn(x, op, kernel, p, data, ChosenCall{choice->found, choice->pairs, taken});
    };
  };
  if (!PackedTensors::IsPacked(layout)) {
    const auto matrix = [&](const Tensor* from) {
      const GroupsMatrix m = GroupsTensors(op, from, layout).Matrix();
      CheckCodesAligned(op, m);
      return m;
    };
    return ChosenProducts<GroupsParams>(x, chosen, tensors, GroupsTensors::Count(layout), outputs,
                                        biases, matrix, run(LaunchGroupsOnTensorCores));
  }
  const auto matrix = [&](const Tensor* from) {
    const PackedMatrix m = PackedTensors(op, from, layout).Matrix(outputs);
    CheckAligned(m, AlignmentOf(m));
    return m;
  };
  return ChosenProducts<PackedParams>(x, chosen, tensors, PackedTensors::Count(layout), outputs,
                                      biases, matrix, run(LaunchPackedOnTensorCores));
}

Tensor RmsNormCuda(const Tensor& x, const Tensor& weight, double eps, bool offset) {
  return RmsNorm(x, weight, eps, offset,
                 [&](const NormParams& p) { LaunchOn(x, "rms_norm", LaunchNorm, p); });
}

std::tuple<Tensor, Tensor> AddRmsNormCuda(const Tensor& x, const Tensor& residual,
                                          const Tensor& weight, double eps, bool offset) {
  return AddRmsNorm(x, residual, weight, eps, offset,
                    [&](const NormParams& p) { LaunchOn(x, "add_rms_norm", LaunchNorm, p); });
}

void SiluMulCuda(Tensor gate, const Tensor& up) {
  GateMul("silu_mul_", gate, up,
          [&](const GateParams& p) { LaunchOn(gate, "silu_mul_", LaunchSiluMul, p); });
}

void GeluMulCuda(Tensor gate, const Tensor& up) {
  GateMul("gelu_mul_", gate, up,
          [&](const GateParams& p) { LaunchOn(gate, "gelu_mul_", LaunchGeluMul, p); });
}

std::tuple<Tensor, Tensor> RopeCuda(const Tensor& q, const Tensor& k, const Tensor& cos,
                                    const Tensor& sin) {
  return Rope(q, k, cos, sin, [&](const RopeParams& p) { LaunchOn(q, "rope", LaunchRope, p); });
}

Tensor CausalConvCuda(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                      Tensor state, std::optional<Tensor> new_lens) {
  if (x.scalar_type() != state.scalar_type()) {  // of a cache in other floats than the model
    return CallReference("exkv::causal_conv_reference", x, weight, bias, state, new_lens);
  }
  return CausalConv(x, weight, bias, state, new_lens,
                    [&](const ConvParams& p) { LaunchOn(x, "causal_conv", LaunchConv, p); });
}

// Whether vectors (..., D) are too long for a kernel that has D rows of a state in registers.
bool IsTooLong(const Tensor& x) { return x.dim() > 0 && x.size(x.dim() - 1) > kMostStateRows; }

Tensor GatedDeltaCuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                      const Tensor& beta, Tensor state, std::optional<Tensor> new_lens) {
  if (IsTooLong(q)) {
    return CallReference("exkv::gated_delta_reference", q, k, v, decay, beta, state, new_lens);
  }
  return GatedDelta(q, k, v, decay, beta, state, new_lens,
                    [&](const DeltaParams& p) { LaunchOn(q, "gated_delta", LaunchDelta, p); });
}

Tensor SsdCuda(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
               const Tensor& d, Tensor state, std::optional<Tensor> new_lens) {
  if (IsTooLong(b)) {
    return CallReference("exkv::ssd_reference", x, dt, a, b, c, d, state, new_lens);
  }
  return StateSpaceDuality(x, dt, a, b, c, d, state, new_lens,
                           [&](const SsdParams& p) { LaunchOn(x, "ssd", LaunchSsd, p); });
}

Tensor SelectiveScanCuda(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                         const Tensor& c, const Tensor& d, Tensor state,
                         std::optional<Tensor> new_lens) {
  if (b.dim() > 0 && b.size(b.dim() - 1) > kMostScanStates) {
    return CallReference("exkv::selective_scan_reference", x, dt, a, b, c, d, state, new_lens);
  }
  return SelectiveScan(x, dt, a, b, c, d, state, new_lens,
                       [&](const ScanParams& p) { LaunchOn(x, "selective_scan", LaunchScan, p); });
}

// Registers the kernels in a STABLE_TORCH_LIBRARY_IMPL.
void RegisterKernels(torch::stable::detail::StableLibrary& m) {
  EXKV_IMPL(m, quantize_kv, QuantizeKvCuda);
  EXKV_IMPL(m, dequantize_kv, DequantizeKvCuda);
  EXKV_IMPL(m, quantize_groups, QuantizeGroupsCuda);
  EXKV_IMPL(m, dequantize_groups, DequantizeGroupsCuda);
  EXKV_IMPL(m, hadamard, HadamardCuda);
  EXKV_IMPL(m, linear, LinearCuda);
  EXKV_IMPL(m, linears, LinearsCuda);
  EXKV_IMPL(m, linear_groups, LinearGroupsCuda);
  EXKV_IMPL(m, linears_groups, LinearsGroupsCuda);
  m.impl("dequantize_weight", TORCH_BOX(&DequantizeWeightCuda));
  m.impl("linear_packed", TORCH_BOX(&LinearPackedCuda));
  m.impl("dequantize_packed", TORCH_BOX(&DequantizePackedCuda));
  EXKV_IMPL(m, expert_products, ExpertProductsCuda);
  m.impl("chosen_products", TORCH_BOX(&ChosenProductsCuda));
  EXKV_IMPL(m, rms_norm, RmsNormCuda);
  EXKV_IMPL(m, add_rms_norm, AddRmsNormCuda);
  EXKV_IMPL(m, silu_mul_, SiluMulCuda);
  EXKV_IMPL(m, gelu_mul_, GeluMulCuda);
  EXKV_IMPL(m, rope, RopeCuda);
  EXKV_IMPL(m, causal_conv, CausalConvCuda);
  EXKV_IMPL(m, gated_delta, GatedDeltaCuda);
  EXKV_IMPL(m, ssd, SsdCuda);
  EXKV_IMPL(m, selective_scan, SelectiveScanCuda);
  EXKV_IMPL(m, attention, AttentionCuda);
  EXKV_IMPL(m, attention_int8, AttentionInt8Cuda);
  m.impl("attention_part", TORCH_BOX(&AttentionPartOp<AttentionPartCuda>));
  m.impl("append_kv", TORCH_BOX(&AppendKvOp<AppendKvCuda>));
}

}  // namespace
}  // namespace exkv

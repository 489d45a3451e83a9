// The ops of exkv_ext/cuda on CPU tensors, as torch.ops.exkv_emulated.<name>: the same checks and
// launchers as on a GPU, with every kernel run by cuda_emulation.h.
#include "../../exkv_ext/cuda/kv_quant.cuh"
#include "../../exkv_ext/kv_quant_binding.h"
#include "selftest.cuh"

namespace exkv {
namespace {

std::tuple<Tensor, Tensor> QuantizeKvEmulated(const Tensor& x) {
  return QuantizeKv(x, [](const QuantizeParams& p) { LaunchQuantize(p, nullptr); });
}

Tensor DequantizeKvEmulated(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  return DequantizeKv(q, scale, dtype,
                      [](const DequantizeParams& p) { LaunchDequantize(p, nullptr); });
}

Tensor SelfTest(const Tensor& x, int64_t mistake) {
  Tensor out = torch::stable::new_empty(x, {1});
  LaunchSelfTest(static_cast<const float*>(x.const_data_ptr()),
                 static_cast<float*>(out.mutable_data_ptr()), x.numel(), mistake);
  return out;
}

}  // namespace
}  // namespace exkv

STABLE_TORCH_LIBRARY(exkv_emulated, m) {
  m.def("quantize_kv(Tensor x) -> (Tensor, Tensor)");
  m.def("dequantize_kv(Tensor q, Tensor scale, ScalarType dtype) -> Tensor");
  m.def("selftest(Tensor x, int mistake) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exkv_emulated, CPU, m) {
  m.impl("quantize_kv", TORCH_BOX(&exkv::QuantizeKvEmulated));
  m.impl("dequantize_kv", TORCH_BOX(&exkv::DequantizeKvEmulated));
  m.impl("selftest", TORCH_BOX(&exkv::SelfTest));
}

extern "C" __attribute__((visibility("default"))) void exkv_emulation_set_backward(int backward) {
  exkv::emulation::SetBackward(backward != 0);
}

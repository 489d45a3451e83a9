// exkv_ext._cuda: the CUDA kernels of the ops that exkv/ops defines, through torch's stable ABI.
//
// Outputs are allocated here, on the inputs' device; a kernel gets pointers and torch's current
// stream. Loading this library registers the ops. Kernels: the .cu files beside this one.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../kv_quant_binding.h"
#include "kv_quant.cuh"

namespace exkv {
namespace {

cudaStream_t CurrentStream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Runs a launcher on the tensor's device and reports what the launch itself found wrong.
template <typename Launcher, typename Params>
void LaunchOn(const Tensor& tensor, Launcher launcher, const Params& params, const char* op) {
  const int32_t device = tensor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  launcher(params, CurrentStream(device));
  const cudaError_t status = cudaGetLastError();
  STD_TORCH_CHECK(status == cudaSuccess, op, " on ", DeviceName(tensor),
                  " failed to launch: ", cudaGetErrorString(status));
}

std::tuple<Tensor, Tensor> QuantizeKvCuda(const Tensor& x) {
  return QuantizeKv(
      x, [&](const QuantizeParams& p) { LaunchOn(x, LaunchQuantize, p, "quantize_kv"); });
}

Tensor DequantizeKvCuda(const Tensor& q, const Tensor& scale, ScalarType dtype) {
  return DequantizeKv(q, scale, dtype, [&](const DequantizeParams& p) {
    LaunchOn(q, LaunchDequantize, p, "dequantize_kv");
  });
}

}  // namespace
}  // namespace exkv

STABLE_TORCH_LIBRARY_IMPL(exkv, CUDA, m) {
  m.impl("quantize_kv", TORCH_BOX(&exkv::QuantizeKvCuda));
  m.impl("dequantize_kv", TORCH_BOX(&exkv::DequantizeKvCuda));
}

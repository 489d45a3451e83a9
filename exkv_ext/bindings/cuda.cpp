// exkv_ext._cuda: the CUDA kernels of the ops that exkv/ops defines, through torch's stable ABI.
//
// Outputs are allocated on the inputs' device; a kernel gets pointers and torch's current stream.
// Loading this library registers the ops. Kernels: the .cu files in exkv_ext/cuda; what is between
// them and torch: cuda_ops.h. Here is what a device is.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/code.cuh"
#include "../params/experts_params.h"
#include "reference.h"

namespace exkv {
namespace {

using OnDevice = torch::stable::accelerator::DeviceGuard;

int32_t DeviceOf(const Tensor& tensor) { return tensor.get_device_index(); }

int32_t DeviceOf(AtenTensorHandle tensor) {
  int32_t device = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device));
  return device;
}

cudaStream_t CurrentStream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

int64_t Processors(int32_t device) {
  int count = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  STD_TORCH_CHECK(status == cudaSuccess, "cuda:", device,
                  " doesn't tell its multiprocessors: ", cudaGetErrorString(status));
  return count;
}

bool HasCode(int32_t device) {
  static DevicesWithCode* const devices = new DevicesWithCode;  // outlives every caller
  const auto warn = [&] { Warn(WithoutCode("cuda:" + std::to_string(device))); };
  return devices->Has(device, HasCodeHere, warn);
}

// What the last launch found wrong; empty if nothing.
std::string LaunchFailure() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

// What an op's launches need of its own memory while a graph is captured: torch's pool keeps it.
ChosenMatrix* KeptByGraph(ChosenMatrix* own, int64_t) { return own; }

}  // namespace
}  // namespace exkv

#include "cuda_ops.h"

STABLE_TORCH_LIBRARY_IMPL(exkv, CUDA, m) { exkv::RegisterKernels(m); }

// For exkv_ext.missing(): whether the GPU's driver takes any of the code.
extern "C" __attribute__((visibility("default"))) bool exkv_cuda_has_code(int32_t device) {
  try {
    const exkv::OnDevice here(device);
    return exkv::HasCodeHere();
  } catch (const std::exception&) {
    return false;
  }
}

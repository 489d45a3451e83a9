// The way from a kernel to its op's reference, which is an op of its own (exkv/ops/registry.py),
// for devices that no kernel is made for.
#pragma once

#include <array>
#include <atomic>
#include <string>

#include "binding.h"

namespace exkv {

// What is known of the devices by their numbers: asked for once, at the first call on each.
class DevicesWithCode {
 public:
  // ask() is whether the kernels run there; told() is called once where they don't.
  template <typename Ask, typename Tell>
  bool Has(int32_t device, const Ask& ask, const Tell& tell) {
    if (device < 0 || device >= static_cast<int32_t>(known_.size())) return ask();
    std::atomic<int>& known = known_[static_cast<size_t>(device)];
    if (known == kUnknown) {
      const bool has = ask();
      if (known.exchange(has ? kCode : kNone) == kUnknown && !has) tell();
    }
    return known == kCode;
  }

  void Forget() {
    for (std::atomic<int>& each : known_) each = kUnknown;
  }

 private:
  static constexpr int kUnknown = 0, kCode = 1, kNone = 2;
  std::array<std::atomic<int>, 64> known_{};
};

// One line on stderr, by the way that torch has for it.
inline void Warn(const std::string& message) {
  aoti_torch_warn("exkv", __FILE__, static_cast<uint32_t>(__LINE__), message.c_str());
}

inline std::string WithoutCode(const std::string& device) {
  return "exkv: its CUDA kernels have no code for " + device +
         "; torch's own kernels serve it, which is slower. They run from compute capability 7.5 "
         "on: "
         "for such a GPU, build exkv on this machine, or with its number in TORCH_CUDA_ARCH_LIST.";
}

using BoxedKernel = void (*)(StableIValue*, uint64_t, uint64_t);

// A boxed kernel of an op whose first argument is a tensor and none a str, on that tensor's device.
// Calls on devices without code are left to the op Op::Reference().
template <typename Op, BoxedKernel kKernel>
void KernelOrReference(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  const int32_t device = Op::Device(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const auto here = Op::MakeCurrent(device);
  if (Op::HasCode(device)) return kKernel(stack, arguments, outputs);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(Op::Reference(), "", stack, TORCH_ABI_VERSION));
}

// The result of an op that is a reference, and takes no str.
template <typename... Arguments>
Tensor CallReference(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace exkv

// m.impl of such an op, in namespace exkv, where cuda_ops.h says what a device is.
#define EXKV_IMPL(m, op, function)                                                   \
  do {                                                                               \
    struct Op {                                                                      \
      static constexpr const char* Reference() { return "exkv::" #op "_reference"; } \
      static OnDevice MakeCurrent(int32_t device) { return OnDevice(device); }       \
      static int32_t Device(AtenTensorHandle tensor) { return DeviceOf(tensor); }    \
      static bool HasCode(int32_t device) { return exkv::HasCode(device); }          \
    };                                                                               \
    m.impl(#op, KernelOrReference<Op, TORCH_BOX(&function)>);                        \
  } while (false)

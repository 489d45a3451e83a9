// See fallback.h. One boxed kernel serves all ops: look through the arguments for devices, alias
// the tensors, run the CPU kernel, and give what it made to the device. In dry mode, an op with an
// argument that has no memory runs its Meta kernel instead, for the shapes of its results.
#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "../params/kv_formats.h"
#include "alias.h"
#include "allocator.h"
#include "generator.h"
#include "ledger.h"

namespace exkv::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// What the arguments say together: the device that the op runs on, and whether it runs dry.
struct Placement {
  c10::DeviceIndex index = -1;
  bool dry = false;
};

[[noreturn]] void refuse_mixture(const c10::OperatorHandle& op, c10::Device a, c10::Device b) {
  TORCH_CHECK(false,
              "Expected all tensors to be on the same device, but found at least two devices, ", a,
              " and ", b, "! (in ", op.operator_name(), ")");
  std::abort();  // not reached
}

class ArgumentScan {
 public:
  ArgumentScan(const c10::OperatorHandle& op, Placement* placement)
      : op_(op), placement_(placement) {}

  void scan(const Stack& stack, size_t begin) {
    for (size_t i = begin; i < stack.size(); ++i) scan(stack[i]);
    if (placement_->index < 0) placement_->index = Ledger::get().check_index(-1);
    if (stranger_) {
      refuse_mixture(op_, c10::Device(kSim, placement_->index), *stranger_);
    }
  }

 private:
  void scan(const IValue& value) {
    if (value.isTensor()) {
      see(value.unsafeToTensorImpl(), /*index_list=*/false);
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) see(t.unsafeGetTensorImpl(), false);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        if (t.has_value()) see(t->unsafeGetTensorImpl(), true);
      }
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      placement_->index = Ledger::get().check_index(value.toDevice().index());
    }
  }

  void see(const c10::TensorImpl* t, bool index_list) {
    if (t == c10::UndefinedTensorImpl::singleton()) return;
    const c10::Device device = t->device();
    if (device.type() != kSim) {
      // As on CUDA: a CPU scalar may join any op, and CPU indices may select on the device.
      if (device.is_cpu() && (t->dim() == 0 || index_list)) return;
      stranger_ = device;
    } else if (placement_->index < 0) {
      placement_->index = device.index();
    } else if (placement_->index != device.index()) {
      refuse_mixture(op_, c10::Device(kSim, placement_->index), device);
    }
    if (device.type() == kSim && t->has_storage()) {
      placement_->dry |= is_dry(t->unsafe_storage().unsafeGetStorageImpl());
    }
  }

  const c10::OperatorHandle& op_;
  Placement* placement_;
  std::optional<c10::Device> stranger_;
};

// One run of one op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Placement placement)
      : op_(op),
        placement_(placement),
        backend_(placement.dry ? c10::DispatchKey::Meta : c10::DispatchKey::CPU),
        aliases_(backend_) {}

  void run(Stack* stack) {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias_info = arguments[i].alias_info();
      const bool written = alias_info != nullptr && alias_info->isWrite();
      enter(&(*stack)[begin + i], written);
    }
    execute(stack);
    for (const Written& w : written_) aliases_.follow(w.original, w.alias);
    for (size_t i = begin; i < stack->size(); ++i) leave(&(*stack)[i]);
  }

 private:
  struct Written {
    at::Tensor original;
    at::Tensor alias;
  };

  // Arguments on the way in.

  at::Tensor enter(const at::Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (!on_sim(t)) {
      if (written) refuse_mixture(op_, c10::Device(kSim, placement_.index), t.device());
      // A number in a Python call is a CPU scalar, which Meta kernels want as it is.
      return placement_.dry && t.dim() != 0 ? aliases_.of(t) : t;
    }
    at::Tensor alias = aliases_.of(t);
    if (written) written_.push_back({t, alias});
    return alias;
  }

  void enter(IValue* value, bool written) {
    if (value->isTensor()) {
      *value = enter(value->toTensor(), written);
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value->toTensorList()) list.push_back(enter(t, written));
      *value = std::move(list);
    } else if (value->isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value->toOptionalTensorList()) {
        list.push_back(t.has_value() ? std::optional(enter(*t, written)) : std::nullopt);
      }
      *value = std::move(list);
    } else if (value->isDevice() && value->toDevice().type() == kSim) {
      *value = placement_.dry ? c10::Device(c10::kMeta) : c10::Device(c10::kCPU);
    } else if (value->isGenerator()) {
      *value = host_generator(value->toGenerator());
    }
  }

  void execute(Stack* stack) {
    if (placement_.dry) check_shapes_suffice(*stack);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ChargeTemporaries charge(placement_.dry ? -1 : placement_.index);
    op_.redispatchBoxed(c10::DispatchKeySet(backend_), stack);
  }

  // Dry mode knows shapes only: some results have a shape, or a value, that contents decide.
  void check_shapes_suffice(const Stack& stack) const {
    bool depends = op_.hasTag(at::Tag::data_dependent_output);
    if (op_.hasTag(at::Tag::dynamic_output_shape)) depends |= !is_indexing() || has_mask(stack);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !depends && op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta),
        op_.operator_name(),
        " cannot run in the simulated accelerator's dry mode: an argument is "
        "a tensor of ",
        kDryThreshold, " bytes or more, which has no contents there, and ",
        depends ? "the result depends on them." : "the op has no shape-only (Meta) kernel.");
  }

  bool is_indexing() const { return op_.schema().name() == "aten::index"; }

  static bool has_mask(const Stack& stack) {
    for (const IValue& value : stack) {
      if (!value.isOptionalTensorList()) continue;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        if (t.has_value() && t->defined() &&
            (t->scalar_type() == c10::kBool || t->scalar_type() == c10::kByte)) {
          return true;
        }
      }
    }
    return false;
  }

  // Results on the way out.

  at::Tensor leave(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (const Written& w : written_) {
      if (w.alias.is_same(t)) return w.original;
    }
    return aliases_.result(t, placement_.index);
  }

  void leave(IValue* value) {
    if (value->isTensor()) {
      *value = leave(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value->toTensorList()) list.push_back(leave(t));
      *value = std::move(list);
    }
  }

  const c10::OperatorHandle& op_;
  const Placement placement_;
  const c10::DispatchKey backend_;
  Aliases aliases_;
  c10::SmallVector<Written, 2> written_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Placement placement;
  ArgumentScan(op, &placement).scan(*stack, stack->size() - op.schema().arguments().size());
  Call(op, placement).run(stack);
}

// Ops by their names, and the texts that their kernels know. Leaked, as the handles are.
std::map<std::string, std::set<std::string>>& texts_by_op() {
  static auto* texts = new std::map<std::string, std::set<std::string>>();
  return *texts;
}

// The same for an op whose kernel hands calls with a text that it doesn't know on to the reference:
// what that takes for a moment, it takes on the device.
void fallback_or_reference(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  const std::set<std::string>& known = texts_by_op().at(name);
  const size_t begin = stack->size() - op.schema().arguments().size();
  bool handed_on = false;
  for (size_t i = begin; i < stack->size(); ++i) {
    const IValue& value = (*stack)[i];
    handed_on |= value.isString() && known.count(value.toStringRef()) == 0;
  }
  if (!handed_on) return fallback(op, stack);
  for (size_t i = begin; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isString()) value = TextNumber(value.toStringRef());
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::string reference = name + "_reference";
  c10::Dispatcher::singleton().findSchemaOrThrow(reference.c_str(), "").callBoxed(stack);
}

bool wants_mirror(const c10::OperatorHandle& op, const std::set<std::string>& in_parts) {
  static const std::unordered_set<std::string_view> kSkipped = {"prim", "prims", "profiler"};
  // Composite, but with a question inside that only known device types answer.
  static const std::unordered_set<std::string_view> kWhole = {"aten::convolution"};
  if (!op.hasSchema() || op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return false;
  if (in_parts.count(op.schema().name()) != 0) return false;
  if (kWhole.count(op.schema().name()) != 0) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.isKernelFallthroughKernel(c10::DispatchKey::CPU) &&
         kSkipped.count(op.schema().getNamespace().value_or("")) == 0;
}

}  // namespace

int64_t mirror_ops(const std::set<std::string>& in_parts,
                   const std::map<std::string, std::set<std::string>>& known_texts) {
  static std::mutex mutex;
  // Leaked: dropping a handle at exit would unregister from a dispatcher that may be gone.
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>();
  std::lock_guard<std::mutex> lock(mutex);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [name, texts] : known_texts) texts_by_op()[name] = texts;
  int64_t mirrored = 0;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !wants_mirror(*op, in_parts)) continue;
    const auto kernel = known_texts.count(name.name) == 0
                            ? c10::KernelFunction::makeFromBoxedFunction<&fallback>()
                            : c10::KernelFunction::makeFromBoxedFunction<&fallback_or_reference>();
    handles->push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1, kernel,
                                               std::nullopt, nullptr,
                                               "exkv simulated accelerator"));
    ++mirrored;
  }
  return mirrored;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace exkv::sim

// The ops that the CPU fallback cannot serve: those that make, move or re-view memory of a
// device, and the questions whose answer depends on what kind of device it is.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_ops.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "alias.h"
#include "allocator.h"
#include "ledger.h"
#include "streams.h"

namespace exkv::sim {
namespace {

constexpr c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

// --- making -------------------------------------------------------------------------------------

// The allocator fills the thread's current device; this names it for one allocation.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : previous_(current_device()) {
    set_current_device(Ledger::get().check_index(device.has_value() ? device->index() : -1));
  }
  ~OnDevice() { set_current_device(previous_); }

 private:
  c10::DeviceIndex previous_;
};

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided,
              "The simulated accelerator has dense tensors only.");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  OnDevice here(device);
  return at::detail::empty_generic(size, device_allocator(), kSimKeys, c10::dtype_or_default(dtype),
                                   memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                         std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  OnDevice here(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kSimKeys,
                                           c10::dtype_or_default(dtype));
}

// --- resizing and re-pointing -------------------------------------------------------------------

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<c10::MemoryFormat> memory_format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    const size_t needed =
        at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    const bool empty = c10::multiply_integers(size) == 0;
    if (!empty && needed > self.storage().nbytes()) {
      resize_storage(self.storage().unsafeGetStorageImpl(), needed);
    }
    impl->set_sizes_contiguous(size);
  }
  if (memory_format.has_value()) impl->empty_tensor_restride(*memory_format);
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
      device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

// --- copying ------------------------------------------------------------------------------------

int place_of(const at::Tensor& t) { return on_sim(t) ? t.device().index() : -1; }
bool has_no_memory(const at::Tensor& t) {
  return on_sim(t) && is_dry(t.storage().unsafeGetStorageImpl());
}

void check_copy_device(const at::Tensor& t) {
  TORCH_CHECK(on_sim(t) || t.is_cpu(),
              "The simulated accelerator copies to and from itself and "
              "the CPU, not ",
              t.device(), ".");
}

// Zeroes what the host side of a dry copy will be read from; large results stay untouched pages.
void copy_nothing(at::Tensor& self) {
  constexpr size_t kReadable = 16 << 20;
  if (!has_no_memory(self) && self.nbytes() <= kReadable) self.zero_();
}

// Whether a copy between host and device was left to a side stream; others are done at once, behind
// what their stream has been given.
bool left_to_stream(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (!lags() || on_sim(self) == on_sim(src)) return false;
  const c10::DeviceIndex index = (on_sim(self) ? self : src).device().index();
  const bool plain = self.is_contiguous() && src.is_contiguous() && self.sizes() == src.sizes() &&
                     self.scalar_type() == src.scalar_type();
  if (non_blocking && plain) {
    return queue_copy(index, self.mutable_data_ptr(), src.const_data_ptr(), self.nbytes());
  }
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kSim, index), current_stream(index));
  finish(stream, given(stream));
  return false;
}

void run_copy(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (left_to_stream(self, src, non_blocking)) return;
  Aliases aliases(c10::DispatchKey::CPU);
  at::Tensor to = on_sim(self) ? aliases.of(self) : self;
  const at::Tensor from = on_sim(src) ? aliases.of(src) : src;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::_ops::copy_::redispatch(kCpuKeys, to, from, non_blocking);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  check_copy_device(self);
  check_copy_device(src);
  const int to = place_of(self);
  const int from = place_of(src);
  Ledger& ledger = Ledger::get();
  if (to != from) ledger.note_transfer(from, to, self.nbytes());
  if (has_no_memory(self) || has_no_memory(src)) {
    TORCH_CHECK(at::is_expandable_to(src.sizes(), self.sizes()), "The source's sizes ", src.sizes(),
                " cannot be expanded to the destination's sizes ", self.sizes());
    copy_nothing(self);
  } else if (to >= 0 && from >= 0 && ledger.copy_fault(from, to)) {
    self.zero_();
  } else {
    run_copy(self, src, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  at::Tensor to = dst;
  return copy_(to, src, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  at::_ops::resize_::call(dst, src.sym_sizes(), std::nullopt);
  return copy_from(src, dst, false);
}

// --- questions ----------------------------------------------------------------------------------

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (has_no_memory(self)) {
    if (self.scalar_type() == c10::kBool) return false;
    if (c10::isIntegralType(self.scalar_type(), false)) return int64_t{0};
    return 0.0;
  }
  Aliases aliases(c10::DispatchKey::CPU);
  return at::_ops::_local_scalar_dense::redispatch(kCpuKeys, aliases.of(self));
}

// Which attention kernel: the CPU's own choice. It asks for shapes only, and is also asked about
// fake tensors, so it gets tensors without memory.
int64_t fused_sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& attn_mask, double dropout_p,
                         bool is_causal, std::optional<double> scale, bool enable_gqa) {
  std::optional<at::Tensor> mask;
  if (attn_mask.has_value() && attn_mask->defined()) mask = shape_on_cpu(*attn_mask);
  return at::_ops::_fused_sdp_choice::redispatch(kCpuKeys, shape_on_cpu(query), shape_on_cpu(key),
                                                 shape_on_cpu(value), mask, dropout_p, is_causal,
                                                 scale, enable_gqa);
}

// The same memory as a tensor of the CPU, which keeps it.
at::Tensor host_view(const at::Tensor& self) {
  TORCH_CHECK(!has_no_memory(self), "A tensor of a dry device has no memory to view.");
  return Aliases(c10::DispatchKey::CPU).of(self);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("record_stream", &record_stream);
}

}  // namespace exkv::sim

TORCH_LIBRARY(exkv_sim, m) { m.def("host_view(Tensor x) -> Tensor", &exkv::sim::host_view); }

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &exkv::sim::fused_sdp_choice)
}  // namespace at::native

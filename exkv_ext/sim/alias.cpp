// See alias.h.
#include "alias.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include "allocator.h"

namespace exkv::sim {
namespace {

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey backend, const at::Tensor& like) {
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                 like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

}  // namespace

Aliases::Aliases(c10::DispatchKey backend) : backend_(backend) {}

at::Tensor Aliases::of(const at::Tensor& t) {
  TORCH_CHECK(t.layout() == c10::kStrided && t.has_storage(),
              "The simulated accelerator runs dense tensors only, not ", t.toString(), ".");
  return tensor_over(alias_storage(t.storage()), backend_, t);
}

c10::Storage Aliases::alias_storage(const c10::Storage& storage) {
  for (const auto& [ours, alias] : storages_) {
    if (ours.is_alias_of(storage)) return alias;
  }
  const bool cpu = backend_ == c10::DispatchKey::CPU;
  c10::DataPtr data = cpu ? share(storage, c10::Device(c10::DeviceType::CPU))
                          : c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta));
  c10::Allocator* allocator =
      cpu ? c10::GetCPUAllocator() : c10::GetAllocator(c10::DeviceType::Meta);
  c10::Storage alias =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                            std::move(data), allocator, storage.resizable());
  storages_.emplace_back(storage, alias);
  return alias;
}

const c10::Storage* Aliases::original(const c10::StorageImpl* alias) const {
  for (const auto& [ours, theirs] : storages_) {
    if (theirs.unsafeGetStorageImpl() == alias) return &ours;
  }
  return nullptr;
}

void Aliases::follow(const at::Tensor& t, const at::Tensor& alias) {
  const c10::Storage& theirs = alias.storage();
  const c10::Storage* ours = original(theirs.unsafeGetStorageImpl());
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  const c10::DeviceIndex index = t.device().index();
  if (ours == nullptr) {
    impl->set_storage_keep_dtype(result_storage(theirs, index));
  } else if (theirs.nbytes() != ours->nbytes()) {
    c10::StorageImpl* storage = ours->unsafeGetStorageImpl();
    if (backend_ == c10::DispatchKey::Meta) {
      resize_storage(storage, theirs.nbytes());
    } else {
      c10::Storage grown = adopt(theirs, index);
      storage->set_data_ptr_noswap(
          grown.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, t.device())));
      storage->set_nbytes(theirs.nbytes());
    }
  }
  if (!same_shape(t, alias)) {
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

c10::Storage Aliases::result_storage(const c10::Storage& storage, c10::DeviceIndex index) {
  if (const c10::Storage* ours = original(storage.unsafeGetStorageImpl())) return *ours;
  for (const auto& [ours, theirs] : fresh_) {
    if (theirs.is_alias_of(storage)) return ours;
  }
  c10::Storage ours;
  if (backend_ == c10::DispatchKey::Meta) {
    ours = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
        allocate_zeroed_on(index, storage.nbytes()), device_allocator(), true);
  } else {
    ours = adopt(storage, index);
  }
  fresh_.emplace_back(ours, storage);
  return ours;
}

at::Tensor Aliases::result(const at::Tensor& t, c10::DeviceIndex index) {
  TORCH_CHECK(t.layout() == c10::kStrided && t.has_storage(),
              "The simulated accelerator makes dense tensors only, not ", t.toString(), ".");
  return tensor_over(result_storage(t.storage(), index), c10::DispatchKey::PrivateUse1, t);
}

at::Tensor shape_on_cpu(const at::Tensor& t) {
  if (!t.defined()) return t;
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), nullptr, false);
  return tensor_over(std::move(storage), c10::DispatchKey::CPU, t);
}

}  // namespace exkv::sim

// Second views of tensors under another backend, without a copy: how a CPU kernel gets to see the
// memory of a simulated device, and a Meta kernel the shapes of a tensor that has no memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <utility>

namespace exkv::sim {

inline bool on_sim(const at::Tensor& t) { return t.defined() && t.is_privateuseone(); }

// Makes aliases and finds the way back. Tensors that share a storage get aliases that share one,
// so that kernels see overlaps and results that are views are recognised as such.
class Aliases {
 public:
  explicit Aliases(c10::DispatchKey backend);  // CPU or Meta

  // The same sizes, strides and (for CPU) memory as `t`, on this object's backend.
  at::Tensor of(const at::Tensor& t);

  // The storage that an alias' storage stands for, or null if a kernel made it.
  const c10::Storage* original(const c10::StorageImpl* alias) const;

  // Follows an alias that a kernel resized or pointed elsewhere: `t` gets its shape and storage.
  void follow(const at::Tensor& t, const at::Tensor& alias);

  // A kernel's result as a tensor of device `index`: a view of an input, or freshly charged.
  at::Tensor result(const at::Tensor& t, c10::DeviceIndex index);

 private:
  c10::Storage alias_storage(const c10::Storage& storage);
  c10::Storage result_storage(const c10::Storage& storage, c10::DeviceIndex index);

  c10::DispatchKey backend_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 6> storages_;  // original, alias
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 2> fresh_;     // ours, the kernel's
};

// A CPU tensor of the shape of `t` without memory, for code that only asks about shapes.
at::Tensor shape_on_cpu(const at::Tensor& t);

}  // namespace exkv::sim

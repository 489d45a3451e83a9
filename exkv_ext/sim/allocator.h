// Memory of the simulated devices: host memory whose life is booked in the ledger. A block knows
// its device and its charge; dropping the DataPtr frees the memory and gives the charge back.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include "ledger.h"

namespace exkv::sim {

// Uninitialised memory on a device (an address without memory for large blocks in dry mode).
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t nbytes);

// Like allocate_on, and zeroed where there is memory: the result of an op that ran on shapes only.
c10::DataPtr allocate_zeroed_on(c10::DeviceIndex index, size_t nbytes);

// Turns the storage of a CPU kernel's result into a storage of a device, without a copy. In dry
// mode a large one keeps its charge and gives up its memory.
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);

// A second owner of the memory of `storage`, for a storage of device `device`.
c10::DataPtr share(const c10::Storage& storage, c10::Device device);

// Grows or shrinks a storage of a simulated device, keeping its contents.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// True if the storage has no memory behind its address (dry mode).
bool is_dry(const c10::StorageImpl* storage);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// While one is alive, host memory that this thread's CPU kernels allocate is charged to a device.
// Does nothing unless the ledger charges temporaries.
class ChargeTemporaries {
 public:
  explicit ChargeTemporaries(c10::DeviceIndex index);
  ~ChargeTemporaries();
  ChargeTemporaries(const ChargeTemporaries&) = delete;
  ChargeTemporaries& operator=(const ChargeTemporaries&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// Puts the charging allocator in front of the CPU allocator (once, if temporaries are charged).
void install_temporaries_allocator();

}  // namespace exkv::sim

// See allocator.h.
#include "allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "streams.h"

namespace exkv::sim {
namespace {

constexpr size_t kAlignment = 64;

enum class Backing { kHeap, kReserved, kAdopted };

struct Block {
  c10::DeviceIndex index;
  Backing backing;
  size_t requested;
  Charge charge;
  void* data = nullptr;
  c10::DataPtr host;  // kAdopted: the memory of a CPU kernel's result
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memory_freed(block->data, block->requested);
  if (block->backing == Backing::kHeap) std::free(block->data);
  if (block->backing == Backing::kReserved) munmap(block->data, block->charge.nbytes);
  block->host.clear();
  Ledger::get().release(block->index, block->charge, block->requested);
  delete block;
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

c10::DataPtr data_ptr_of(Block* block) {
  return {block->data, block, &free_block, c10::Device(kSim, block->index)};
}

// The charge is already booked: whatever fails after it must give it back.
c10::DataPtr back_with_memory(c10::DeviceIndex index, size_t nbytes, const Charge& charge,
                              bool reserve) {
  void* data = nullptr;
  if (reserve) {
    // Read-only: a stray read sees zeros, a stray write is a bug and stops at once.
    data =
        mmap(nullptr, charge.nbytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) data = nullptr;
  } else if (posix_memalign(&data, kAlignment, charge.nbytes) != 0) {
    data = nullptr;
  }
  if (data == nullptr) {
    Ledger::get().release(index, charge, nbytes);
    TORCH_CHECK(false, "The host has no ", nbytes,
                " bytes left to simulate memory of sim:", static_cast<int>(index),
                " with; the simulated device itself has room.");
  }
  const Backing backing = reserve ? Backing::kReserved : Backing::kHeap;
  return data_ptr_of(new Block{index, backing, nbytes, charge, data, {}});
}

bool wants_dry(size_t nbytes) { return Ledger::get().dry() && nbytes >= kDryThreshold; }

// --- charging of what CPU kernels allocate ------------------------------------------------------

thread_local c10::DeviceIndex charged_device = -1;

// Host blocks that carry a charge. Kept beside the blocks, not in them, because a CPU allocator's
// context must be the data pointer itself.
class ChargedHostBlocks {
 public:
  struct Entry {
    c10::DeviceIndex index;
    size_t requested;
    Charge charge;
  };

  static ChargedHostBlocks& get() {
    static auto* blocks = new ChargedHostBlocks();
    return *blocks;
  }

  void add(void* data, Entry entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_[data] = entry;
    live_.fetch_add(1, std::memory_order_release);
  }

  bool take(void* data, Entry* entry) {
    if (live_.load(std::memory_order_acquire) == 0) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = entries_.find(data);
    if (found == entries_.end()) return false;
    *entry = found->second;
    entries_.erase(found);
    live_.fetch_sub(1, std::memory_order_release);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, Entry> entries_;
  std::atomic<int64_t> live_{0};
};

c10::Allocator* plain_cpu_allocator = nullptr;

void free_host(void* data) {
  ChargedHostBlocks::Entry entry;
  if (ChargedHostBlocks::get().take(data, &entry)) {
    Ledger::get().release(entry.index, entry.charge, entry.requested);
  }
  plain_cpu_allocator->raw_deleter()(data);
}

class TemporariesAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::DeviceIndex index = charged_device;
    if (nbytes == 0 || index < 0) return with_our_deleter(plain_cpu_allocator->allocate(nbytes));
    const Charge charge = Ledger::get().charge(index, nbytes);
    c10::DataPtr data = with_our_deleter(plain_cpu_allocator->allocate(nbytes));
    ChargedHostBlocks::get().add(data.get(), {index, nbytes, charge});
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static c10::DataPtr with_our_deleter(c10::DataPtr data) {
    TORCH_CHECK(data.compare_exchange_deleter(plain_cpu_allocator->raw_deleter(), &free_host),
                "Temporaries can be charged only on top of the plain CPU allocator.");
    return data;
  }
};

// --- the device's allocator ---------------------------------------------------------------------

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(current_device(), nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  bool initialized() override { return Ledger::get().device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override { Ledger::get().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), stream.id());
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    Ledger::get().reset_accumulated(index);
  }
  void resetPeakStats(c10::DeviceIndex index) override { Ledger::get().reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Ledger::get().touch(index);
    const DeviceBooks b = Ledger::get().books(index);
    const size_t taken = b.context + b.reserved;
    return {b.capacity > taken ? b.capacity - taken : 0, b.capacity};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const DeviceBooks b = Ledger::get().books(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const Stat bytes = stat(b.allocated, b.peak, b.charged_bytes, b.released_bytes);
    const Stat blocks = stat(b.live, b.peak_live, b.charges, b.releases);
    stats.allocated_bytes[0] = stats.active_bytes[0] = bytes;
    stats.reserved_bytes[0] = stat(b.reserved, b.peak_reserved, 0, 0);
    stats.inactive_split_bytes[0] = stat(b.inactive_split, b.inactive_split, 0, 0);
    stats.allocation[0] = stats.segment[0] = stats.active[0] = blocks;
    stats.requested_bytes[0] = stat(b.requested, b.peak_requested, 0, 0);
    stats.num_ooms = b.ooms;
    stats.num_device_alloc = b.charges;
    stats.num_device_free = b.releases;
    return stats;
  }

 private:
  static Stat stat(int64_t current, int64_t peak, int64_t allocated, int64_t freed) {
    Stat s;
    s.current = current;
    s.peak = peak;
    s.allocated = allocated;
    s.freed = freed;
    return s;
  }
};

// --- pinned host memory -------------------------------------------------------------------------

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, host};
    Ledger::get().count_pinned();
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, kAlignment, nbytes) == 0, "The host has no ", nbytes,
                " bytes left for pinned memory.");
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(data)] = nbytes;
    return {data, data, &free_pinned, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  bool holds(const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return false;
    auto range = std::prev(next);
    return address < range->first + range->second;
  }

  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }

 private:
  static void free_pinned(void* data) {
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      get().ranges_.erase(reinterpret_cast<uintptr_t>(data));
    }
    std::free(data);
  }

  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

SimAllocator& sim_allocator() {
  static auto* allocator = new SimAllocator();
  return *allocator;
}

const bool registered = [] {
  c10::SetAllocator(kSim, &sim_allocator());
  return true;
}();

}  // namespace

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t nbytes) {
  index = Ledger::get().check_index(index);
  if (nbytes == 0) return {nullptr, c10::Device(kSim, index)};
  const Charge charge = Ledger::get().charge(index, nbytes);
  return back_with_memory(index, nbytes, charge, wants_dry(nbytes));
}

c10::DataPtr allocate_zeroed_on(c10::DeviceIndex index, size_t nbytes) {
  c10::DataPtr data = allocate_on(index, nbytes);
  if (nbytes != 0 && !wants_dry(nbytes)) std::memset(data.get(), 0, nbytes);
  return data;
}

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index) {
  const size_t nbytes = host.nbytes();
  c10::DataPtr data(nullptr, c10::Device(kSim, index));
  if (nbytes != 0 && wants_dry(nbytes)) {
    data = allocate_on(index, nbytes);
  } else if (nbytes != 0) {
    void* memory = host.mutable_data();
    ChargedHostBlocks::Entry entry{index, nbytes, {}};
    if (!ChargedHostBlocks::get().take(memory, &entry)) {
      entry.charge = Ledger::get().charge(index, nbytes);
    }
    auto* block =
        new Block{entry.index, Backing::kAdopted, entry.requested, entry.charge, memory, {}};
    block->host = share(host, c10::Device(c10::DeviceType::CPU));
    data = data_ptr_of(block);
  }
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                               std::move(data), &sim_allocator(), true);
}

c10::DataPtr share(const c10::Storage& storage, c10::Device device) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  auto drop = [](void* context) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
  };
  // const_cast: the CPU kernel that gets this alias decides by its schema whether it writes.
  return {const_cast<void*>(storage.data()), impl, drop, device};
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const bool was_dry = is_dry(storage);
  c10::DataPtr data = allocate_on(storage->device().index(), nbytes);
  const Block* block = block_of(data);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept != 0 && !was_dry && block->backing != Backing::kReserved) {
    std::memcpy(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

bool is_dry(const c10::StorageImpl* storage) {
  if (!Ledger::get().dry()) return false;
  const Block* block = block_of(storage->data_ptr());
  return block != nullptr && block->backing == Backing::kReserved;
}

c10::Allocator* device_allocator() { return &sim_allocator(); }
c10::Allocator* pinned_allocator() { return &PinnedAllocator::get(); }
bool is_pinned(const void* data) { return PinnedAllocator::get().holds(data); }

ChargeTemporaries::ChargeTemporaries(c10::DeviceIndex index) : previous_(charged_device) {
  if (Ledger::get().charge_temporaries()) charged_device = index;
}

ChargeTemporaries::~ChargeTemporaries() { charged_device = previous_; }

void install_temporaries_allocator() {
  if (!Ledger::get().charge_temporaries() || plain_cpu_allocator != nullptr) return;
  plain_cpu_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new TemporariesAllocator(), /*priority=*/255);
}

}  // namespace exkv::sim

// See ledger.h.
#include "ledger.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>

namespace exkv::sim {

namespace {

thread_local c10::DeviceIndex current_device_index = 0;

void throw_runtime_error() {
  constexpr int32_t kMemoryAllocation = 2;  // cudaErrorMemoryAllocation
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              kMemoryAllocation,
                              "CUDA error: out of memory (injected by exkv.sim.fail_allocation)");
}

// Throws what libraries beside the caching allocator do where a device is full.
void throw_in_words(FailureWords words, c10::DeviceIndex index) {
  switch (words) {
    case FailureWords::kAllocator:
      return;
    case FailureWords::kCublas:
      TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ",
                  "`cublasCreate(handle)` (injected by exkv.sim.fail_allocation)");
    case FailureWords::kRuntime:
      return throw_runtime_error();
    case FailureWords::kLaunch:
      TORCH_CHECK(false, "a kernel on sim:", static_cast<int>(index),
                  " failed to launch: out of memory (injected by exkv.sim.fail_allocation)");
  }
}

}  // namespace

c10::DeviceIndex current_device() { return current_device_index; }
void set_current_device(c10::DeviceIndex index) { current_device_index = index; }

Ledger& Ledger::get() {
  static Ledger* ledger = new Ledger();
  return *ledger;
}

void Ledger::configure(const std::vector<int64_t>& capacities, bool dry, bool charge_temporaries,
                       const std::optional<SegmentRules>& rules, size_t context) {
  TORCH_CHECK(device_count() == 0, "The simulated devices are already configured.");
  TORCH_CHECK(!capacities.empty() && capacities.size() <= kMaxDevices, "1 to ", kMaxDevices,
              " simulated devices are possible, not ", capacities.size(), ".");
  for (size_t i = 0; i < capacities.size(); ++i) {
    TORCH_CHECK(capacities[i] > 0, "sim:", i, " cannot have ", capacities[i], " bytes.");
    devices_[i].books.capacity = static_cast<size_t>(capacities[i]);
    if (rules) {
      devices_[i].segments = std::make_unique<Segments>(*rules);
      devices_[i].books.context = context;
    }
  }
  dry_ = dry;
  charge_temporaries_ = charge_temporaries;
  count_.store(static_cast<int>(capacities.size()), std::memory_order_release);
}

c10::DeviceIndex Ledger::check_index(c10::DeviceIndex index) const {
  if (index == -1) index = current_device();
  const int count = device_count();
  TORCH_CHECK(index >= 0 && index < count, "sim:", static_cast<int>(index), " does not exist: ",
              count == 0
                  ? std::string("no simulated device is configured.")
                  : "the simulated devices are sim:0 to sim:" + std::to_string(count - 1) + ".");
  return index;
}

bool Ledger::injected_failure() {
  const int64_t number = charge_count_.fetch_add(1, std::memory_order_relaxed) + 1;
  int64_t expected = number;  // equal only for the one charge that was asked to fail
  return fail_at_.compare_exchange_strong(expected, 0);
}

// The bytes, if the device has them; its mutex is held.
std::optional<Charge> Ledger::booked(Device& device, size_t nbytes) {
  const DeviceBooks& b = device.books;
  const size_t capacity = b.capacity > b.context ? b.capacity - b.context : 0;
  if (device.segments != nullptr) {
    Segments::Block* block = device.segments->allocate(nbytes, capacity);
    return block == nullptr ? std::nullopt : std::optional<Charge>({block->size, block});
  }
  const size_t rounded = round_up(nbytes);
  const bool fits =
      rounded >= nbytes && b.allocated <= capacity && rounded <= capacity - b.allocated;
  return fits ? std::optional<Charge>({rounded, nullptr}) : std::nullopt;
}

Charge Ledger::charge(c10::DeviceIndex index, size_t nbytes) {
  touch(index);
  const bool injected = injected_failure();
  Device& device = devices_[index];
  std::unique_lock<std::mutex> lock(device.mutex);
  DeviceBooks& b = device.books;
  const std::optional<Charge> charge = injected ? std::nullopt : booked(device, nbytes);
  if (device.segments != nullptr) b.reserved = device.segments->reserved();
  if (!charge) {
    ++b.ooms;
    const DeviceBooks snapshot = b;
    lock.unlock();
    if (injected) throw_in_words(fail_words_.load(), index);
    out_of_memory(index, nbytes, snapshot, injected);
  }
  b.allocated += charge->nbytes;
  b.requested += nbytes;
  b.charged_bytes += charge->nbytes;
  if (device.segments == nullptr) b.reserved = b.allocated;
  ++b.live;
  ++b.charges;
  b.peak = std::max(b.peak, b.allocated);
  b.peak_requested = std::max(b.peak_requested, b.requested);
  b.peak_reserved = std::max(b.peak_reserved, b.reserved);
  b.peak_live = std::max(b.peak_live, b.live);
  return *charge;
}

void Ledger::release(c10::DeviceIndex index, const Charge& charge, size_t requested) noexcept {
  Device& device = devices_[index];
  std::lock_guard<std::mutex> lock(device.mutex);
  DeviceBooks& b = device.books;
  if (charge.block != nullptr) device.segments->release(charge.block);
  b.allocated -= charge.nbytes;
  b.requested -= requested;
  if (device.segments == nullptr) b.reserved = b.allocated;
  b.released_bytes += charge.nbytes;
  --b.live;
  ++b.releases;
}

void Ledger::empty_cache() {
  for (int i = 0; i < device_count(); ++i) {
    Device& device = devices_[i];
    std::lock_guard<std::mutex> lock(device.mutex);
    if (device.segments == nullptr) continue;
    device.segments->empty_cache();
    device.books.reserved = device.segments->reserved();
  }
}

void Ledger::out_of_memory(c10::DeviceIndex index, size_t nbytes, const DeviceBooks& books,
                           bool injected) const {
  using c10::CachingAllocator::format_size;
  const size_t taken = books.context + books.reserved;
  const size_t free = books.capacity > taken ? books.capacity - taken : 0;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ",
                   format_size(nbytes), " (", nbytes, " bytes). sim:", static_cast<int>(index),
                   " has a total capacity of ", format_size(books.capacity), " of which ",
                   format_size(free), " (", free, " bytes) is free; ", format_size(books.allocated),
                   " (", books.allocated, " bytes) is in use.",
                   books.reserved == books.allocated
                       ? ""
                       : " " + std::to_string(books.reserved) + " bytes are reserved.",
                   injected ? " This failure was injected by exkv.sim.fail_allocation." : "");
  std::abort();  // not reached: the check above always throws
}

DeviceBooks Ledger::books(c10::DeviceIndex index) const {
  const Device& device = devices_[check_index(index)];
  std::lock_guard<std::mutex> lock(device.mutex);
  DeviceBooks books = device.books;
  if (device.segments != nullptr) books.inactive_split = device.segments->inactive_split();
  return books;
}

void Ledger::set_capacity(c10::DeviceIndex index, int64_t capacity) {
  TORCH_CHECK(capacity >= 0, "A capacity of ", capacity, " bytes is not possible.");
  Device& device = devices_[check_index(index)];
  std::lock_guard<std::mutex> lock(device.mutex);
  device.books.capacity = static_cast<size_t>(capacity);
}

void Ledger::reset_peak(c10::DeviceIndex index) {
  Device& device = devices_[check_index(index)];
  std::lock_guard<std::mutex> lock(device.mutex);
  device.books.peak = device.books.allocated;
  device.books.peak_requested = device.books.requested;
  device.books.peak_reserved = device.books.reserved;
  device.books.peak_live = device.books.live;
}

void Ledger::reset_accumulated(c10::DeviceIndex index) {
  Device& device = devices_[check_index(index)];
  std::lock_guard<std::mutex> lock(device.mutex);
  DeviceBooks& b = device.books;
  b.charges = b.releases = b.ooms = 0;
  b.charged_bytes = b.released_bytes = 0;
}

void Ledger::fail_charge(int64_t n, FailureWords words) {
  TORCH_CHECK(n >= 0, "The number of the allocation that fails cannot be ", n, ".");
  fail_words_.store(words);
  fail_at_.store(n == 0 ? 0 : charge_count() + n);
}

void Ledger::fail_pinned(int64_t n) {
  TORCH_CHECK(n >= 0, "The number of the allocation that fails cannot be ", n, ".");
  fail_pinned_at_.store(n == 0 ? 0 : pinned_count() + n);
}

void Ledger::count_pinned() {
  int64_t expected = pinned_count_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (fail_pinned_at_.compare_exchange_strong(expected, 0)) throw_runtime_error();
}

void Ledger::touch(c10::DeviceIndex index) {
  constexpr int32_t kDevicesUnavailable = 46;  // cudaErrorDevicesUnavailable
  Device& device = devices_[check_index(index)];
  ++device.touches;
  std::lock_guard<std::mutex> lock(device.mutex);
  if (device.refusal.empty()) return;
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              kDevicesUnavailable, device.refusal);
}

void Ledger::refuse(c10::DeviceIndex index, const std::string& why) {
  Device& device = devices_[check_index(index)];
  std::lock_guard<std::mutex> lock(device.mutex);
  device.refusal = why;
}

void Ledger::note_transfer(int src, int dst, size_t nbytes) {
  transferred_[cell(src, dst)].fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
}

std::vector<std::tuple<int, int, int64_t>> Ledger::transfers() const {
  std::vector<std::tuple<int, int, int64_t>> found;
  for (int src = -1; src < device_count(); ++src) {
    for (int dst = -1; dst < device_count(); ++dst) {
      const int64_t nbytes = transferred_[cell(src, dst)].load(std::memory_order_relaxed);
      if (nbytes != 0) found.emplace_back(src, dst, nbytes);
    }
  }
  return found;
}

void Ledger::reset_transfers() {
  for (auto& nbytes : transferred_) nbytes.store(0, std::memory_order_relaxed);
}

void Ledger::set_copy_fault(int src, int dst, bool on) {
  TORCH_CHECK(src >= 0 && dst >= 0 && src < device_count() && dst < device_count(),
              "A copy fault is between two simulated devices, not ", src, " and ", dst, ".");
  faults_[cell(src, dst)].store(on, std::memory_order_relaxed);
}

bool Ledger::copy_fault(int src, int dst) const {
  return faults_[cell(src, dst)].load(std::memory_order_relaxed);
}

}  // namespace exkv::sim

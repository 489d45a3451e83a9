// The books of the simulated devices: who has how many bytes, of how many, and what faults are to
// be played. No tensor and no memory here: memory is in allocator.h, which charges this ledger.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "segments.h"

namespace exkv::sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;
// CUDA's allocator hands out multiples of 512 bytes; so does this one, so that plans carry over.
constexpr size_t kGranularity = 512;
// In dry mode, storages from this size on have an address but no memory behind it.
constexpr size_t kDryThreshold = 64 * 1024;

inline size_t round_up(size_t nbytes) {
  return (nbytes + kGranularity - 1) / kGranularity * kGranularity;
}

struct DeviceBooks {
  size_t capacity = 0;
  size_t allocated = 0;  // rounded bytes in use
  size_t requested = 0;  // the same before rounding
  size_t peak = 0;
  size_t peak_requested = 0;
  size_t reserved = 0;  // of the capacity: segments where there are any, else what is allocated
  size_t peak_reserved = 0;
  size_t context = 0;         // of the capacity, taken by the driver
  size_t inactive_split = 0;  // free pieces of segments that are partly in use
  int64_t live = 0;           // blocks in use
  int64_t peak_live = 0;
  int64_t charges = 0;   // since the last reset of the accumulated figures
  int64_t releases = 0;  // likewise
  size_t charged_bytes = 0;
  size_t released_bytes = 0;
  int64_t ooms = 0;
};

// What was booked for one storage: bytes, and the block where memory comes in segments.
struct Charge {
  size_t nbytes = 0;
  Segments::Block* block = nullptr;
};

// In whose words an allocation that is asked to fail does so: the caching allocator's, cuBLAS's,
// the CUDA runtime's, those of a kernel's launch.
enum class FailureWords { kAllocator, kCublas, kRuntime, kLaunch };

class Ledger {
 public:
  // Leaked on purpose: tensors may outlive every static destructor.
  static Ledger& get();

  // With `rules`, each device gives memory in segments, and its driver's context takes `context`
  // bytes of it.
  void configure(const std::vector<int64_t>& capacities, bool dry, bool charge_temporaries,
                 const std::optional<SegmentRules>& rules, size_t context);
  int device_count() const { return count_.load(std::memory_order_acquire); }
  bool dry() const { return dry_; }
  bool charge_temporaries() const { return charge_temporaries_; }

  // Resolves index -1 to the thread's current device; throws for a device that does not exist.
  c10::DeviceIndex check_index(c10::DeviceIndex index) const;

  // Books `nbytes` (> 0), rounded up. Throws c10::OutOfMemoryError.
  Charge charge(c10::DeviceIndex index, size_t nbytes);
  void release(c10::DeviceIndex index, const Charge& charge, size_t requested) noexcept;
  // Gives back the segments in which nothing is in use.
  void empty_cache();

  DeviceBooks books(c10::DeviceIndex index) const;
  void set_capacity(c10::DeviceIndex index, int64_t capacity);
  void reset_peak(c10::DeviceIndex index);
  void reset_accumulated(c10::DeviceIndex index);

  // The n-th charge from now on (1 is the next) fails once; 0 clears.
  void fail_charge(int64_t n, FailureWords words);
  // The same of pinned allocations, which fail in the runtime's words.
  void fail_pinned(int64_t n);
  void count_pinned();
  int64_t pinned_count() const { return pinned_count_.load(std::memory_order_relaxed); }
  int64_t charge_count() const { return charge_count_.load(std::memory_order_relaxed); }

  // Called for whatever makes a real device's context: allocations, new streams, the question for
  // free memory. Throws if the device refuses.
  void touch(c10::DeviceIndex index);
  int64_t touches(c10::DeviceIndex index) const { return devices_[check_index(index)].touches; }
  // From now on a touch fails with this text; empty clears.
  void refuse(c10::DeviceIndex index, const std::string& why);

  // Copies between places. A place is a device index, or -1 for the host.
  void note_transfer(int src, int dst, size_t nbytes);
  std::vector<std::tuple<int, int, int64_t>> transfers() const;
  void reset_transfers();
  void set_copy_fault(int src, int dst, bool on);
  bool copy_fault(int src, int dst) const;

 private:
  Ledger() = default;
  struct Device {
    mutable std::mutex mutex;
    DeviceBooks books;
    std::unique_ptr<Segments> segments;
    std::atomic<int64_t> touches{0};
    std::string refusal;
  };

  bool injected_failure();
  static std::optional<Charge> booked(Device& device, size_t nbytes);
  [[noreturn]] void out_of_memory(c10::DeviceIndex index, size_t nbytes, const DeviceBooks& books,
                                  bool injected) const;

  static constexpr int kPlaces = kMaxDevices + 1;
  static int cell(int src, int dst) { return (src + 1) * kPlaces + (dst + 1); }

  Device devices_[kMaxDevices];
  std::atomic<int> count_{0};
  bool dry_ = false;
  bool charge_temporaries_ = false;
  std::atomic<int64_t> charge_count_{0};
  std::atomic<int64_t> fail_at_{0};
  std::atomic<FailureWords> fail_words_{FailureWords::kAllocator};
  std::atomic<int64_t> pinned_count_{0};
  std::atomic<int64_t> fail_pinned_at_{0};
  std::atomic<int64_t> transferred_[kPlaces * kPlaces] = {};
  std::atomic<bool> faults_[kPlaces * kPlaces] = {};
};

// The current device is a property of the thread, as on CUDA.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
// And its stream there, 0 for the default one.
int64_t& current_stream(c10::DeviceIndex index);

}  // namespace exkv::sim

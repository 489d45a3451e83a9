// What PyTorch asks a device type for besides kernels: current device, streams and events (each
// op has finished when it returns, but for copies on streams that lag: streams.h), hooks,
// generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "allocator.h"
#include "generator.h"
#include "ledger.h"
#include "streams.h"

namespace exkv::sim {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  c10::Stream stream;
  int64_t copies;  // that the stream had been given
  Clock::time_point time;
};

struct SimGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override {
    set_current_device(Ledger::get().check_index(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Ledger::get().device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = Ledger::get().check_index(device.index());
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const c10::DeviceIndex index = Ledger::get().check_index(device.index());
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    const c10::DeviceIndex index = Ledger::get().check_index(device.index());
    Ledger::get().touch(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int64_t& current = current_stream(stream.device_index());
    const c10::Stream previous(c10::Stream::UNSAFE, stream.device(), current);
    current = stream.id();
    return previous;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(stream, given(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { finish_device(index); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{stream, given(stream), Clock::now()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // Whoever waits for a stream that lags finds its copies done.
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    if (recorded != nullptr) finish(recorded->stream, recorded->copies);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Ledger::get().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Ledger::get().device_count());
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(Ledger::get().check_index(index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = current_device();
    setCurrentDevice(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  return true;
}();

class SimGenerator final : public c10::GeneratorImpl {
 public:
  SimGenerator(c10::DeviceIndex index, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kSim, index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host_).seed(); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device_.index(), host_.clone());
  }

  at::Generator host_;
};

}  // namespace

int64_t& current_stream(c10::DeviceIndex index) {
  thread_local int64_t streams[kMaxDevices] = {};
  return streams[Ledger::get().check_index(index)];
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<SimGenerator>(Ledger::get().check_index(index),
                                          at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kMaxDevices; ++i) {
      all->push_back(at::make_generator<SimGenerator>(i, at::detail::getDefaultCPUGenerator()));
    }
    return all;
  }();
  return (*generators)[Ledger::get().check_index(index)];
}

at::Generator host_generator(const at::Generator& generator) {
  if (!generator.defined()) return generator;
  TORCH_CHECK(generator.device().type() == kSim,
              "Expected a 'sim' device type for generator but "
              "found '",
              generator.device().type(), "'");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace exkv::sim

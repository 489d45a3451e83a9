// The Python module exkv_ext._sim: what exkv/sim.py calls. Loading it registers the backend.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "allocator.h"
#include "fallback.h"
#include "ledger.h"

namespace sim = exkv::sim;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::Ledger& ledger = sim::Ledger::get();
  m.def("configure", [&](const std::vector<int64_t>& capacities, bool dry, bool temporaries) {
    ledger.configure(capacities, dry, temporaries);
    sim::install_temporaries_allocator();
  });
  m.def("device_count", [&] { return ledger.device_count(); });
  m.def("current_device", [] { return static_cast<int>(sim::current_device()); });
  m.def("set_device", [&](int index) { sim::set_current_device(ledger.check_index(index)); });
  m.def("capacity", [&](int index) { return ledger.books(index).capacity; });
  m.def("set_capacity", [&](int index, int64_t nbytes) { ledger.set_capacity(index, nbytes); });
  m.def("fail_charge", [&](int64_t n) { ledger.fail_charge(n); });
  m.def("charge_count", [&] { return ledger.charge_count(); });
  m.def("set_copy_fault", [&](int src, int dst, bool on) { ledger.set_copy_fault(src, dst, on); });
  m.def("transfers", [&] { return ledger.transfers(); });
  m.def("reset_transfers", [&] { ledger.reset_transfers(); });
  m.def("mirror_ops", &sim::mirror_ops);
  // The argument is `tensor.untyped_storage()._cdata`.
  m.def("is_dry", [](uintptr_t storage) {
    return sim::is_dry(reinterpret_cast<c10::StorageImpl*>(storage));
  });
}

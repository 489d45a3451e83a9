// The Python module exkv_ext._sim: what exkv/sim.py calls. Loading it registers the backend.
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "allocator.h"
#include "fallback.h"
#include "ledger.h"
#include "streams.h"

namespace py = pybind11;
namespace sim = exkv::sim;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::Ledger& ledger = sim::Ledger::get();
  py::class_<sim::SegmentRules>(m, "SegmentRules")
      .def(py::init([](bool expandable, std::optional<size_t> max_split,
                       size_t max_unsplit_rounding, size_t power2_divisions, size_t large_segment) {
             return sim::SegmentRules{expandable, max_split.value_or(SIZE_MAX),
                                      max_unsplit_rounding, power2_divisions, large_segment};
           }),
           py::kw_only(), py::arg("expandable"), py::arg("max_split"),
           py::arg("max_unsplit_rounding"), py::arg("power2_divisions"), py::arg("large_segment"));
  m.def("configure", [&](const std::vector<int64_t>& capacities, bool dry, bool temporaries,
                         const std::optional<sim::SegmentRules>& rules, size_t context) {
    ledger.configure(capacities, dry, temporaries, rules, context);
    sim::install_temporaries_allocator();
  });
  m.def("device_count", [&] { return ledger.device_count(); });
  m.def("current_device", [] { return static_cast<int>(sim::current_device()); });
  m.def("set_device", [&](int index) { sim::set_current_device(ledger.check_index(index)); });
  m.def("capacity", [&](int index) { return ledger.books(index).capacity; });
  m.def("set_capacity", [&](int index, int64_t nbytes) { ledger.set_capacity(index, nbytes); });
  m.def("fail_charge", [&](int64_t n, int words) {
    ledger.fail_charge(n, static_cast<sim::FailureWords>(words));
  });
  m.def("fail_pinned", [&](int64_t n) { ledger.fail_pinned(n); });
  m.def("pinned_count", [&] { return ledger.pinned_count(); });
  m.def("charge_count", [&] { return ledger.charge_count(); });
  m.def("touches", [&](int index) { return ledger.touches(index); });
  m.def("refuse", [&](int index, const std::string& why) { ledger.refuse(index, why); });
  m.def("set_copy_fault", [&](int src, int dst, bool on) { ledger.set_copy_fault(src, dst, on); });
  m.def("set_lag", &sim::set_lag);
  m.def("lags", &sim::lags);
  m.def("lifetime_errors", &sim::lifetime_errors);
  m.def("transfers", [&] { return ledger.transfers(); });
  m.def("reset_transfers", [&] { ledger.reset_transfers(); });
  m.def("mirror_ops", &sim::mirror_ops);
  // The argument is `tensor.untyped_storage()._cdata`.
  m.def("is_dry", [](uintptr_t storage) {
    return sim::is_dry(reinterpret_cast<c10::StorageImpl*>(storage));
  });
}

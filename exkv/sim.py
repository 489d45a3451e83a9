"""The simulated accelerator: torch devices ``sim:0``, ``sim:1``, ... in host memory.

They have hard capacities, raise real ``torch.OutOfMemoryError``, answer ``torch.accelerator.*``,
and compute bit-identically to the CPU, so that placement, loading and rollback run the same code as
on GPUs. With ``EXKV_SIM_ALLOCATOR=cuda`` they allocate in segments, as torch's caching allocator
does, and a driver's context takes some memory; libraries' workspaces are not modelled.

The devices themselves are ``exkv_ext/sim`` (C++); start reading there at ``fallback.cpp``. They are
compiled where they are first used: ``exkv_ext/simulator.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from exkv.caching_allocator import Rules
from exkv.sim_clock import Clock
from exkv.sizes import SIZE_FORMS, checked_bytes, parse_sizes
from exkv_ext import simulator

__all__ = [
    "MEMORY_ERRORS",
    "Clock",
    "allocation_count",
    "copy_fault",
    "enable",
    "enable_from_env",
    "enabled",
    "fail_allocation",
    "host_view",
    "is_dry",
    "lifetime_errors",
    "mirror_ops",
    "let_streams_lag",
    "refuse",
    "reset_transfer_bytes",
    "set_capacity",
    "touches",
    "transfer_bytes",
]

_MAX_DEVICES = 64
#: Errors by which real devices report that memory ran out; the first four as in ``ledger.h``.
MEMORY_ERRORS = ("torch", "cublas", "runtime", "launch", "pinned")
#: Kernels of the simulated devices that differ from the CPU's.
_LIBRARY = torch.library.Library("aten", "IMPL")

#: Size of a simulated driver's context on each device, in segments: small, for small devices.
_CONTEXT = 2 << 20
#: How devices allocate: to the rounded byte, or in the segments of torch's caching allocator.
ALLOCATORS = ("exact", "cuda")

_enabled_with: tuple[tuple[int, ...], bool, bool, str] | None = None


def _capacities(devices: str | Sequence[int | str]) -> tuple[int, ...]:
    if isinstance(devices, str):
        sizes = parse_sizes(devices)
    else:
        sizes = []
        for size in devices:
            if isinstance(size, bool) or not isinstance(size, int | str):
                raise TypeError(f"{size!r} is not a size: give bytes (int) or text; {SIZE_FORMS}")
            sizes += parse_sizes(size) if isinstance(size, str) else [checked_bytes(size, size)]
    if not 1 <= len(sizes) <= _MAX_DEVICES:
        raise ValueError(f"1 to {_MAX_DEVICES} simulated devices are possible, not {len(sizes)}")
    return tuple(sizes)


def enable(
    devices: str | Sequence[int | str],
    *,
    charge_temporaries: bool = False,
    dry: bool = False,
    allocator: str = "exact",
) -> None:
    """Create the devices ``sim:0``... with these capacities; once per process.

    Args:
        devices: capacities in bytes, or text as :func:`parse_sizes` reads it.
        charge_temporaries: also charge the buffers that CPU kernels allocate internally. They vary
            with kernel, threads and processor; without them figures are deterministic.
        dry: charge storages of 64 KiB and more without allocating memory; ops on them compute
            shapes only, copies from them give zeros or are skipped.
        allocator: "exact", or "cuda": in segments by ``PYTORCH_CUDA_ALLOC_CONF``
            (``exkv.caching_allocator``), which ``torch.accelerator.memory_reserved`` reports, and
            with 2 MiB less for the driver's context.

    Raises:
        ValueError: an invalid size, or no such allocator.
        RuntimeError: other devices were enabled before, or the compiled part can't be built.
    """
    global _enabled_with
    if allocator not in ALLOCATORS:
        raise ValueError(f"allocator is {allocator!r}: it must be one of {', '.join(ALLOCATORS)}")
    wanted = (_capacities(devices), bool(dry), bool(charge_temporaries), allocator)
    if _enabled_with is None:
        native = simulator.load()
        rules = Rules.from_env() if allocator == "cuda" else None
        native_rules = native.SegmentRules(**asdict(rules)) if rules else None
        native.configure(list(wanted[0]), wanted[1], wanted[2], native_rules, _CONTEXT)
        _register_backend(rules)
        _LIBRARY.impl("histc", _histc, "PrivateUse1")
        _enabled_with = wanted
    elif _enabled_with != wanted:
        raise RuntimeError(
            "the simulated accelerator is already enabled with devices of "
            f"{list(_enabled_with[0])} bytes (dry={_enabled_with[1]}, "
            f"charge_temporaries={_enabled_with[2]}, allocator={_enabled_with[3]}): one device "
            "list per process, "
            "so start another process for another list"
        )
    mirror_ops()


def enable_from_env() -> bool:
    """Enable the devices in ``EXKV_SIM_DEVICES``; False if it is not set.

    ``EXKV_SIM_DRY=1``, ``EXKV_SIM_CHARGE_TEMPORARIES=1`` and ``EXKV_SIM_ALLOCATOR=cuda`` are the
    options of :func:`enable`.

    Raises:
        ValueError: an invalid variable, by name.
    """
    devices = os.environ.get("EXKV_SIM_DEVICES", "")
    if not devices:
        return False
    try:
        _capacities(devices)
    except ValueError as error:
        raise ValueError(f"EXKV_SIM_DEVICES: {error}") from None
    allocator = os.environ.get("EXKV_SIM_ALLOCATOR") or "exact"
    if allocator not in ALLOCATORS:
        raise ValueError(f"EXKV_SIM_ALLOCATOR={allocator!r} is neither {' nor '.join(ALLOCATORS)}")
    enable(
        devices,
        dry=_env_flag("EXKV_SIM_DRY"),
        charge_temporaries=_env_flag("EXKV_SIM_CHARGE_TEMPORARIES"),
        allocator=allocator,
    )
    return True


def _env_flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{name}={value!r} is neither 1 nor 0")


def enabled() -> bool:
    """Whether this process has simulated devices."""
    return _enabled_with is not None


def _enabled_native() -> Any:
    if not enabled():
        raise RuntimeError("the simulated accelerator is not enabled: call exkv.sim.enable first")
    return simulator.load()


def mirror_ops() -> int:
    """Run the CPU kernels of ops on the simulated devices; returns how many are new.

    :func:`enable` does this; call it again after registering more CPU kernels. exkv's native-only
    ops are missing on the devices, and an op whose kernel lacks a format runs its reference.
    """
    registry = importlib.import_module("exkv.ops.registry")  # registers their kernels, too
    known = {
        f"exkv::{op}": {name for name, entry in named.items() if entry.has_kernels}
        for op, named in registry.NAMED.items()
    }
    native = {f"exkv::{name}" for name in registry.NATIVE}
    return _enabled_native().mirror_ops(native, known)


def set_capacity(index: int, nbytes: int) -> None:
    """Change the capacity of ``sim:index`` to ``nbytes``; existing allocations stay."""
    _enabled_native().set_capacity(index, nbytes)


def fail_allocation(n: int | None, error: str = "torch") -> None:
    """Make the ``n``-th allocation from now on (1 is the next) fail once; ``None`` cancels it.

    Args:
        n: counted over all simulated devices; for ``"pinned"`` over pinned host allocations.
        error: what is raised, one of :data:`MEMORY_ERRORS`: "torch" is the caching allocator's
            OutOfMemoryError; "cublas", "runtime" and "launch" are a full GPU in the words of
            cuBLAS, the CUDA runtime (``torch.AcceleratorError``) and a kernel's launch; "pinned"
            is a failed allocation of pinned memory, in the CUDA runtime's words.
    """
    if n is not None and n < 1:
        raise ValueError(f"the next allocation is number 1: {n} is not possible")
    if error not in MEMORY_ERRORS:
        raise ValueError(f"error is {error!r}; it must be one of {', '.join(MEMORY_ERRORS)}")
    if error == "pinned":
        _enabled_native().fail_pinned(n or 0)
    else:
        _enabled_native().fail_charge(n or 0, MEMORY_ERRORS.index(error))


def allocation_count(*, pinned: bool = False) -> int:
    """Attempted allocations of at least one byte so far, over all simulated devices; of pinned host
    memory if ``pinned``."""
    native = _enabled_native()
    return native.pinned_count() if pinned else native.charge_count()


def touches(index: int) -> int:
    """How often something reached ``sim:index`` that creates a real device's context: an
    allocation, a new stream, or a query of free memory. Counting devices doesn't."""
    return _enabled_native().touches(index)


def refuse(index: int, why: str | None) -> None:
    """Have ``sim:index`` fail everything that :func:`touches` counts with an AcceleratorError, like
    a GPU that is full or in exclusive use; ``None`` cancels it."""
    _enabled_native().refuse(index, why or "")


def copy_fault(src: int, dst: int, on: bool = True) -> None:
    """Simulate the driver fault by which direct copies between two devices yield zeros."""
    _enabled_native().set_copy_fault(src, dst, on)


def transfer_bytes() -> dict[tuple[str, str], int]:
    """Bytes copied since the last reset, by (source, destination).

    Both are ``"cpu"``, ``"sim:0"``, ...; copies within one are not counted.
    """
    names = {-1: "cpu"}
    transfers = _enabled_native().transfers()
    return {
        (names.get(src, f"sim:{src}"), names.get(dst, f"sim:{dst}")): nbytes
        for src, dst, nbytes in transfers
    }


def reset_transfer_bytes() -> None:
    """Start :func:`transfer_bytes` from zero."""
    _enabled_native().reset_transfers()


def let_streams_lag(on: bool = True) -> None:
    """Delay copies between host and device on a side stream until something waits for them: what is
    read too early is wrong, and what is freed too early is counted (:func:`lifetime_errors`)."""
    _enabled_native().set_lag(on)


def lifetime_errors() -> int:
    """How many copies so far lost their memory, freed while a stream was still to use it."""
    return _enabled_native().lifetime_errors()


def is_dry(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a simulated device without memory behind it (dry mode)."""
    if not enabled() or tensor.device.type != "sim":
        return False
    return simulator.load().is_dry(tensor.untyped_storage()._cdata)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on a simulated device as a tensor of the CPU, for native code; other
    tensors as they are."""
    if tensor.device.type != "sim":
        return tensor
    return torch.ops.exkv_sim.host_view(tensor)


def _register_backend(rules: Rules | None) -> None:
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _DeviceModule(rules))
    torch.utils.generate_methods_for_privateuse1_backend()


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Histogram that also takes integers, as on GPUs; the CPU's kernel rejects them."""
    counts = torch.histc(x.cpu() if x.is_floating_point() else x.cpu().double(), bins, min, max)
    return counts.to(x.dtype).to(x.device)


def _index_of(device: Any) -> int:
    if device is None:
        return simulator.load().current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return simulator.load().current_device() if index is None else index


class _DeviceModule(types.ModuleType):
    """``torch.sim``, with the functions that torch expects of a device module."""

    def __init__(self, rules: Rules | None) -> None:
        super().__init__("torch.sim", "The simulated accelerator of exkv.")
        #: The rules of the segments in which devices allocate; None for byte-exact allocation.
        self.allocator_rules = rules
        self._native = simulator.load()
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
        ):
            function = getattr(torch.accelerator, name)
            setattr(self, name, lambda device=None, call=function: call(_index_of(device)))

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        previous = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(previous)

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        """Nothing left to do."""

    _lazy_init = init

    def device_count(self) -> int:
        return self._native.device_count()

    def current_device(self) -> int:
        return self._native.current_device()

    def set_device(self, device: Any) -> None:
        self._native.set_device(_index_of(device))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @property
    def lags(self) -> bool:
        """Whether side streams are worth having: see :func:`let_streams_lag`."""
        return self._native.lags()

    # Memory -------------------------------------------------------------------------------

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for: ops are synchronous."""

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(_index_of(device))

    # Random numbers: the default generator is the CPU's, already seeded by torch.manual_seed --

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Done by torch.manual_seed."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "sim") -> None:
        torch.set_rng_state(state)

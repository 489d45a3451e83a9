"""This machine's accelerators, through ``torch.accelerator`` only.

CUDA, ROCm, XPU and the simulated accelerator share one code path: devices, their memory, and
copies of hidden states between devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from exkv import host_memory, overhead
from exkv.caching_allocator import Rules
from exkv.errors import Attempt

logger = logging.getLogger(__name__)

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
#: The device of a unit that another process holds.
ELSEWHERE = torch.device("meta")

#: Bytes to which accelerator allocators round a request up (CUDA's caching allocator's rule).
ALLOCATION_BLOCK = 512

#: Bytes that no arithmetic sees on a device: kernels that the driver loads when they first run,
#: temporary memory of libraries, and blocks that fit no request.
_MARGINS = {"cuda": 160 << 20, "xpu": 160 << 20}
#: Bytes of a huge page of host memory, on x86-64 and most ARM.
_HUGE_PAGE = 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of ``nbytes`` takes on a device."""
    return -(-nbytes // ALLOCATION_BLOCK) * ALLOCATION_BLOCK


def allocator_rules(device_type: str) -> Rules | None:
    """The rules by which devices of this type give this process memory in segments; None if they
    give the requested bytes, rounded."""
    if device_type in ("cuda", "xpu"):
        return Rules.from_env()
    return getattr(getattr(torch, device_type, None), "allocator_rules", None)


def allocation_bytes(nbytes: int, device_type: str) -> int:
    """Bytes to request for ``nbytes`` in one long-lived allocation."""
    rules = allocator_rules(device_type)
    return nbytes if rules is None else rules.request_size(nbytes)


def present_devices() -> list[torch.device]:
    """All accelerators in order, or the CPU if none reports its memory (Apple's don't, and planning
    needs it). Only counts them, which creates no context."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return [CPU]
    return [
        torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())
    ]


def refusal(device: torch.device) -> str | None:
    """The driver's reason why a device can't be used now; None if it can.

    A GPU that is full, or in another process's exclusive mode, has no room for this process's
    context, and any query fails. A successful query creates a context.
    """
    if device.type == "cpu":
        return None
    try:
        overhead.memory_info(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def check_usable(device: torch.device) -> None:
    """ValueError with the driver's reason if a device can't be used now."""
    if (why := refusal(device)) is not None:
        raise ValueError(f"device {device} can't be used now: {why}")


def usable_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """The devices that can be used now. A warning says why others are left out.

    Raises:
        ValueError: none of them can.
    """
    refusals = {device: refusal(device) for device in devices}
    reasons = [f"{device}: {why}" for device, why in refusals.items() if why is not None]
    if len(reasons) == len(devices):
        raise ValueError(
            f"no device can be used now ({'; '.join(reasons)}): free one of them, or give "
            'devices=["cpu"] for the host'
        )
    for reason in reasons:
        logger.warning("left out: %s", reason)
    return [device for device, why in refusals.items() if why is None]


def resolve_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Resolve names to devices with an index each; ``"cpu"`` may come last, for overflow. Doesn't
    check whether they can be used now.

    Raises:
        ValueError: an unknown or absent device, a duplicate, or the CPU before the end.
    """
    if isinstance(devices, str | torch.device):
        devices = [devices]
    resolved = [_resolve(device) for device in devices]
    if not resolved:
        raise ValueError("devices is empty: name at least one, or leave it out for all")
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"devices names one twice: {', '.join(map(str, resolved))}")
    if CPU in resolved[:-1]:
        raise ValueError("'cpu' takes what no accelerator has room for: put it last in devices")
    return resolved


def _resolve(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"no such device: {device!r}; this machine has: {_present()}") from None
    if device.type == "cpu":
        return CPU
    device = torch.device(device.type, device.index or 0)
    if device not in present_devices():
        raise ValueError(f"device {device} is not on this machine, which has: {_present()}")
    return device


def _present() -> str:
    return ", ".join(map(str, present_devices()))


def default_margin(device: torch.device) -> int:
    """Default margin in bytes; 0 for the simulated accelerator and the host."""
    return _MARGINS.get(device.type, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A device's memory at one moment, in bytes. This process's idle allocator cache counts as
    free; ``fragments`` are the part of it in segments in use, where only requests that are small
    enough fit."""

    capacity: int
    in_use: int
    in_use_by_others: int
    fragments: int = 0

    @property
    def available(self) -> int:
        """Bytes that this process can still allocate."""
        return self.capacity - self.in_use - self.in_use_by_others


def memory(device: torch.device) -> Memory:
    """The device's memory now, by user."""
    if device.type == "cpu":
        return _host_memory()
    free, capacity = overhead.memory_info(device)
    stats = torch.accelerator.memory_stats(device)  # once: it takes a millisecond
    return Memory(
        capacity=capacity,
        in_use=stats.get("allocated_bytes.all.current", 0),
        fragments=stats.get("inactive_split_bytes.all.current", 0),
        in_use_by_others=capacity - free - stats.get("reserved_bytes.all.current", 0),
    )


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate, including its allocator's idle cache."""
    return memory(device).available


#: Bytes of mapped files that count as in use.
_mapped = 0


def count_mapped(owner: object, nbytes: int) -> None:
    """Count bytes of a mapped file as in use while their owner lives: weights are read for every
    token, though the system sees reclaimable pages."""
    _add_mapped(nbytes)
    weakref.finalize(owner, _add_mapped, -nbytes).atexit = False


def mapped_memory() -> int:
    """Bytes of mapped files that count as in use by this process."""
    return _mapped


def _add_mapped(nbytes: int) -> None:
    global _mapped
    _mapped += nbytes


def _host_memory() -> Memory:
    capacity, free = host_memory.total_and_free()
    available = max(free - _mapped, 0)
    mine = min(host_memory.anonymous() + _mapped, capacity - available)
    return Memory(capacity=capacity, in_use=mine, in_use_by_others=capacity - available - mine)


def allocated_memory(device: torch.device) -> int | None:
    """Bytes in this process's live tensors on an accelerator; None for the CPU, which keeps no
    count."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Measure the peak above the level at entry, in bytes; it is appended to the list at exit."""
    peaks: list[int] = []
    if device.type == "cpu":
        yield peaks
        return
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    try:
        yield peaks
    finally:
        peaks.append(torch.accelerator.max_memory_allocated(device) - before)


def measured_bandwidth(device: torch.device) -> float:
    """Memory bandwidth in bytes per second: the best of 5 copies within the device, since
    disturbances only slow them down. Allocates half of the free memory, at most 512 MiB."""
    nbytes = min(256 << 20, available_memory(device) // 4)
    source = torch.zeros(nbytes, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    seconds = min(_copy_seconds(source, target) for _ in range(5))
    return 2 * nbytes / seconds  # a copy reads and writes


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    on_accelerator = source.device.type != "cpu"
    if on_accelerator:
        torch.accelerator.synchronize(source.device)
    started = time.perf_counter()
    target.copy_(source)
    if on_accelerator:
        torch.accelerator.synchronize(source.device)
    return time.perf_counter() - started


def release_idle_memory() -> None:
    """Release the allocators' idle caches, so that a rollback leaves the device as found."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def zeros(
    layout: Layout, storage_device: torch.device, *, near: torch.device
) -> dict[str, torch.Tensor]:
    """Zeros in one allocation on the storage device; host memory is pinned if that speeds up copies
    to ``near``."""
    nbytes = allocation_bytes(layout_bytes(layout), storage_device.type)
    make = functools.partial(torch.zeros, nbytes, dtype=torch.uint8, device=storage_device)
    memory = _pinned(make, near) if storage_device.type == "cpu" else make()
    return views(memory, layout)


def staging_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 (nbytes,) on the host; pinned if that speeds up the device's copies."""
    return _pinned(functools.partial(torch.empty, nbytes, dtype=torch.uint8), device)


def _pinned(make: Callable[..., torch.Tensor], near: torch.device) -> torch.Tensor:
    """Make a tensor in pinned memory if that speeds up copies to a device and there is room: the
    system may allow less pinned memory than it has."""
    if not _pins_for(near):
        return make()
    # Pinning creates a context on the current device, which the user may have left out.
    with torch.accelerator.device_index(near.index), Attempt() as attempt:
        return make(pin_memory=True)
    logger.warning("host memory can't be pinned, copies to %s are slower: %s", near, attempt.why)
    return make()


def _pins_for(device: torch.device) -> bool:
    """Whether copies to and from the device overlap with its work: on a GPU, and on a simulated
    device whose streams lag (``exkv.sim.let_streams_lag``)."""
    if device.type in ("cuda", "xpu"):
        return torch.accelerator.is_available()
    return getattr(getattr(torch, device.type, None), "lags", False)


def layout_of(shapes: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of tensors like these."""
    return {name: (tuple(like.shape), like.dtype) for name, like in shapes.items()}


def layout_bytes(layout: Layout) -> int:
    """Bytes of one allocation that holds all tensors of a layout."""
    return sum(rounded(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.values())


def views(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of a layout, one after another in uint8 memory; each starts at a multiple of
    :data:`ALLOCATION_BLOCK`, as if it were allocated by itself."""
    made, start = {}, 0
    for name, (shape, dtype) in layout.items():
        nbytes = math.prod(shape) * dtype.itemsize
        made[name] = memory[start : start + nbytes].view(dtype).view(shape)
        start += rounded(nbytes)
    return made


def empty_tensors(shapes: Mapping[str, torch.Tensor], device: torch.device) -> Tensors:
    """Uninitialised tensors like these in one allocation on a device.

    On the host it is backed by huge pages where the system has them, which is 1.02 to 1.08 times as
    fast: all weights are read for every token, and hardware prefetching stops at page boundaries.
    (madvise(2), MADV_HUGEPAGE.)
    """
    layout = layout_of(shapes)
    nbytes = allocation_bytes(layout_bytes(layout), device.type)
    if device.type == "cpu":
        return views(_in_huge_pages(nbytes), layout)
    return views(torch.empty(nbytes, dtype=torch.uint8, device=device), layout)


def zeros_on(device: torch.device, shapes: Mapping[str, torch.Tensor]) -> Tensors:
    """Zeroed tensors like these in one allocation; on the host, memory is committed when written
    to."""
    if device.type != "cpu":
        return zeros(layout_of(shapes), device, near=device)
    made = {}
    for name, like in shapes.items():
        pages = mmap.mmap(-1, max(like.nbytes, 1))
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        made[name] = memory[: like.nbytes].view(like.dtype).view(like.shape)
    return made


def _in_huge_pages(nbytes: int) -> torch.Tensor:
    """uint8 (nbytes,), aligned to a huge page if it fills one; the system may ignore the advice."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    whole = nbytes // _HUGE_PAGE * _HUGE_PAGE
    if advice is None or not whole:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = torch.empty(nbytes + _HUGE_PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _HUGE_PAGE :][:nbytes]
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(whole)
    ctypes.CDLL(None).madvise(address, size, advice)
    return memory


def synchronize(device: torch.device) -> None:
    """Block the host until the device's queued work is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


_side_streams: dict[torch.device, torch.Stream] = {}


class SideStream:
    """A stream for copies to and from an accelerator, ordered after the work queued so far.

    >>> copies = SideStream(device)
    >>> with copies:
    ...     here.copy_(pinned, non_blocking=True)
    >>> copies.wait()  # what follows on the current stream finds the copy complete
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.Stream | None = None
        self._done: torch.Event | None = None
        if _pins_for(device):
            if device not in _side_streams:
                _side_streams[device] = torch.Stream(device)
            self.stream = _side_streams[device]

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._done = self.stream.record_event()
            self.stream.__exit__(*error)

    def wait(self) -> None:
        if self.stream is not None and self._done is not None:
            torch.accelerator.current_stream(self.stream.device).wait_event(self._done)

    def synchronize(self) -> None:
        """Block the host until the copies are complete: results can be read, and sources
        overwritten."""
        if self._done is not None:
            self._done.synchronize()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being reused before the copies are complete."""
        # A tensor subclass may have no storage.
        if self.stream is not None and type(tensor) is torch.Tensor:
            tensor.record_stream(self.stream)


def fetched(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of one device to the host, which waits once for all of them."""
    device = tensors[0].device
    made = []
    for tensor in tensors:
        memory = staging_buffer(tensor.nbytes, device)
        made.append(memory.view(tensor.dtype).view(tensor.shape))
        made[-1].copy_(tensor, non_blocking=True)
    if _pins_for(device):
        torch.accelerator.current_stream(device).synchronize()
    return made


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to an accelerator without waiting."""
    if not _pins_for(device):
        return tensor.to(device)
    memory = staging_buffer(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape)
    return memory.copy_(tensor).to(device, non_blocking=True)


_direct_copy_works: dict[tuple[torch.device, torch.device], bool] = {}


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``; the tensor itself if it is there already.

    A copy between two accelerators goes through the host if a check, made once per pair, shows that
    direct copies fail (with some drivers they silently yield zeros).
    """
    if tensor.device == device:
        return tensor
    pair = (tensor.device, device)
    if "cpu" not in (pair[0].type, pair[1].type):
        if pair not in _direct_copy_works:
            _direct_copy_works[pair] = _check_direct_copy(*pair)
        if not _direct_copy_works[pair]:
            return tensor.to(CPU).to(device)
    return tensor.to(device)


def _check_direct_copy(source: torch.device, target: torch.device) -> bool:
    pattern = torch.arange(1, 65, dtype=torch.int32)
    return torch.equal(pattern.to(source).to(target).to(CPU), pattern)

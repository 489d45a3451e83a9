"""The accelerators of this machine, through ``torch.accelerator`` alone.

CUDA, ROCm, XPU and the simulated accelerator are one code path: devices and their memory, and
the copy of a hidden state from one device to the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

CPU = torch.device("cpu")

#: What accelerator allocators round a request up to, in bytes (CUDA's caching allocator's rule).
ALLOCATION_BLOCK = 512

#: Bytes that no arithmetic sees (fragmentation, library workspaces), kept free by default on
#: the first and on each further device of a type: ExLlamaV2's habit for real GPUs.
_DEFAULT_RESERVE = {"cuda": (192 << 20, 64 << 20), "xpu": (192 << 20, 64 << 20)}


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of ``nbytes`` takes from a device."""
    return -(-nbytes // ALLOCATION_BLOCK) * ALLOCATION_BLOCK


def default_devices() -> list[torch.device]:
    """Every accelerator in order, or the CPU where there is none that tells its memory (Apple's
    doesn't, and without that nothing can be planned)."""
    if not torch.accelerator.is_available() or not _tells_memory():
        return [CPU]
    kind = torch.accelerator.current_accelerator().type
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def _tells_memory() -> bool:
    try:
        torch.accelerator.get_memory_info(0)
    except RuntimeError:
        return False
    return True


def resolve_devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    """Names to devices with an index each; ``"cpu"`` may stand last, as overflow.

    Raises:
        ValueError: an unknown or absent device, one named twice, or the CPU before the end.
    """
    if devices is None:
        return default_devices()
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
    except RuntimeError as error:
        raise ValueError(f"no such device: {device!r} ({error})") from None
    if device.type == "cpu":
        return CPU
    present = default_devices()
    device = torch.device(device.type, device.index or 0)
    if device not in present:
        names = ", ".join(map(str, present))
        raise ValueError(f"device {device} is not on this machine, which has: {names}")
    return device


def default_reserve(devices: Sequence[torch.device]) -> list[int]:
    """Bytes to keep free on each device when the caller names none."""
    reserves, seen = [], set()
    for device in devices:
        first, further = _DEFAULT_RESERVE.get(device.type, (0, 0))
        reserves.append(further if device.type in seen else first)
        seen.add(device.type)
    return reserves


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still take on the device, its allocator's idle cache included."""
    if device.type == "cpu":
        return _available_host_memory()
    free, _ = torch.accelerator.get_memory_info(device)
    idle = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free + idle


def _available_host_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocated_memory(device: torch.device) -> int | None:
    """Bytes in live tensors of this process on an accelerator; the CPU keeps no such count."""
    return None if device.type == "cpu" else torch.accelerator.memory_allocated(device)


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Measure the peak above the level at entry, in bytes; appended to the list at exit."""
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


def release_idle_memory() -> None:
    """Hand the allocators' idle caches back, so that a rollback leaves the device as found."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


_direct_copy_works: dict[tuple[torch.device, torch.device], bool] = {}


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; itself where it is there already.

    A copy between two accelerators goes through the host where a check of the pair, made once,
    shows that direct copies do not arrive (with some drivers they silently yield zeros).
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

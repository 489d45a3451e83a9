"""GPU memory that the driver and libraries take, beside everything that a plan places there.

For an absent card, tables say how much. For a present one it is measured when this process first
touches it: the driver's context as the difference in all programs' use before and after, if the
driver's own count is available (pynvml); cuBLAS's workspace by the first product. torch allocates
and keeps a workspace for each stream that multiplies: calls have one stream, captures another.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

import torch

from exkv.caching_allocator import Rules
from exkv.errors import Attempt

#: Assumed size of a driver's context on a card that can't be queried.
_CONTEXT = 512 << 20
#: cuBLAS's workspace as torch allocates it, in bytes: on Hopper and Blackwell, and on other cards.
_WORKSPACE, _SMALLER_WORKSPACE = 8 * (4096 << 10), 2 * (4096 << 10) + 8 * (16 << 10)
#: Compute capabilities (major) that get the larger one.
_LARGER = (9, 10, 12)
#: A cache's captured decode steps share a pool: two segments of small tensors, since those of 16
#: rows of an MLP may be 1 MiB each, and one of medium ones. Results have one of each kind.
_GRAPHS = 2 * (2 << 20) + (20 << 20) + (2 << 20) + (20 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes on a GPU.

    Attributes:
        context: the driver's context.
        libraries: cuBLAS's workspaces that are not allocated yet.
        graphs: the memory pool of a model's captured decode steps, and their results.
    """

    context: int = 0
    libraries: int = 0
    graphs: int = 0


def of_absent(device_type: str) -> Overhead:
    """Overhead of a card that is not here."""
    if device_type not in ("cuda", "xpu"):
        return Overhead()
    libraries = 2 * _segment(_configured() or _WORKSPACE)
    return Overhead(context=_CONTEXT, libraries=libraries, graphs=_GRAPHS)


def of_present(device: torch.device) -> Overhead:
    """Overhead of a local device, as far as it is still to come; the context exists already."""
    if device.type != "cuda":
        tabled = of_absent(device.type)
        return Overhead(libraries=tabled.libraries, graphs=tabled.graphs)
    memory_info(device)  # before the product, which would create the context, too
    workspace = _workspace(device)
    return Overhead(
        context=_contexts[device],
        libraries=0 if device in _capturing else _segment(workspace),
        graphs=_GRAPHS,
    )


# The context ------------------------------------------------------------------------------------

#: Bytes of the driver's context on each queried device; 0 where they are not known.
_contexts: dict[torch.device, int] = {}


def memory_info(device: torch.device) -> tuple[int, int]:
    """A device's free bytes and its capacity. The first query creates a context on a GPU, and its
    size is recorded."""
    if device.type != "cuda" or device in _contexts:
        return torch.accelerator.get_memory_info(device)
    before = _used_by_all(device)
    free, capacity = torch.accelerator.get_memory_info(device)
    _contexts[device] = 0 if before is None else max(capacity - free - before, 0)
    return free, capacity


def _used_by_all(device: torch.device) -> int | None:
    """Bytes that all programs use on a GPU on which this process has no context yet; None if it
    has, or if the driver can't be queried."""
    if torch._C._cuda_hasPrimaryContext(device.index):  # type: ignore[attr-defined]
        return None
    try:
        return torch.cuda.device_memory_used(device)
    except Exception:  # pynvml is missing or fails
        return None


# cuBLAS -----------------------------------------------------------------------------------------

#: Devices with a stream for captures, whose workspace is allocated.
_capturing: set[torch.device] = set()


def note_captures(device: torch.device) -> None:
    """Record that the stream for captures on a device has multiplied."""
    _capturing.add(device)


@functools.cache
def _workspace(device: torch.device) -> int:
    """Bytes of cuBLAS's workspace for a stream: measured by the first product on the device, or
    from torch's table if something multiplied before, or if there is no memory for it now."""
    before, after = torch.cuda.memory_allocated(device), 0
    with Attempt():
        multiply(device)
        after = torch.cuda.memory_allocated(device)
    return after - before if after > before else _tabled_workspace(device)


def multiply(device: torch.device) -> None:
    """Multiply on the device's current stream, so that cuBLAS has its workspace for it."""
    one = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    torch.nn.functional.linear(one, one, one[0])


def _tabled_workspace(device: torch.device) -> int:
    major, _ = torch.cuda.get_device_capability(device)
    return _configured() or (_WORKSPACE if major in _LARGER else _SMALLER_WORKSPACE)


def _configured() -> int:
    """Bytes that CUBLAS_WORKSPACE_CONFIG sets, such as ``:4096:2:16:8``: sizes in KiB, each
    followed by a count; 0 if it is not set, or not such a list."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) << 10 for size, count in pairs)


def _segment(nbytes: int) -> int:
    """Bytes that a stream's workspace reserves; it shares no segment with another stream's."""
    rules = Rules.from_env()
    return rules.segment(rules.rounded(nbytes))

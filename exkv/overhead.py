"""What a GPU's driver and libraries take of its memory, beside everything that a plan places there.

Of a card that is not here it is tabled. Of one that is here it is measured when this process first
touches it: the driver's context by what all programs use before and after it, where the driver's
own count is at hand (pynvml); cuBLAS's workspace by the first product. torch allocates a workspace
for each stream that multiplies and keeps it: calls have a stream, and captures another.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

import torch

from exkv.caching_allocator import Rules
from exkv.errors import Attempt

#: What a driver's context takes of a card that is not here to be asked.
_CONTEXT = 512 << 20
#: cuBLAS's workspace as torch allocates it, in bytes: on Hopper and Blackwell, and on other cards.
_WORKSPACE, _SMALLER_WORKSPACE = 8 * (4096 << 10), 2 * (4096 << 10) + 8 * (16 << 10)
#: Compute capabilities (major) that get the larger one.
_LARGER = (9, 10, 12)
#: The captured decode steps of a cache share a pool: two segments of small tensors, since those of
#: 16 rows of an MLP may be 1 MiB each, and one of medium ones. Results have one of either.
_GRAPHS = 2 * (2 << 20) + (20 << 20) + (2 << 20) + (20 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes of a GPU.

    Attributes:
        context: of the driver's context.
        libraries: of cuBLAS's workspaces that nobody has allocated yet.
        graphs: of the memory pool of a model's captured decode steps, and of their results.
    """

    context: int = 0
    libraries: int = 0
    graphs: int = 0


def of_absent(device_type: str) -> Overhead:
    """That of a card that is not here."""
    if device_type not in ("cuda", "xpu"):
        return Overhead()
    libraries = 2 * _segment(_configured() or _WORKSPACE)
    return Overhead(context=_CONTEXT, libraries=libraries, graphs=_GRAPHS)


def of_present(device: torch.device) -> Overhead:
    """That of a device that is here, as far as it is still to come; but the context is there."""
    if device.type != "cuda":
        tabled = of_absent(device.type)
        return Overhead(libraries=tabled.libraries, graphs=tabled.graphs)
    memory_info(device)  # before the product, which would make the context, too
    workspace = _workspace(device)
    return Overhead(
        context=_contexts[device],
        libraries=0 if device in _capturing else _segment(workspace),
        graphs=_GRAPHS,
    )


# The context ------------------------------------------------------------------------------------

#: Bytes of the driver's context on each device that was asked; 0 where they are not known.
_contexts: dict[torch.device, int] = {}


def memory_info(device: torch.device) -> tuple[int, int]:
    """A device's free bytes and its capacity. The first question makes a context on a GPU, of which
    the size is noted."""
    if device.type != "cuda" or device in _contexts:
        return torch.accelerator.get_memory_info(device)
    before = _used_by_all(device)
    free, capacity = torch.accelerator.get_memory_info(device)
    _contexts[device] = 0 if before is None else max(capacity - free - before, 0)
    return free, capacity


def _used_by_all(device: torch.device) -> int | None:
    """Bytes that all programs use of a GPU on which this process has no context yet; None if it
    has, or if the driver can't be asked."""
    if torch._C._cuda_hasPrimaryContext(device.index):  # type: ignore[attr-defined]
        return None
    try:
        return torch.cuda.device_memory_used(device)
    except Exception:  # pynvml is missing, or has an error of its own
        return None


# cuBLAS -----------------------------------------------------------------------------------------

#: Devices with a stream for captures, whose workspace is allocated.
_capturing: set[torch.device] = set()


def note_captures(device: torch.device) -> None:
    """Note that the stream for captures on a device has multiplied."""
    _capturing.add(device)


@functools.cache
def _workspace(device: torch.device) -> int:
    """Bytes of cuBLAS's workspace for a stream: by the first product on the device, or by torch's
    table if somebody multiplied before, or if there is no memory for it now."""
    before, after = torch.cuda.memory_allocated(device), 0
    with Attempt():
        multiply(device)
        after = torch.cuda.memory_allocated(device)
    return after - before if after > before else _tabled_workspace(device)


def multiply(device: torch.device) -> None:
    """Multiply on the device's current stream, for which cuBLAS then has its workspace."""
    one = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    torch.nn.functional.linear(one, one, one[0])


def _tabled_workspace(device: torch.device) -> int:
    major, _ = torch.cuda.get_device_capability(device)
    return _configured() or (_WORKSPACE if major in _LARGER else _SMALLER_WORKSPACE)


def _configured() -> int:
    """Bytes that CUBLAS_WORKSPACE_CONFIG sets, such as ``:4096:2:16:8``: sizes in KiB, a count
    behind each; 0 if it is not set, or not such a list."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) << 10 for size, count in pairs)


def _segment(nbytes: int) -> int:
    """Bytes that a stream's workspace reserves, which shares no segment with another stream's."""
    rules = Rules.from_env()
    return rules.segment(rules.rounded(nbytes))

"""The errors that exkv raises beyond Python's own; everything else is ValueError and its kin."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from exkv.planning.plan import Plan

#: What a full device or a full host is called in errors that have no type of their own.
_OUT_OF_MEMORY = re.compile(
    "out of memory"  # the CUDA and HIP runtimes: pinned memory, streams, and exkv's own launches
    "|cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_(DEVICE|HOST)_MEMORY"
    "|CU[A-Z]+_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    # A handle takes memory, and this is what cuBLAS says where there is none for it.
    "|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate"
    "|CPUAllocator: (can't allocate|not enough) memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left, in whatever words.

    torch's caching allocator raises ``torch.OutOfMemoryError``. Everything else that allocates on a
    GPU (cuBLAS and cuDNN handles, pinned memory, a kernel's launch, a graph) raises a plain
    RuntimeError or ``torch.AcceleratorError`` with the library's own words.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Exact types: other errors may quote these words, and have a meaning of their own.
    return type(error) in (RuntimeError, torch.AcceleratorError) and bool(
        _OUT_OF_MEMORY.search(str(error))
    )


class Attempt:
    """A context manager that ends its block where memory runs out; other errors pass through.

    >>> with Attempt() as attempt:
    ...     return call()
    >>> logger.warning("no room: %s", attempt.why)  # the error's frames and tensors are gone

    Args:
        passing: errors that pass through although they speak of memory.

    Attributes:
        why: the error's message; "" if the block went through.
    """

    why = ""

    def __init__(self, *passing: type[BaseException]) -> None:
        self._passing = passing

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or isinstance(error, self._passing) or not is_out_of_memory(error):
            return False
        self.why = str(error) or type(error).__name__
        return True


#: Programs look for these words of torch and of ExLlamaV2 in the text of an error.
_SEARCHED = "out of memory: Insufficient VRAM"


class PlacementError(torch.OutOfMemoryError):
    """The model, its caches and their workspace do not fit on the devices given.

    Raised before anything is loaded when the plan says so, or after a real out-of-memory error
    on the last device; either way every device is left as it was found. It stands for that error,
    so ``except torch.OutOfMemoryError`` catches both. The message names the
    unit, the device, the bytes needed and available there, and changes that would make it fit.

    Attributes:
        unit: name of the first unit that found no place, e.g. ``"model.layers.17"``.
        device: the last device that was considered for it, as a string.
        needed: bytes that the device would have to hold.
        available: bytes that it has for this model.
        suggestions: changes that were computed to fit, cheapest in quality first. Each is planned
            itself, so they are found when they are first asked for, here or in the message, and a
            refusal takes no longer than a plan.
        plan: the attempt, whose overfull device has negative headroom; None after a real
            out-of-memory error.
    """

    def __init__(
        self,
        message: str,
        *,
        unit: str,
        device: str,
        needed: int,
        available: int,
        suggestions: tuple[str, ...] | Callable[[], Iterable[str]] = (),
        plan: Plan | None = None,
    ) -> None:
        super().__init__(message if _SEARCHED in message else f"{message} ({_SEARCHED})")
        self.unit = unit
        self.device = device
        self.needed = needed
        self.available = available
        self.plan = plan
        self._suggestions = suggestions
        self._lists_them = callable(suggestions)  # else the message says what there is to say

    @property
    def suggestions(self) -> tuple[str, ...]:
        if callable(self._suggestions):
            self._suggestions = tuple(self._suggestions())
        return self._suggestions

    def __str__(self) -> str:
        if not self._lists_them:
            return super().__str__()
        remedy = "; ".join(self.suggestions) or "no single change would; use a smaller model"
        return f"{super().__str__()}. What would fit: {remedy}"


class OutOfMemoryError(torch.OutOfMemoryError):
    """A forward call ran out of memory that was there when the model was loaded.

    The cache has the tokens that it had before the call. The message says, device by device,
    what has changed since loading.
    """


class MissingKernelsWarning(RuntimeWarning):
    """A model is loaded to a device that exkv's kernels don't serve, and runs many times slower.

    The message says what is missing, what a token costs without it, and the line that mends it.
    """


class UnsupportedArchitecture(ValueError):
    """A model of an architecture that has no file here; another program may run it."""


class ContentsLostError(RuntimeError):
    """Keys and values in a cache's pages are gone, with the host that held them. Rows have their
    tokens, which the next call runs again first; an engine has its jobs run again by itself."""


class CacheUseError(RuntimeError):
    """A cache has one user at a time: another has it, or it was freed under the one that had it.

    The message says who uses it. The cache is as it was.
    """

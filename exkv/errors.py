"""The errors that exkv raises beside Python's own, such as ValueError."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from exkv.planning.plan import Plan

#: Phrases for a full device or host in errors without a type of their own.
_OUT_OF_MEMORY = re.compile(
    "out of memory"  # the CUDA and HIP runtimes: pinned memory, streams, and exkv's own launches
    "|cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_(DEVICE|HOST)_MEMORY"
    "|CU[A-Z]+_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    # A cuBLAS handle takes memory; this is its error if there is none.
    "|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate"
    "|CPUAllocator: (can't allocate|not enough) memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host is out of memory, in whatever words.

    torch's caching allocator raises ``torch.OutOfMemoryError``. Everything else that allocates on a
    GPU (cuBLAS and cuDNN handles, pinned memory, a kernel's launch, a graph) raises a plain
    RuntimeError or ``torch.AcceleratorError`` with the library's own words.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Exact types: errors of other types may quote these words, but mean something else.
    return type(error) in (RuntimeError, torch.AcceleratorError) and bool(
        _OUT_OF_MEMORY.search(str(error))
    )


class Attempt:
    """A context manager that ends its block when memory runs out; other errors pass through.

    >>> with Attempt() as attempt:
    ...     return call()
    >>> logger.warning("no room: %s", attempt.why)  # the error's frames and tensors are gone

    Args:
        passing: errors that pass through although they are about memory.

    Attributes:
        why: the error's message; "" if the block ran to its end.
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


#: Programs search errors for these words of torch and ExLlamaV2.
_SEARCHED = "out of memory: Insufficient VRAM"


class PlacementError(torch.OutOfMemoryError):
    """The model, its caches and their workspace do not fit on the devices given.

    Raised before anything is loaded if the plan doesn't fit, or after a real out-of-memory error
    on the last device; either way every device is left as it was found. It is a subclass of
    ``torch.OutOfMemoryError``, so handlers of that catch both. The message names the unit, the
    device, the bytes needed and available there, and changes that would make it fit.

    Attributes:
        unit: name of the first unit without room, e.g. ``"model.layers.17"``.
        device: the last device that was considered for it, as a string.
        needed: bytes that the device would have to hold.
        available: bytes that it has for this model.
        suggestions: changes that fit, the least loss of quality first. Each takes a plan of its
            own, so they are computed when first requested, here or in the message, and a refusal
            takes no longer than a plan.
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
        self._lists_them = callable(suggestions)  # else the message has its own remedy

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

    The message says what is missing, what a token costs without it, and the command that fixes it.
    """


class UnsupportedArchitecture(ValueError):
    """A model of an architecture that exkv doesn't have; another program may run it."""


class ContentsLostError(RuntimeError):
    """Keys and values in a cache's pages were lost with the host that held them. Rows keep their
    tokens, which the next call recomputes first; an engine reruns its jobs by itself."""


class CacheUseError(RuntimeError):
    """A cache, which has one user at a time, is in use by another one, or was freed while in use.

    The message says who uses it. The cache is unchanged.
    """

"""Count the storages of tensors while they are alive."""

from __future__ import annotations

import itertools
import weakref
from typing import TypeAlias

import torch

from exkv.devices import rounded

#: Allocations and frees in order: the number of a storage and its bytes, or 0 for a free.
Trace: TypeAlias = list[tuple[int, int]]


class LiveStorages:
    """Bytes of the storages that are alive, and their peak.

    Attributes:
        current, peak: bytes, each storage rounded as allocators do.
        trace: the requests behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self.forget_all()

    def forget_all(self) -> None:
        """Reset all counts."""
        self.current = self.peak = 0
        self.trace: Trace = []
        self._alive: dict[int, tuple[int, int]] = {}

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count this storage until it is freed."""
        if storage._cdata in self._alive:
            return
        number, nbytes = next(self._numbers), storage.nbytes()
        self._alive[storage._cdata] = number, rounded(nbytes)
        weakref.finalize(storage, self._forget, storage._cdata)
        self.current += rounded(nbytes)
        self.peak = max(self.peak, self.current)
        if nbytes:
            self.trace.append((number, nbytes))

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The number of a live storage."""
        return self._alive[storage._cdata][0]

    def pass_through(self, nbytes: int) -> None:
        """Count bytes that are allocated and freed at once."""
        self.peak = max(self.peak, self.current + nbytes)
        if nbytes:
            number = next(self._numbers)
            self.trace += [(number, nbytes), (number, 0)]

    def _forget(self, storage: int) -> None:
        number, nbytes = self._alive.pop(storage, (0, 0))
        self.current -= nbytes
        if nbytes:
            self.trace.append((number, 0))

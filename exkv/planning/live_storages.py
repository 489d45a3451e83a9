"""Counting the storages of tensors while they live."""

from __future__ import annotations

import itertools
import weakref
from typing import TypeAlias

import torch

from exkv.devices import rounded

#: What came and went, in order: the number of a storage and its bytes, or 0 where it is freed.
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
        """Count anew."""
        self.current = self.peak = 0
        self.trace: Trace = []
        self._alive: dict[int, tuple[int, int]] = {}

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count this one until it dies."""
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
        """The number of a storage that is alive."""
        return self._alive[storage._cdata][0]

    def pass_through(self, nbytes: int) -> None:
        """Count bytes that are taken now, and given back at once."""
        self.peak = max(self.peak, self.current + nbytes)
        if nbytes:
            number = next(self._numbers)
            self.trace += [(number, nbytes), (number, 0)]

    def _forget(self, storage: int) -> None:
        number, nbytes = self._alive.pop(storage, (0, 0))
        self.current -= nbytes
        if nbytes:
            self.trace.append((number, 0))

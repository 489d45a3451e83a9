"""Counting the storages of tensors while they live."""

from __future__ import annotations

import weakref

import torch

from exkv.devices import rounded


class LiveStorages:
    """Bytes of the storages that are alive, and their peak.

    Attributes:
        current, peak: bytes, each storage rounded as allocators do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget_all()

    def forget_all(self) -> None:
        """Count anew."""
        self.current = self.peak = 0
        self._alive: dict[int, int] = {}

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count this one until it dies."""
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = nbytes = rounded(storage.nbytes())
        weakref.finalize(storage, self._forget, storage._cdata)
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def _forget(self, storage: int) -> None:
        self.current -= self._alive.pop(storage, 0)

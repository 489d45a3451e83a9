"""What tests of bound runs share: to see them, and to go without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode

from exkv.models.native_run import NativeRun


@contextlib.contextmanager
def bound_runs() -> Iterator[list[int]]:
    """The runs that are called, by how many units each has."""
    counts: list[int] = []
    before = NativeRun.__call__

    def call(self, *args):
        counts.append(self.count)
        return before(self, *args)

    NativeRun.__call__ = call
    try:
        yield counts
    finally:
        NativeRun.__call__ = before


class Readable(TorchDispatchMode):
    """A mode under which every module is called by itself, since it is told of every op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

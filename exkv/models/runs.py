"""The bound runs of a model: which units they are of, and how long they hold.

A run is bound for an epoch (``exkv.epochs``): what could change it ends the epoch and releases it,
and the next call binds anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from exkv import epochs
from exkv.batch import Lengths
from exkv.cache import KVCache
from exkv.layers.linear import has_global_hooks
from exkv.ops import has_kernel

from . import graph_run, native_run
from .bound_run import MOST_TOKENS, BoundRun, Logits
from .units import Unit


class Runs:
    """The runs of a model's units over its caches that were bound in this epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._bound: weakref.WeakKeyDictionary[KVCache, dict[int, BoundRun | None]]
        self._bound = weakref.WeakKeyDictionary()

    def find(
        self,
        units: Sequence[Unit],
        first: int,
        kept: KVCache | None,
        lengths: Lengths,
        dtype: torch.dtype,
        logits: Logits,
    ) -> BoundRun | None:
        """The run of the units from the first on, whose input is there, for a call of these
        lengths; None where the first unit goes the readable way."""
        if kept is None or sum(lengths.new) > MOST_TOKENS or _is_watched():
            return None
        epoch = epochs.current()
        if self._epoch != epoch:
            self._bound.clear()
            self._epoch = epoch
        known = self._bound.setdefault(kept, {})
        if first not in known:
            known[first] = run = bind(units[first:], kept, dtype)
            if run is not None:
                epochs.bind(run, epoch)
        run = known[first]
        return run if run is not None and run.takes(lengths, logits) else None


def bind(units: Sequence[Unit], kept: KVCache, dtype: torch.dtype) -> BoundRun | None:
    """As many of the first units as one run can have; None where there is no decoder layer among
    them."""
    device = units[0].device
    if device is None:
        return None
    if device.type == "cpu" and _has_kernel(device.type):
        return native_run.bind(units, kept, dtype)
    if device.type == "cuda":
        return graph_run.bind(units, kept, dtype)
    return None


def _is_watched() -> bool:
    """Whether somebody wants to see every op, or every module."""
    if has_global_hooks() or torch.compiler.is_compiling():
        return True
    return _get_current_dispatch_mode() is not None


@cache
def _has_kernel(device_type: str) -> bool:
    return has_kernel("bound_run", device_type)

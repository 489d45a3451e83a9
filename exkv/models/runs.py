"""A model's bound runs. Each is bound for an epoch (``exkv.epochs``): any change that could affect
it ends the epoch and releases it, and the next call binds again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import torch

from exkv import epochs
from exkv.batch import Chosen, Lengths
from exkv.cache import KVCache
from exkv.layers.linear import is_watched
from exkv.layers.split_experts import is_worst_case
from exkv.ops import has_kernel
from exkv.ops.registry import HOST

from . import graph_run, native_run
from .bound_run import MOST_TOKENS, BoundRun, Logits
from .units import PlacedUnit

#: A run's first unit, and its rows' adapters.
_Key: TypeAlias = tuple[int, Chosen]
#: Number of runs with adapters to keep for one cache.
_MOST_ADAPTED = 32


class Runs:
    """A model's runs over its caches, in this epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._bound: weakref.WeakKeyDictionary[KVCache, OrderedDict[_Key, BoundRun | None]]
        self._bound = weakref.WeakKeyDictionary()

    def find(
        self,
        units: Sequence[PlacedUnit],
        first: int,
        kept: KVCache | None,
        lengths: Lengths,
        dtype: torch.dtype,
        logits: Logits,
    ) -> BoundRun | None:
        """The run from this unit on for a call of these lengths; None if the unit takes the
        readable route."""
        if kept is None or sum(lengths.new) > MOST_TOKENS or is_watched() or is_worst_case():
            return None
        epoch = epochs.current()
        if self._epoch != epoch:
            self._bound.clear()
            self._epoch = epoch
        known, key = self._bound.setdefault(kept, OrderedDict()), (first, lengths.adapters)
        if key not in known:
            self._forget_oldest(known)
            known[key] = run = bind(units[first:], kept, dtype)
            if run is not None:
                epochs.bind(run, epoch)
        run = known[key]
        if lengths.adapters is not None:
            known.move_to_end(key)
        return run if run is not None and run.takes(lengths, logits) else None

    @staticmethod
    def _forget_oldest(known: OrderedDict[_Key, BoundRun | None]) -> None:
        """Drop the oldest runs with adapters beyond the limit."""
        adapted = [key for key in known if key[1] is not None]
        for key in adapted[: len(adapted) - _MOST_ADAPTED]:
            if (run := known.pop(key)) is not None:
                run.release()


def bind(units: Sequence[PlacedUnit], kept: KVCache, dtype: torch.dtype) -> BoundRun | None:
    """Bind the longest prefix of the units that one run can cover; None if there is none."""
    device = units[0].device
    if device is None:
        return None
    if device.type in HOST and _has_kernel("cpu"):
        return native_run.bind(units, kept, dtype)
    if device.type == "cuda":
        return graph_run.bind(units, kept, dtype)
    return None


@cache
def _has_kernel(device_type: str) -> bool:
    return has_kernel("bound_run", device_type)

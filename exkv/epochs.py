"""Epochs: what was found out about modules, units and caches holds until one of them changes.

A decode step of a small model asks every layer the same questions, step after step. So answers are
kept beside the epoch in which they were found. Whatever could change an answer calls
:func:`advance`: a module, a unit or a layer of a cache whose attributes are set, and the
:class:`WatchedDict` in which they keep what others write to. Changes are rare, so there is one
counter for all, and finding an answer again takes no longer than it took the first time.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol


class Bound(Protocol):
    """Something that holds tensors for the length of an epoch."""

    def release(self) -> None:
        """Let go of them."""


_lock = threading.RLock()
_epoch = 0
_bound: weakref.WeakSet[Bound] = weakref.WeakSet()


def current() -> int:
    """The epoch; to be taken *before* one looks for what is kept under it."""
    return _epoch


def advance() -> None:
    """Begin another epoch: something has changed. What was bound for the last one is released."""
    global _epoch
    with _lock:
        _epoch += 1
        ended = list(_bound) if _bound else []
        _bound.clear()
    for bound in ended:
        bound.release()


def bind(bound: Bound, epoch: int) -> None:
    """Have it released when this epoch ends: at once where it has ended. It is held weakly."""
    with _lock:
        if epoch == _epoch:
            _bound.add(bound)
            return
    bound.release()


class WatchedDict(OrderedDict):
    """A dictionary whose changes advance the epoch."""


def _advancing(change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: WatchedDict, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            advance()

    return method


_CHANGES = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem")
for _name in (*_CHANGES, "setdefault", "update"):
    setattr(WatchedDict, _name, _advancing(getattr(OrderedDict, _name)))

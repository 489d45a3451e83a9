"""Epochs: memos about modules, units and caches are valid until one of them changes.

Every decode step asks every layer the same questions, so answers are stored with the epoch in which
they were computed. Whatever could change an answer calls :func:`advance`: setting an attribute of a
module, a unit or a cache layer, and changing a :class:`WatchedDict` of theirs. Changes are rare, so
one counter serves all.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol


class Bound(Protocol):
    """An object that holds tensors for one epoch."""

    def release(self) -> None:
        """Drop the tensors."""


_lock = threading.RLock()
_epoch = 0
_bound: weakref.WeakSet[Bound] = weakref.WeakSet()


def current() -> int:
    """The current epoch; read it *before* looking up a memo."""
    return _epoch


def advance() -> None:
    """Begin a new epoch after a change: invalidates memos, and releases everything bound."""
    global _epoch
    with _lock:
        _epoch += 1
        ended = list(_bound) if _bound else []
        _bound.clear()
    for bound in ended:
        bound.release()


def bind(bound: Bound, epoch: int) -> None:
    """Release an object when this epoch ends; at once if it has ended. It is held weakly."""
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

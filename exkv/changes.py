"""What is known of things that change seldom and tell of it: kept until anything of theirs changes.

A decode step of a small model asks the same of every layer, step after step, and each question
waits for memory that the weights have driven out of every cache. So answers are kept. Modules,
units and the layers of caches call :func:`changed` whenever one of their attributes is set; their
dictionaries that others write to are :class:`Noted`. Any change, of whatever model, makes all that
is known unknown, and lets go of its tensors: changes are rare, and asking again takes no longer
than it took before anything was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

_known: WeakKeyDictionary[object, dict[Hashable, Any]] = WeakKeyDictionary()


def changed() -> None:
    """Called after a change."""
    global _known
    _known = WeakKeyDictionary()  # a new one: who is looking now must not keep what it finds


def known_of(owner: object) -> dict[Hashable, Any]:
    """What is known of the owner; to be taken before one looks for what is to be kept in it, which
    must follow from things alone that tell of their changes."""
    try:
        return _known[owner]
    except KeyError:
        return _known.setdefault(owner, {})


class Noted(OrderedDict):
    """A dictionary that tells of its changes."""


def _telling(change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Noted, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            changed()

    return method


_CHANGES = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem")
for _name in (*_CHANGES, "setdefault", "update"):
    setattr(Noted, _name, _telling(getattr(OrderedDict, _name)))

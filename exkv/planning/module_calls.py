"""Measure the modules of another library's model while that model calls them, on shapes.

There are two ways into the measurement. The first, ``workspace.py``, knows the inputs of exkv's
units, and calls each alone; here a model is called, and makes the inputs of its modules. Both
use a ``DryRun``, measure modules that compute the same only once, and replay a call's requests
(``reserved.py``) for devices that give memory in segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from exkv.caching_allocator import Rules

from .dry_run import DryRun
from .live_storages import Trace
from .reserved import reserved_beside

#: What a module computes, and the shapes of its arguments: equal for calls that need the same.
_Case: TypeAlias = tuple[Any, Any]


@dataclass(slots=True, eq=False, kw_only=True)
class MeasuredModule:
    """A module, and what its calls take, in bytes.

    Attributes:
        workspace: peak of a call, beyond weights and caches.
        reserved: what the call reserves on a device that gives memory in segments; 0 for others.
    """

    module: nn.Module
    workspace: int = 0
    reserved: int = 0


_M = TypeVar("_M", bound=MeasuredModule)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Shape of a tensor that a module returned."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> _Shape:
        return cls(x.size(), x.stride(), x.dtype, x.device)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _MeasuredCall:
    """A module's call: peak bytes beyond those before it, the shapes that it returned, and its
    requests."""

    taken: int
    returned: Any
    requests: Trace


def argument_key(value: Any) -> Any:
    """A key that is equal for arguments of the same shape."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def module_key(module: nn.Module, ignored: Collection[str] = ()) -> tuple[str, ...]:
    """A key that is equal for modules that compute the same.

    Args:
        ignored: attributes that make no difference, such as a layer's index.
    """
    settings = [
        (name, key, value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in ignored and isinstance(value, bool | int | float | str)
    ]
    shapes = [(name, x.shape, x.dtype) for name, x in module.named_parameters()]
    return repr(module), str(settings), str(shapes)


class ModuleCalls:
    """Measures modules while a model calls them in a dry run.

    For each module, it records the peak within its calls and right before them: live bytes beyond
    those at the start (weights and caches), since a model holds some tensors throughout, such as
    embeddings. A call that equals an earlier one returns the same shapes at once.

    Args:
        run: the dry run, which is on.
        rules: of the device's caching allocator; None for a device that allocates to the byte.
        opaque: type of arguments and results that pass unchanged, such as caches.
        key: :func:`argument_key`, or another function that handles further arguments.
    """

    def __init__(
        self,
        run: DryRun,
        rules: Rules | None,
        opaque: type,
        key: Callable[[Any], Any] = argument_key,
    ) -> None:
        self._run, self._rules, self._opaque, self._key = run, rules, opaque, key
        self._base = run.current
        self._known: dict[_Case, _MeasuredCall] = {}
        self._reserved: dict[tuple[int, _Case | None], int] = {}

    @contextmanager
    def following(self, modules: Mapping[_M, Any]) -> Iterator[None]:
        """Measure all calls within this block.

        Args:
            modules: in the model's order, each with its :func:`module_key`.
        """
        for each, kind in modules.items():
            each.module.forward = functools.partial(self._call, each, kind, each.module.forward)
        try:
            yield
        finally:
            for each in modules:
                del each.module.forward
        *_, last = modules
        self._note(last, self._run.peak)  # of the model's own work after it

    def _call(
        self,
        called: MeasuredModule,
        kind: Any,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        run, begun = self._run, self._run.current
        self._note(called, run.peak)  # of the model's own work before it
        leaves, structure = tree_flatten((args, kwargs), is_leaf=self._is_opaque)
        case = kind, (tuple(map(self._key, leaves)), str(structure))
        if case not in self._known:
            out, taken, requests = run.measured(lambda: forward(*args, **kwargs))
            shapes = tree_map_only(torch.Tensor, _Shape.of, out, is_leaf=self._is_opaque)
            self._known[case] = _MeasuredCall(taken, shapes, requests)
        else:
            shapes = self._known[case].returned
            out = tree_map_only(_Shape, _Shape.made, shapes, is_leaf=self._is_opaque)
        self._note(called, begun + self._known[case].taken, begun, case)
        run.peak = run.current
        return out

    def _note(
        self, called: MeasuredModule, peak: int, held: int | None = None, case: _Case | None = None
    ) -> None:
        """Count a peak for a module.

        Args:
            held: bytes that are live before and after the requests; None for ``peak``.
            case: the call that makes the requests; None for none.
        """
        called.workspace = max(called.workspace, peak - self._base)
        if self._rules is not None:
            held = (peak if held is None else held) - self._base
            if (held, case) not in self._reserved:
                requests = [] if case is None else self._known[case].requests
                self._reserved[held, case] = reserved_beside(held, requests, self._rules)
            called.reserved = max(called.reserved, self._reserved[held, case])

    def _is_opaque(self, value: Any) -> bool:
        return isinstance(value, self._opaque)

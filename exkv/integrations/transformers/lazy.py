"""Lazy tensors, which are made when their values are first needed.

A model passes keys, values and masks from one function to another, but exkv's attention doesn't
need them as tensors. So it gets stand-ins of the right shape, dtype and device; any op on a
stand-in makes the tensor that it represents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_map

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a compiled model call a function without tracing it. (``torch.compiler.disable`` alone
    would be slow in models that aren't compiled, which call it at every layer.)"""
    disabled = torch.compiler.disable(function)

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return called


#: Functions that need no values.
_OF_SHAPES = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]  # getters, which torch doesn't type
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
}
_A_DEVICE = (torch.device, str, int)


class LazyTensor(torch.Tensor):
    """A stand-in for the tensor that ``make()`` returns, which is called once.

    Attributes:
        source: an object that describes it, for functions that don't need its values.
    """

    source: Any

    _make: Callable[[], torch.Tensor] | None
    _made: torch.Tensor | None

    @classmethod
    def of(
        cls,
        make: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        source: Any,
    ) -> LazyTensor:
        """Make a stand-in. (A constructor would take twice as long, at every layer and token.)"""
        x = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        x._make, x._made, x.source = make, None, source
        return x

    def made(self) -> torch.Tensor:
        """The tensor."""
        if self._made is None:
            assert self._make is not None
            self._made, self._make = self._make(), None
        return self._made

    def _to(self, device: torch.device | str | int, **options: Any) -> LazyTensor:
        """The same on another device; not made before its values are needed there."""
        there = torch.empty(0, device="meta") if device == "meta" else torch.empty(0, device=device)
        make = lambda: self.made().to(device, **options)  # noqa: E731
        return LazyTensor.of(make, tuple(self.shape), self.dtype, there.device, self.source)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has one option
        return repr(self.made())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _OF_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and isinstance(args[1] if len(args) > 1 else None, _A_DEVICE):
            return args[0]._to(*args[1:], **(kwargs or {}))
        if func is torch.Tensor.view and not isinstance(args[1], torch.dtype):
            func = torch.Tensor.reshape  # stock caches are contiguous, and models rely on it
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its own as disabled
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve calls from C++."""
        return func(*tree_map(_made, args), **tree_map(_made, kwargs or {}))


def _made(x: Any) -> Any:
    return x.made() if isinstance(x, LazyTensor) else x

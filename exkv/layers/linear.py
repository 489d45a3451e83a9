"""Linear layers and the token embedding; their weight formats are in ``exkv.weights``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from exkv.epochs import WatchedDict, advance
from exkv.weights import Size, WeightFormat, products
from exkv.weights.floats import FLOATS


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter on the current default device; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def is_watched() -> bool:
    """Whether a hook, mode or compiler must see every module or op."""
    if has_global_hooks() or torch.compiler.is_compiling():
        return True
    return _get_current_dispatch_mode() is not None


class PlainModule(nn.Module):
    """A module that finds its submodules as instance attributes, and advances the epoch when it
    changes.

    ``nn.Module`` finds them in ``__getattr__``, after a failed look-up, which takes ten times as
    long; a decode step of a small model does hundreds. Parameters can be replaced without an
    attribute assignment (``nn.Module.to``), so they are not copied; the dictionaries that hold them
    and the hooks are watched: see ``exkv.epochs``.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("_parameters", "_forward_hooks", "_forward_pre_hooks"):
            self.__dict__[name] = WatchedDict()  # a new module is in no epoch yet

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value
        advance()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)
        advance()

    def _apply(self, *args: Any, **kwargs: Any) -> PlainModule:
        """``nn.Module.to`` and similar methods replace parameters' data without notice."""
        try:
            return super()._apply(*args, **kwargs)
        finally:
            advance()

    @property
    def bare(self) -> bool:
        """Whether a call runs only the type's ``forward``, without hooks."""
        hooked = self._forward_hooks or self._forward_pre_hooks or has_global_hooks()
        return not hooked and "forward" not in self.__dict__

    @property
    def watched(self) -> bool:
        """Whether all its changes advance the epoch; false if its dictionaries have been
        replaced."""
        kept = (self._parameters, self._forward_hooks, self._forward_pre_hooks)
        return all(isinstance(each, WatchedDict) for each in kept)


class Matrix(PlainModule):
    """A module with a matrix (out, in) in a weight format.

    Attributes:
        format: floats at first.
        size: outputs, inputs.
    """

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        self.use_format(FLOATS[dtype])

    def use_format(self, format: WeightFormat) -> None:
        """Replace the tensors with uninitialised ones of this format."""
        for name in getattr(self, "format", format).names:
            self._parameters.pop(name, None)
        self.format = format
        for name, (shape, dtype) in format.layout(self.size).items():
            self.register_parameter(name, weight(*shape, dtype=dtype))


def parameters_of(matrix: Matrix) -> dict[str, Any]:
    """The tensors that the format names, and the bias, or None."""
    return matrix._parameters


class Linear(Matrix):
    """x (..., in) -> (..., out), with an optional bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__((outputs, inputs), dtype)
        self.register_parameter("bias", weight(outputs, dtype=dtype) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        parameters = parameters_of(self)
        return self.format.linear(self.aligned(x), parameters, parameters["bias"])

    def aligned(self, x: Tensor) -> Tensor:
        """x with its inputs in the order of the matrix's columns."""
        return x


class TransposedLinear(Linear):
    """A linear layer on features (..., groups * heads * size) whose matrix has the first heads of
    all groups first. Columns of packed blocks can't be moved without quantizing them again."""

    def __init__(
        self, inputs: int, outputs: int, *, groups: int, heads: int, dtype: torch.dtype
    ) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)
        self.order = (groups, heads, -1)

    def aligned(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.order).transpose(-3, -2).flatten(-3)


class ExactLinear(Linear):
    """A linear layer that computes in float32 whatever the model's dtype; its weight is kept in
    float32, as experts' routers are small enough for that."""

    def use_format(self, format: WeightFormat) -> None:
        floats = FLOATS[torch.float32]
        super().use_format(floats if isinstance(format, type(floats)) else format)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def side_by_side(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """Apply each linear layer to x, using :func:`exkv.weights.products` if none has hooks."""
    matrices: list[tuple[WeightFormat, dict[str, Any]]] = []
    biases: list[Tensor | None] = []
    for linear in linears:
        if type(linear) is not Linear or not linear.bare:
            return [other(x) for other in linears]
        matrices.append((linear.format, linear._parameters))
        biases.append(linear._parameters["bias"])
    return products(x, matrices, biases)


class Embedding(Matrix):
    """Token ids (B, T) -> hidden states (B, T, hidden), times ``scale`` (Gemma)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        super().__init__((vocab_size, hidden_size), dtype)
        self.dtype = dtype
        self.multiplier = scale  # formats may name a tensor "scale"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.format.embed(ids, parameters_of(self), self.dtype)
        return x if self.multiplier == 1 else x.mul_(self.multiplier)


def linear_at(module: nn.Module, path: str) -> Linear:
    """The linear layer at a dotted path of a module."""
    found = module.get_submodule(path)
    assert isinstance(found, Linear)
    return found


def with_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "", *, watched: bool = False
) -> nn.Module:
    """A copy of the module with other tensors in place of its parameters.

    Args:
        tensors: by the parameters' names after the prefix.
        watched: whether the copy is :attr:`PlainModule.watched` if the module is, which advances
            the epoch.
    """
    copy = object.__new__(type(module))
    kind: type[dict[str, Any]] = type(module._parameters) if watched else dict
    found = kind(
        (name, None if own is None else tensors[prefix + name])
        for name, own in module._parameters.items()
    )
    inside = {
        name: with_tensors(child, tensors, f"{prefix}{name}.", watched=watched)
        for name, child in module._modules.items()
        if child is not None
    }
    copy.__dict__.update(module.__dict__, _parameters=found, _modules=inside)
    copy.__dict__.update((name, child) for name, child in inside.items() if name in copy.__dict__)
    return copy

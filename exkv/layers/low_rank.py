"""Low-rank adapters (Hu et al., 2021): W x + B (A x), for all rows of a call or for some.

:class:`LowRankLinear` and :class:`LowRankEmbedding` wrap a layer; :func:`with_low_rank` makes a
copy of a module with wrapped layers that shares everything else: parameters, hooks and the modules
without an adapter. So choosing an adapter is choosing a module, and no other layer is aware of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from . import linear
from .descriptions import LowRank, Projection, RowsLowRank, describe, describes
from .linear import Embedding, PlainModule


class LowRankLayer(PlainModule):
    """A layer and what is added to its output.

    Args:
        base: x (B, ..., in) -> (B, ..., out), a new tensor.
        changes: for row ranges that don't overlap.
    """

    def __init__(self, base: nn.Module, changes: Sequence[RowsLowRank]) -> None:
        super().__init__()
        # Set without an attribute assignment, which would advance the epoch during a call.
        self.__dict__["base"] = self._modules["base"] = base
        self.__dict__["changes"] = tuple(changes)

    base: nn.Module
    changes: tuple[RowsLowRank, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self.base.size  # type: ignore[return-value] # nn.Module says Tensor | Module

    def forward(self, x: Tensor) -> Tensor:
        return self.added(self.base(x), x)

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the changes to y, the base's output for x, in place."""
        for change in self.changes:
            change.rows(y).add_(self.change(change.rows(x), change.low_rank))
        return y

    def change(self, x: Tensor, low_rank: LowRank) -> Tensor:
        """B A x."""
        raise NotImplementedError


class LowRankLinear(LowRankLayer):
    """A linear layer with adapters."""

    def change(self, x: Tensor, low_rank: LowRank) -> Tensor:
        return _times(_times(x, low_rank.a), low_rank.b)


class LowRankEmbedding(LowRankLayer):
    """An embedding with adapters: ids (B, T) -> (B, T, hidden)."""

    def change(self, x: Tensor, low_rank: LowRank) -> Tensor:
        found = _times(torch.embedding(low_rank.a, x), low_rank.b)
        scale = getattr(self.base, "multiplier", 1.0)
        return found if scale == 1 else found.mul_(scale)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.exkv.linear(x, weight, None)


def side_by_side(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """As :func:`exkv.layers.linear.side_by_side`, with the base layers in one call too."""
    changed = [each if type(each) is LowRankLinear else None for each in linears]
    bases = [each if on is None else on.base for each, on in zip(linears, changed, strict=True)]
    outs = linear.side_by_side(x, bases)
    return [y if on is None else on.added(y, x) for y, on in zip(outs, changed, strict=True)]


def with_low_rank(module: nn.Module, changes: Mapping[str, Sequence[RowsLowRank]]) -> nn.Module:
    """A copy of the module in which the layers at these paths have low-rank changes.

    Raises:
        ValueError: a module on the way to one has its own ``forward``, which would bypass it.
    """
    made: dict[str, nn.Module] = {}
    for path, each in changes.items():
        layer = module.get_submodule(path)
        kind = LowRankEmbedding if isinstance(layer, Embedding) else LowRankLinear
        made[path] = kind(layer, each)
    return with_replaced(module, made)


def with_replaced(module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the module with others at these dotted paths; everything else is shared."""
    if "" in others:
        return others[""]
    if "forward" in module.__dict__:
        raise ValueError(
            f"a {type(module).__name__} has its own forward, which would bypass an adapter in it: "
            "remove that forward, or run without adapters"
        )
    below: dict[str, dict[str, nn.Module]] = {}
    for path, other in others.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = other
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__, _modules=dict(module._modules))
    for name, inside in below.items():
        child = module.get_submodule(name)
        copy._modules[name] = made = with_replaced(child, inside)
        if name in copy.__dict__:  # where PlainModule looks it up
            copy.__dict__[name] = made
    return copy


@describes(LowRankLinear)
def _linear(layer: LowRankLinear) -> Projection:
    return replace(describe(layer.base), low_rank=layer.changes)

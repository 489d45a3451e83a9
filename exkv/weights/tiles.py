"""Products with a matrix that is dequantized a few rows at a time.

A whole dequantized matrix beside its packed one would be the largest tensor of a forward call; a
tile of rows is not. The result is that of the whole: every output is a row's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from exkv.ops.registry import define_op

from .format import Tensors, WeightFormat
from .registry import format_named

#: Weights that are dequantized at once.
TILE = 1 << 20


class TiledFormat(WeightFormat):
    """A format of which any rows can be dequantized alone."""

    __slots__ = ()

    @abstractmethod
    def outputs(self, tensors: Tensors) -> int:
        """Rows of the matrix."""

    @abstractmethod
    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized rows (n, in) of these ids (n,), int64 on the tensors' device."""

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        device = tensors[self.names[0]].device
        return self.rows(tensors, torch.arange(self.outputs(tensors), device=device), dtype)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        parts, outputs = [tensors[name] for name in self.names], self.outputs(tensors)
        return torch.ops.exkv.linear_tiles(x, parts, self.name, outputs, bias)

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return self.rows(tensors, ids.flatten(), dtype).view(*ids.shape, -1)


def tile_of(inputs: int) -> int:
    """Rows of so many inputs that are dequantized at once."""
    return max(TILE // inputs, 1)


def _fake(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    outputs: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


@define_op(
    "linear_tiles(Tensor x, Tensor[] tensors, str format, int outputs, Tensor? bias) -> Tensor",
    fake=_fake,
)
def linear_tiles(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    outputs: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x (..., in) -> x weight^T + bias (..., out), tile by tile.

    Args:
        tensors: as the format's layout names them.
        format: the name of a registered :class:`TiledFormat`.
        outputs: rows of the matrix, from the first on.
    """
    tiled = format_named(format)
    assert isinstance(tiled, TiledFormat)
    held = dict(zip(tiled.names, tensors, strict=True))
    out, step = x.new_empty((*x.shape[:-1], outputs)), tile_of(x.shape[-1])
    for first in range(0, outputs, step):
        end = min(first + step, outputs)
        tile = tiled.rows(held, torch.arange(first, end, device=x.device), x.dtype)
        out[..., first:end] = torch.ops.exkv.linear(x, tile, _part(bias, first, end))
    return out


def _part(bias: torch.Tensor | None, first: int, end: int) -> torch.Tensor | None:
    return None if bias is None else bias[first:end]

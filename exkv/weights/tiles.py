"""Products with a matrix that is dequantized a few rows at a time.

A whole dequantized matrix beside its packed one would be the largest tensor of a forward call; a
tile of rows is not. The result is that of the whole: every output is a row's own.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from .format import Tensors, WeightFormat

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
        outputs, step = self.outputs(tensors), max(TILE // x.shape[-1], 1)
        if outputs <= step:
            return torch.ops.exkv.linear(x, self.dequantize(tensors, x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], outputs)
        ids = torch.arange(outputs, device=x.device)
        for first in range(0, outputs, step):
            some = ids[first : first + step]
            added = None if bias is None else bias[first : first + step]
            tile = self.rows(tensors, some, x.dtype)
            out[..., first : first + step] = torch.ops.exkv.linear(x, tile, added)
        return out

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return self.rows(tensors, ids.flatten(), dtype).view(*ids.shape, -1)

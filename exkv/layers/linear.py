"""Linear maps and the token embedding: weights as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter on the current default device; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x (..., in) -> (..., out), with a bias where the config says so."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs, dtype=dtype)
        self.bias = weight(outputs, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.exkv.linear(x, self.weight, self.bias)


def side_by_side(x: torch.Tensor, maps: Sequence[Linear]) -> list[torch.Tensor]:
    """What each of these maps, all with biases or all without, makes of x: one call for all."""
    weights = [part.weight for part in maps]
    biases = [part.bias for part in maps if part.bias is not None]
    return torch.ops.exkv.linears(x, weights, biases)


class Embedding(nn.Module):
    """Token ids (B, T) -> hidden states (B, T, hidden), times ``scale`` (Gemma)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size, dtype=dtype)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.weight)
        return x if self.scale == 1 else x.mul_(self.scale)

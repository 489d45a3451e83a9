"""RMSNorm as a layer; the arithmetic is in ``exkv.ops.norm``."""

from __future__ import annotations

import torch
from torch import nn

from .linear import weight


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.exkv.rms_norm(x, self.weight, self.eps)

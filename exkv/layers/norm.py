"""RMSNorm as a layer; the arithmetic is in ``exkv.ops.norm``."""

from __future__ import annotations

import torch

from .descriptions import Norm, describes, parameter
from .linear import PlainModule, weight


class RMSNorm(PlainModule):
    """x (..., size) -> the same shape; with ``offset`` the factor is 1 + weight (Gemma)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, offset: bool = False) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.exkv.rms_norm(x, self._parameters["weight"], self.eps, self.offset)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual (..., size) -> x + residual, and the norm of that."""
        if type(self) is not RMSNorm or not self.bare:
            total = x + residual
            return total, self(total)
        weight = self._parameters["weight"]
        return torch.ops.exkv.add_rms_norm(x, residual, weight, self.eps, self.offset)


@describes(RMSNorm)
def _norm(norm: RMSNorm) -> Norm:
    return Norm(weight=parameter(norm, "weight"), eps=norm.eps, offset=norm.offset)

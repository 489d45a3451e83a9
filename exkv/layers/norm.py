"""RMSNorm and LayerNorm as layers; the arithmetic is in ``exkv.ops.norm``."""

from __future__ import annotations

import torch
from torch import Tensor

from .descriptions import Norm, describes, parameter
from .linear import PlainModule, weight


class RMSNorm(PlainModule):
    """x (..., size) -> the same shape; with ``offset`` the factor is 1 + weight (Gemma)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, offset: bool = False) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.exkv.rms_norm(x, self._parameters["weight"], self.eps, self.offset)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual (..., size) -> their sum, and its norm."""
        if type(self) is not RMSNorm or not self.bare:
            total = x + residual
            return total, self(total)
        weight = self._parameters["weight"]
        return torch.ops.exkv.add_rms_norm(x, residual, weight, self.eps, self.offset)


class LayerNorm(PlainModule):
    """x (..., size) -> the same shape (Ba et al., 2016); with ``offset`` the factor is 1 + weight
    (Nemotron). Cohere's has no bias."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, bias: bool = True, offset: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype)
        self.register_parameter("bias", weight(size, dtype=dtype) if bias else None)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        parameters = self._parameters
        return torch.ops.exkv.layer_norm(
            x, parameters["weight"], parameters["bias"], self.eps, self.offset
        )

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual (..., size) -> their sum, and its norm."""
        total = x + residual
        return total, self(total)


@describes(RMSNorm)
def _norm(norm: RMSNorm) -> Norm:
    return Norm(weight=parameter(norm, "weight"), eps=norm.eps, offset=norm.offset)


@describes(LayerNorm)
def _layer_norm(norm: LayerNorm) -> Norm:
    bias = None if norm._parameters["bias"] is None else parameter(norm, "bias")
    weight = parameter(norm, "weight")
    return Norm(weight=weight, eps=norm.eps, offset=norm.offset, centered=True, bias=bias)

"""RMS norm (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op


@define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, bool offset=False) -> Tensor",
    kernels_fall_back=True,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """``weight * x / rms(x)`` over the last dimension; x (..., N), weight (N,) -> (..., N).

    Statistics are float32 for any dtype of x, and the result is rounded to x's dtype before the
    weight is applied, as in Hugging Face's Llama. With ``offset`` the factor is 1 + weight, and
    applied in float32 before rounding, as in Gemma.

    The CPU kernels round at the same places; they only sum the squares in another order.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    if offset:
        return (wide * scale).mul_(weight.float() + 1).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


def _add_fake(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, torch.empty_like(total)


@define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool offset=False) "
    "-> (Tensor, Tensor)",
    fake=_add_fake,
    kernels_fall_back=True,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """x + residual, rounded to their dtype, and :func:`rms_norm` of it; all (..., N)."""
    total = x + residual
    return total, rms_norm(total, weight, eps, offset)


@define_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool offset=False) -> Tensor",
    kernels_fall_back=True,
)
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool = False
) -> Tensor:
    """``weight * (x - mean) / deviation + bias`` over the last dimension; x (..., N), weight and
    bias (N,) -> (..., N). With ``offset`` the factor is 1 + weight, rounded to its dtype."""
    factor = weight + 1 if offset else weight
    return F.layer_norm(x, factor.shape, factor, bias, eps)

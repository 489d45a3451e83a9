"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import define_op


@define_op(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    fake=lambda q, k, cos, sin: (q.new_empty(q.shape), k.new_empty(k.shape)),
    kernels_fall_back=True,
)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q (B, T, H, D) and k (B, T, H_kv, D) by cos, sin (B, T, R); if R is less than D, only
    the first R features of a head are rotated.

    The CPU kernels round at the same places, so that results are bit-identical.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

"""8-bit keys and values: int8 with a float16 scale for each group of 32.

The format is that of llama.cpp's q8_0 (8.5 bits a value), with scales in a separate tensor so that
both tensors are read in whole vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op

GROUP = 32
_FLOAT16_MAX = torch.finfo(torch.float16).max
_LEVELS = 127


def num_groups(head_dim: int) -> int:
    """Scales for ``head_dim`` values; the last group may be short."""
    return -(-head_dim // GROUP)


def _quantize_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = (*x.shape[:-1], num_groups(x.shape[-1]))
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(scales, dtype=torch.float16)


@define_op("quantize_kv(Tensor x) -> (Tensor, Tensor)", fake=_quantize_fake, kernels_fall_back=True)
def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) float -> values int8 (..., D), scales float16 (..., ceil(D / 32)).

    A group's scale is its largest magnitude / 127 rounded to float16, and each value is
    x / scale rounded half to even; a group of zeros (or one whose scale rounds to zero) has
    scale 0 and values 0. All arithmetic is float32 on the rounded scale.
    """
    head_dim, groups = x.shape[-1], num_groups(x.shape[-1])
    padded = F.pad(x.float(), (0, groups * GROUP - head_dim)).unflatten(-1, (groups, GROUP))
    scale = (padded.abs().amax(-1) / _LEVELS).clamp_(max=_FLOAT16_MAX).half()
    wide = scale.float().unsqueeze(-1)
    q = torch.where(wide > 0, padded / wide, 0).round_().clamp_(-_LEVELS, _LEVELS)
    return q.to(torch.int8).flatten(-2)[..., :head_dim].contiguous(), scale


@define_op(
    "dequantize_kv(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    fake=lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype),
    kernels_fall_back=True,
)
def dequantize_kv(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`quantize_kv`: q int8 (..., D), scale float16 (..., ceil(D / 32)) -> (...,
    D) in dtype."""
    wide = scale.float().repeat_interleave(GROUP, dim=-1)[..., : q.shape[-1]]
    return (q.float() * wide).to(dtype)

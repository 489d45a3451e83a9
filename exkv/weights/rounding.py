"""Round float weights to integers in groups, without data.

The weight of a group that is largest in magnitude gets the lowest integer, which has no positive
counterpart, by a scale with the sign that this takes. The range is then shrunk step by step, and
the one with the least squared error is chosen: clipping a few large weights may cost less than
finer steps gain for all others. Scales are then refitted to the codes by least squares, while that
helps. So no group is worse than when it is rounded to nearest over its range.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

#: Candidate shares of a group's range.
SHARES = tuple(1 - 0.04 * step for step in range(8))
#: How often scales are refitted to codes.
FITS = 2
#: Weights rounded at a time: few enough for the temporaries to stay in the processor's cache.
_TILE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """w = scale * (code - 2^(bits - 1)).

    Attributes:
        codes: uint8 (out, in).
        scale: floats (out, groups).
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def joined(cls, rows: Iterable[Rounded]) -> Rounded:
        """Concatenate rounded rows."""
        codes, scales = zip(*((each.codes, each.scale) for each in rows), strict=True)
        return cls(codes=torch.cat(codes), scale=torch.cat(scales))

    def values(self, bits: int) -> torch.Tensor:
        """The dequantized matrix, fp32."""
        groups = self.scale.shape[1]
        signed = self.codes.float().sub_(1 << bits - 1).unflatten(1, (groups, -1))
        return signed.mul_(self.scale.float().unsqueeze(-1)).flatten(1)


def rounded(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> Rounded:
    """Round a matrix (out, in) of floats to ``bits`` bits.

    Args:
        group: inputs that share a scale; a divisor of their number.
        dtype: dtype of the scales.
    """
    step = max(_TILE // weight.shape[1], 1)
    return Rounded.joined(_rounded(rows.float(), bits, group, dtype) for rows in weight.split(step))


def squared_error(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> float:
    """Sum of squared differences between a matrix and its :func:`rounded` values."""
    found = rounded(weight, bits, group, dtype).values(bits)
    return float((found - weight).square().sum())


class _Best:
    """The best candidate so far for every group.

    Attributes:
        codes: fp32 (out, groups, inputs of a group), signed.
        scale: fp32 (out, groups, 1).
    """

    def __init__(self, weight: torch.Tensor, half: int) -> None:
        self.weight, self.half = weight, half
        self.codes = torch.zeros_like(weight)
        self.scale = torch.ones_like(weight[..., :1])
        self.error = weight.square().sum(-1, keepdim=True)

    def offer(self, scale: torch.Tensor) -> None:
        """Take these scales where they are better; scales of 0 belong to groups of zeros."""
        usable = torch.where((scale != 0) & scale.isfinite(), scale, torch.ones_like(scale))
        codes = (self.weight / usable).round_().clamp_(-self.half, self.half - 1)
        error = (codes * usable - self.weight).square_().sum(-1, keepdim=True)
        better = error < self.error
        for mine, other in ((self.error, error), (self.codes, codes), (self.scale, usable)):
            torch.where(better, other, mine, out=mine)

    def fitted(self) -> torch.Tensor:
        """The least squares scales for the current codes."""
        norm = self.codes.square().sum(-1, keepdim=True).clamp_(min=1)
        return (self.codes * self.weight).sum(-1, keepdim=True) / norm


def _rounded(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> Rounded:
    wide, half = weight.unflatten(1, (-1, group)), 1 << bits - 1
    best = _Best(wide, half)
    largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    for share in SHARES:
        best.offer((largest * (-share / half)).to(dtype).float())
        best.offer((largest.abs() * (share / (half - 0.5))).to(dtype).float())
    for _ in range(FITS):
        best.offer(best.fitted().to(dtype).float())
    return Rounded(
        codes=(best.codes + half).to(torch.uint8).flatten(1),
        scale=best.scale.squeeze(-1).to(dtype),
    )

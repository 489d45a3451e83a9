"""Integers in groups from float weights, without data: what ``exkv quantize`` stores.

The weight of a group that is largest in magnitude is given the lowest integer, which has no
counterpart above zero, by a scale of the sign that this takes. That range is then shrunk step by
step, and what has the least squared error is taken: where few weights are large, to clip them costs
less than the finer steps gain for the many. Scales are fitted to the codes by least squares for as
long as that helps. So no group is worse than if it were rounded to the nearest over its range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Shares of a group's range that are tried.
SHARES = tuple(1 - 0.04 * step for step in range(8))
#: Times that scales are fitted to codes.
FITS = 2
#: Weights that are looked at at once: few enough that what is made of them stays in a cache.
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

    def values(self, bits: int) -> torch.Tensor:
        """The matrix that they stand for, fp32."""
        groups = self.scale.shape[1]
        signed = self.codes.float().sub_(1 << bits - 1).unflatten(1, (groups, -1))
        return signed.mul_(self.scale.float().unsqueeze(-1)).flatten(1)


def rounded(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> Rounded:
    """A matrix (out, in) of floats in ``bits`` bits.

    Args:
        group: inputs that share a scale; it divides their number.
        dtype: of the scales.
    """
    step = max(_TILE // weight.shape[1], 1)
    parts = [_rounded(rows.float(), bits, group, dtype) for rows in weight.split(step)]
    return Rounded(
        codes=torch.cat([part.codes for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
    )


def squared_error(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> float:
    """What :func:`rounded` loses of a matrix: the sum of squared differences."""
    found = rounded(weight, bits, group, dtype).values(bits)
    return float((found - weight).square().sum())


class _Best:
    """The best so far of every group.

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
        """Take these scales where they are better; a scale of 0 is that of zeros."""
        usable = torch.where((scale != 0) & scale.isfinite(), scale, torch.ones_like(scale))
        codes = (self.weight / usable).round_().clamp_(-self.half, self.half - 1)
        error = (codes * usable - self.weight).square_().sum(-1, keepdim=True)
        better = error < self.error
        for mine, other in ((self.error, error), (self.codes, codes), (self.scale, usable)):
            torch.where(better, other, mine, out=mine)

    def fitted(self) -> torch.Tensor:
        """The scales of least squared error for these codes."""
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

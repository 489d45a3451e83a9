"""Round float weights to integers in groups, without data.

The weight of a group that is largest in magnitude gets the lowest integer, which has no positive
counterpart, by a scale with the sign that this takes. The range is then shrunk step by step, and
the one with the least squared error is chosen: clipping a few large weights may cost less than
finer steps gain for all others. Scales are then refitted to the codes by least squares, while that
helps. So no group is worse than when it is rounded to nearest over its range.

A group with a zero point is rounded over the range from its smallest weight to its largest, if that
loses less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

#: Candidate shares of a group's range.
SHARES = tuple(1 - 0.04 * step for step in range(8))
#: How often scales are refitted to codes.
FITS = 2
#: Weights rounded at a time: few enough for the temporaries to stay in the processor's cache.
_TILE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """w = scale * (code - zero).

    Attributes:
        codes: uint8 (out, in).
        scale: floats (out, groups).
        zero: zero points, uint8 (out, groups); None if all are 2^(bits - 1).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    @classmethod
    def joined(cls, rows: Iterable[Rounded]) -> Rounded:
        """Concatenate rounded rows."""
        every = list(rows)
        zeros = [each.zero for each in every if each.zero is not None]
        return cls(
            codes=torch.cat([each.codes for each in every]),
            scale=torch.cat([each.scale for each in every]),
            zero=torch.cat(zeros) if zeros else None,
        )

    def map(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Rounded:
        """What ``of`` makes of each tensor, such as the same rows."""
        zero = None if self.zero is None else of(self.zero)
        return Rounded(codes=of(self.codes), scale=of(self.scale), zero=zero)

    def values(self, bits: int) -> torch.Tensor:
        """The dequantized matrix, fp32."""
        signed = self.codes.float().unflatten(1, (self.scale.shape[1], -1))
        signed.sub_(1 << bits - 1 if self.zero is None else self.zero.unsqueeze(-1))
        return signed.mul_(self.scale.float().unsqueeze(-1)).flatten(1)


def rounded(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, zeros: bool = False
) -> Rounded:
    """Round a matrix (out, in) of floats to ``bits`` bits.

    Args:
        group: inputs that share a scale; a divisor of their number.
        dtype: dtype of the scales.
        zeros: whether groups have zero points.
    """
    step = max(_TILE // weight.shape[1], 1)
    rows = (each.float() for each in weight.split(step))
    return Rounded.joined(_rounded(each, bits, group, dtype, zeros) for each in rows)


def squared_error(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, zeros: bool = False
) -> float:
    """Sum of squared differences between a matrix and its :func:`rounded` values."""
    found = rounded(weight, bits, group, dtype, zeros).values(bits)
    return float((found - weight).square().sum())


#: Zero points: fp32 integers, or the same one for all groups.
Zero = torch.Tensor | int


def candidates(
    weight: torch.Tensor, dim: int, bits: int, zeros: bool
) -> Iterator[tuple[torch.Tensor, Zero]]:
    """Scales and zero points to try for groups of weights, fp32, of size 1 in their dimension.

    Args:
        dim: the dimension in which inputs of a group are.
    """
    half, top = 1 << bits - 1, (1 << bits) - 1
    largest = weight.gather(dim, weight.abs().argmax(dim, keepdim=True))
    middle = torch.full_like(largest, half) if zeros else half
    for share in SHARES:
        yield largest * (-share / half), middle
        yield largest.abs() * (share / (half - 0.5)), middle
    if zeros:
        least, most = (each.clone() for each in weight.aminmax(dim=dim, keepdim=True))
        span = most.clamp_(min=0) - least.clamp_(max=0)
        zero = (least * -top / span.clamp(min=1e-30)).round_()
        for share in SHARES:
            yield span * (share / top), zero


class _Best:
    """The best candidate so far for every group.

    Attributes:
        codes: fp32 (out, groups, inputs of a group), less the zero points.
        scale, zero: fp32 (out, groups, 1).
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self.weight, self.top = weight, (1 << bits) - 1
        self.codes = torch.zeros_like(weight)
        self.scale = torch.ones_like(weight[..., :1])
        self.zero = torch.full_like(self.scale, 1 << bits - 1)
        self.error = weight.square().sum(-1, keepdim=True)

    def offer(self, scale: torch.Tensor, zero: Zero) -> None:
        """Take these scales where they are better; scales of 0 belong to groups of zeros."""
        usable = torch.where((scale != 0) & scale.isfinite(), scale, torch.ones_like(scale))
        low: Any = -zero
        codes = (self.weight / usable).round_().clamp_(low, low + self.top)
        error = (codes * usable - self.weight).square_().sum(-1, keepdim=True)
        better = error < self.error
        self.zero = torch.where(better, zero, self.zero)
        for mine, other in ((self.error, error), (self.codes, codes), (self.scale, usable)):
            torch.where(better, other, mine, out=mine)

    def fitted(self) -> torch.Tensor:
        """The least squares scales for the current codes."""
        norm = self.codes.square().sum(-1, keepdim=True).clamp_(min=1)
        return (self.codes * self.weight).sum(-1, keepdim=True) / norm


def _rounded(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, zeros: bool
) -> Rounded:
    wide = weight.unflatten(1, (-1, group))
    best = _Best(wide, bits)
    for scale, zero in candidates(wide, -1, bits, zeros):
        best.offer(scale.to(dtype).float(), zero)
    for _ in range(FITS):
        best.offer(best.fitted().to(dtype).float(), best.zero)
    return Rounded(
        codes=(best.codes + best.zero).to(torch.uint8).flatten(1),
        scale=best.scale.squeeze(-1).to(dtype),
        zero=best.zero.squeeze(-1).to(torch.uint8) if zeros else None,
    )

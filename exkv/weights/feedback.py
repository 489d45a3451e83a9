"""Round float weights to integers in groups with error feedback, for the inputs of a text.

Rounding W (out, in) to Q changes the outputs for inputs x by (W - Q) x, with the expected square
tr((W - Q) H (W - Q)^T) for the second moments H = E[x x^T]. With H = R R^T and R upper triangular
that is the sum of the squares of (W - Q) R, whose columns depend on no later column of Q. So
columns are rounded in order, each compensating for the errors of those before: GPTQ (Frantar et
al., 2022) in the form of LDLQ (Chee et al., 2023), which needs no inverse.

Scales are chosen for the same error, group by group: the best of the candidates of ``rounding``, or
its least squares fit to its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .rounding import Rounded, Zero, candidates

#: Share of the mean squared input that is added to every input's own, for directions that are rare
#: in the text; and how often it is increased tenfold at most, if float32 needs more.
DAMPING, _TRIES = 0.01, 4
#: Columns rounded between two matrix products, and rows rounded at a time.
_COLUMNS, _ROWS = 16, 4096


def rounded_for(
    moments: torch.Tensor,
    weight: torch.Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    zeros: bool = False,
) -> Rounded:
    """Round a matrix (out, in) of floats to ``bits`` bits, for inputs with these moments.

    Args:
        moments: E[x x^T], fp32 (in, in).
        group: inputs that share a scale; a divisor of their number.
        dtype: dtype of the scales.
        zeros: whether groups have zero points.

    Raises:
        ValueError: the moments are not finite, or not positive semidefinite.
    """
    return rounded_with_factor(cholesky_factor(moments), weight, bits, group, dtype, zeros)


def cholesky_factor(moments: torch.Tensor) -> torch.Tensor:
    """R of the moments, damped: upper triangular, R R^T = H. Errors as of :func:`rounded_for`."""
    if not torch.isfinite(moments).all():
        raise ValueError(
            "squares of the layer's inputs on the text are not finite: the model's own values "
            "overflow; leave the calibration out"
        )
    turned = moments.flip(0, 1)
    step = DAMPING * float(moments.diagonal().mean()) or 1.0
    for _ in range(_TRIES):
        turned.diagonal().add_(step)
        lower, failed = torch.linalg.cholesky_ex(turned)
        if not failed:
            return lower.flip(0, 1)
        step *= 10
    raise ValueError(
        "the inputs' second moments are not positive semidefinite: leave the calibration out"
    )


def compensated(
    root: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, floats: torch.Tensor
) -> torch.Tensor:
    """The matrix (out, in) whose outputs for inputs x (N, in) are nearest to those of ``weight``
    for the float model's inputs: damped least squares.

    Args:
        root: factor R of the moments of x.
        floats: (N, in), x in the model without rounding.
    """
    missing = ((floats - x) @ weight.T).T @ x / len(x)
    half = torch.linalg.solve_triangular(root.T, missing, upper=False, left=False)
    return torch.linalg.solve_triangular(root, half, upper=True, left=False).add_(weight)


def rounded_with_factor(
    root: torch.Tensor,
    weight: torch.Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    zeros: bool = False,
) -> Rounded:
    """:func:`rounded_for` by the factor R of the moments, which matrices of the same inputs
    share."""
    rows = weight.split(_ROWS)
    return Rounded.joined(_rows(root, each, bits, group, dtype, zeros) for each in rows)


def _rows(
    root: torch.Tensor,
    weight: torch.Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    with_zeros: bool,
) -> Rounded:
    """Round some rows. Inputs come first here, so that a column of the matrix is contiguous."""
    wide = weight.float().T.contiguous()
    errors = torch.empty_like(wide)
    codes, scales = torch.empty_like(wide, dtype=torch.uint8), []
    zeros: list[Any] = []
    for begin in range(0, len(wide), group):
        own = slice(begin, begin + group)
        carried = root[:begin, own].T @ errors[:begin]
        within = root[own, own]
        target = torch.linalg.solve_triangular(within.T, carried, upper=False).add_(wide[own])
        made = _group(target, within, bits, dtype, with_zeros)
        torch.sub(wide[own], made.codes * made.scale, out=errors[own])
        codes[own] = made.codes.add_(made.zero)
        scales.append(made.scale.to(dtype))
        zeros.append(made.zero)
    return Rounded(
        codes=codes.T.contiguous(),
        scale=torch.stack(scales, 1),
        zero=torch.stack(zeros, 1).to(torch.uint8) if with_zeros else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A rounded group: codes less zero points, fp32 (group, out); scale, zero and squared error,
    fp32 (out,)."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: Zero
    error: torch.Tensor


def _group(
    target: torch.Tensor, root: torch.Tensor, bits: int, dtype: torch.dtype, with_zeros: bool
) -> _Made:
    """Round the columns of a group.

    Args:
        target: (group, out), their weights, compensated for the groups before.
        root: the group's part of R.
    """
    scales, zeros = zip(*candidates(target, 0, bits, with_zeros), strict=True)
    scale, zero = torch.cat(scales).to(dtype).float(), torch.cat(zeros) if with_zeros else zeros[0]
    best = _least(_with_feedback(target, root, scale, zero, bits))
    made, goal = root.T @ best.codes, root.T @ target
    fitted = (made * goal).sum(0) / made.square().sum(0).clamp_(min=1e-30)
    fitted = fitted.to(dtype).float().unsqueeze(0)
    return _least(_both(best, _with_feedback(target, root, fitted, best.zero, bits)))


def _with_feedback(
    target: torch.Tensor, root: torch.Tensor, scale: torch.Tensor, zero: Zero, bits: int
) -> _Made:
    """All candidates (C, out) -> codes (group, C, out), scale, zero and error (C, out)."""
    scale = torch.where((scale != 0) & scale.isfinite(), scale, torch.ones_like(scale))
    low: Any = -zero
    high = low + (1 << bits) - 1
    unit, squares = root / root.diagonal(), root.diagonal().square()
    shape = (len(target), *scale.shape)
    codes, errors = (
        torch.empty(shape, device=target.device),
        torch.empty(shape, device=target.device),
    )
    lost = torch.zeros_like(scale)
    for first in range(0, len(target), _COLUMNS):
        last = min(first + _COLUMNS, len(target))
        wanted = unit[:first, first:last].T @ errors[:first].flatten(1)
        wanted = wanted.unflatten(1, scale.shape).add_(target[first:last].unsqueeze(1))
        for column in range(first, last):
            goal = wanted[column - first]
            if column > first:
                before = errors[first:column].flatten(1).T
                goal.view(-1).addmv_(before, unit[first:column, column])
            code = torch.div(goal, scale, out=codes[column]).round_().clamp_(low, high)
            lost.add_(goal.addcmul_(code, scale, value=-1).square_().mul_(squares[column]))
            torch.addcmul(target[column], code, scale, value=-1, out=errors[column])
    return _Made(codes=codes, scale=scale, zero=zero, error=lost)


def _least(found: _Made) -> _Made:
    """The candidate with the least error for each output."""
    best = found.error.argmin(0, keepdim=True)
    index = best.unsqueeze(0).expand(len(found.codes), -1, -1)
    zero = found.zero
    return _Made(
        codes=found.codes.gather(1, index).squeeze(1),
        scale=found.scale.gather(0, best).squeeze(0),
        zero=zero if isinstance(zero, int) else zero.gather(0, best).squeeze(0),
        error=found.error.gather(0, best).squeeze(0),
    )


def _both(best: _Made, other: _Made) -> _Made:
    """Join a result and other candidates."""
    zero = best.zero
    if isinstance(zero, torch.Tensor):
        zero = zero.expand(len(other.scale) + 1, -1)
    return _Made(
        codes=torch.cat([best.codes.unsqueeze(1), other.codes], 1),
        scale=torch.cat([best.scale.unsqueeze(0), other.scale]),
        zero=zero,
        error=torch.cat([best.error.unsqueeze(0), other.error]),
    )

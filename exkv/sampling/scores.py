"""Checks of scores, and choosing on their device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from exkv.errors import Attempt

T = TypeVar("T")


def check_choosable(
    scores: Tensor, what: str, *, going: Tensor | None = None, infinite: bool = False
) -> None:
    """:func:`check_largest` of scores (N, V)."""
    check_largest(scores.amax(-1).cpu(), what, going=going, infinite=infinite)


def check_largest(
    largest: Tensor, what: str, *, going: Tensor | None = None, infinite: bool = False
) -> None:
    """ValueError if a row of scores holds NaN, +inf, or nothing but -inf.

    Args:
        largest: maximum of each row (N,), on the host: NaN if the row has one.
        what: description of the scores.
        going: bool (N,), the rows to check; None for all.
        infinite: allow +inf.
    """
    fine = largest.isfinite() if not infinite else ~largest.isnan() & (largest > -math.inf)
    if going is not None:
        fine |= ~going
    if bool(fine.all()):
        return
    row = int((~fine).nonzero()[0])
    value = float(largest[row])
    if value == -math.inf:
        raise ValueError(
            f"row {row} of {what} is all -inf: no token is left to choose; allow more of them"
        )
    raise ValueError(
        f"row {row} of {what} holds {value}: the model's forward overflowed or its weights are "
        "broken (float16 overflows above 65504; bfloat16 or float32 may help)"
    )


def to_host(ids: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Copy token ids and float32 numbers of any shapes to the host, in one copy."""
    if ids.is_cpu:
        return ids, *numbers
    bits = [each.contiguous().view(torch.int32) for each in numbers]
    copied = torch.cat([part.flatten() for part in (ids.int(), *bits)]).cpu()
    first, *others = copied.split([part.numel() for part in (ids, *bits)])
    found = (x.view(torch.float32).view(n.shape) for x, n in zip(others, numbers, strict=True))
    return first.long().view(ids.shape), *found


def where_there_is_room(call: Callable[[Tensor], T], logits: Tensor) -> T:
    """Call with logits on their device, or on the host if the device is full: no plan promises room
    beside the logits."""
    if not logits.is_cpu:
        with Attempt():
            return call(logits)
    return call(logits.cpu())

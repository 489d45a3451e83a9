"""Scores that no token can be chosen by: refused, with what is wrong and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def check_choosable(
    scores: Tensor, what: str, *, going: Tensor | None = None, infinite: bool = False
) -> None:
    """ValueError where a row holds NaN, or nothing but -inf, or +inf.

    Args:
        scores: (N, V).
        what: the scores are, in words.
        going: bool (N,), the rows that count; None for all.
        infinite: whether +inf will do.
    """
    largest = scores.amax(-1).cpu()  # NaN if the row has one, -inf if it has nothing else
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


def where_there_is_room(call: Callable[[Tensor], T], logits: Tensor) -> T:
    """What the call makes of logits where they lie, or in host memory where their device is full:
    no plan promises room beside the logits."""
    try:
        return call(logits)
    except torch.OutOfMemoryError:
        if logits.is_cpu:
            raise
    return call(logits.cpu())

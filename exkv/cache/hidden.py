"""The model's last hidden states of a row's newest tokens, which an MTP head needs beside its keys
and values (``exkv.models.mtp``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exkv.batch import Lengths

if TYPE_CHECKING:
    from .rows import Rows

#: How many of a row's newest hidden states are kept: as many as a call verifies, since any of those
#: tokens may become the last one.
KEPT = 17


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states (N, hidden) of N tokens of a row, at positions from ``first`` on."""

    first: int
    states: Tensor

    def at(self, position: int) -> Tensor | None:
        """One token's hidden state (hidden,); None if unknown."""
        index = position - self.first
        return self.states[index] if 0 <= index < len(self.states) else None


def newest(hidden: Tensor, lengths: Lengths) -> Tensor:
    """The part of a call's hidden states to keep, (B, T, hidden) -> (B, at most ``KEPT``,
    hidden)."""
    if lengths.chunk <= KEPT:
        return hidden
    rows = torch.arange(len(lengths.new), device=hidden.device)
    starts = torch.tensor(_starts(lengths), device=hidden.device)
    return hidden[rows[:, None], starts[:, None] + torch.arange(KEPT, device=hidden.device)]


def keep(rows: Rows, kept: Tensor, lengths: Lengths) -> None:
    """Record a call's newest hidden states (B, N, hidden). A row without new tokens keeps a copy of
    its last one, which frees the memory of the earlier call."""
    each = zip(lengths.past, lengths.new, _starts(lengths), strict=True)
    for row, (past, new, start) in enumerate(each):
        if new:
            rows.hidden[row] = Hidden(past + start, kept[row, : new - start])
        elif (known := rows.hidden[row]) is not None and len(known.states) > 1:
            last = known.at(past - 1)
            rows.hidden[row] = None if last is None else Hidden(past - 1, last[None].clone())


def before(rows: Rows, past: Sequence[int], like: Tensor) -> Tensor:
    """Hidden state of each row's last token, (B, 1, hidden); zeros where unknown: before the first
    token, and after pages found in the prefix cache.

    Args:
        like: a tensor (..., hidden) of the device and dtype.
    """
    nothing = like.new_zeros(like.shape[-1])
    states = []
    for known, at in zip(rows.hidden, past, strict=False):
        state = None if known is None else known.at(at - 1)
        states.append(nothing if state is None else state)
    return torch.stack(states).unsqueeze(1)


def _starts(lengths: Lengths) -> list[int]:
    """Index of each row's first token that is kept."""
    return [max(new - KEPT, 0) for new in lengths.new]

"""What an MTP head needs of a row beside its keys and values: the model's last hidden states
of the newest tokens (``exkv.models.mtp``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exkv.batch import Lengths

if TYPE_CHECKING:
    from .rows import Rows

#: Newest tokens of a row whose hidden states are kept: as many as a call verifies, since any of
#: them may become the last one.
KEPT = 17


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states (N, hidden) of N tokens of a row, of which the first is at position
    ``first``."""

    first: int
    states: Tensor

    def at(self, position: int) -> Tensor | None:
        """That of one token (hidden,); None if it isn't known."""
        index = position - self.first
        return self.states[index] if 0 <= index < len(self.states) else None


def newest(hidden: Tensor, lengths: Lengths) -> Tensor:
    """The hidden states to keep of a call's, (B, T, hidden) -> (B, at most ``KEPT``, hidden)."""
    if lengths.chunk <= KEPT:
        return hidden
    rows = torch.arange(len(lengths.new), device=hidden.device)
    starts = torch.tensor(_starts(lengths), device=hidden.device)
    return hidden[rows[:, None], starts[:, None] + torch.arange(KEPT, device=hidden.device)]


def keep(rows: Rows, kept: Tensor, lengths: Lengths) -> None:
    """Record a call's newest hidden states (B, N, hidden). A row that brought no tokens keeps its
    last one, without the memory of the call that it comes from."""
    each = zip(lengths.past, lengths.new, _starts(lengths), strict=True)
    for row, (past, new, start) in enumerate(each):
        if new:
            rows.hidden[row] = Hidden(past + start, kept[row, : new - start])
        elif (known := rows.hidden[row]) is not None and len(known.states) > 1:
            last = known.at(past - 1)
            rows.hidden[row] = None if last is None else Hidden(past - 1, last[None].clone())


def before(rows: Rows, past: Sequence[int], like: Tensor) -> Tensor:
    """The hidden state of the token before each row's next one, (B, 1, hidden); zeros where it
    isn't known, before the first token and behind pages that were found.

    Args:
        like: of the device and dtype, (..., hidden).
    """
    nothing = like.new_zeros(like.shape[-1])
    states = []
    for known, at in zip(rows.hidden, past, strict=False):
        state = None if known is None else known.at(at - 1)
        states.append(nothing if state is None else state)
    return torch.stack(states).unsqueeze(1)


def _starts(lengths: Lengths) -> list[int]:
    """The first token of each row that is kept."""
    return [max(new - KEPT, 0) for new in lengths.new]

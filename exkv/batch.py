"""The rows of one forward call: lengths on the host, tensors on each device.

Rows may differ in their past and in their new tokens. Rows with fewer new tokens are padded on the
right in ``input_ids``; padding is never written to the cache, and no real token attends to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import torch

from .devices import move

#: The adapters of a call's rows: one for all, one (or None) for each, or None.
Chosen: TypeAlias = str | tuple[str | None, ...] | None


@dataclass(frozen=True, kw_only=True)  # no slots, for cached_property: every layer reads these
class Lengths:
    """Tokens per row: ``past`` in the cache, ``new`` in this chunk of the call, ``later`` in the
    following chunks of the same call; () for none. ``pages`` is the block table, int32 (B, P) on
    the host (``exkv.ops.pages``); None for contiguous rows. ``adapters`` are the rows' adapters
    (``exkv.models.adapters``). ``snapshot_at`` are the numbers of new tokens of each row after
    which a snapshot of recurrent states is taken, 0 for a row without; () for none."""

    past: tuple[int, ...]
    new: tuple[int, ...]
    later: tuple[int, ...] = ()
    pages: torch.Tensor | None = field(default=None, compare=False, repr=False)
    adapters: Chosen = None
    snapshot_at: tuple[int, ...] = ()

    @classmethod
    def uniform(cls, batch_size: int, past: int, new: int) -> Lengths:
        return cls(past=(past,) * batch_size, new=(new,) * batch_size)

    @cached_property
    def chunk(self) -> int:
        """T, the width of ``input_ids``."""
        return max(self.new)

    @cached_property
    def kv_len(self) -> int:
        """Keys of the longest row, including the new ones."""
        return max(past + new for past, new in zip(self.past, self.new, strict=True))

    @property
    def final(self) -> tuple[int, ...]:
        """Tokens of each row after the call."""
        later = self.later or (0,) * len(self.past)
        return tuple(map(sum, zip(self.past, self.new, later, strict=True)))

    def without(self, first: int) -> Lengths:
        """The lengths without the first ``first`` tokens of each row."""
        ends = [max(past + new - first, 0) for past, new in zip(self.past, self.new, strict=True)]
        past = tuple(max(past - first, 0) for past in self.past)
        new = tuple(end - begin for end, begin in zip(ends, past, strict=True))
        return Lengths(past=past, new=new, later=self.later)

    @cached_property
    def ragged(self) -> bool:
        """Whether rows differ in past or new tokens."""
        return len(set(self.past)) > 1 or len(set(self.new)) > 1


#: Rotary factors cos and sin, (B, T, R).
Factors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: int64 ``(row, token, position)`` of tokens in a call.
TokenIndex: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RotaryTables(Protocol):
    """Rotary factors on the host, by kind of layer."""

    def __call__(self, lengths: Lengths, dtype: torch.dtype) -> Mapping[str, Factors]:
        """Factors of each kind for the new tokens, rounded to the dtype."""

    def shift(self, name: str, by: torch.Tensor, lengths: Lengths) -> Factors:
        """Factors that rotate already rotated heads by ``by`` more positions, (B, T)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one forward call as tensors on one device: B rows, T tokens each.

    Attributes:
        lengths: the rows' lengths, on the host.
        past_lens: int32 (B,).
        rotary: kind of layer -> rotary factors cos, sin (B, T, R) in the model's dtype.
        write_index: int64 ``(row, token, position)`` of every real token; None unless ragged.
        last_index: int64 (B,), each row's last real token; None unless ragged.
        new_lens: int32 (B,), new tokens of each row; None unless ragged, or with snapshots.
        snapshot_at: int32 (B,), see :class:`Lengths`; None without snapshots.
        block_table: int32 (B, pages), or None for contiguous rows.
        tables: the source of ``rotary``.
        shifts: memo of :meth:`rotated_back`, on the host.
    """

    lengths: Lengths
    past_lens: torch.Tensor
    rotary: Mapping[str, Factors]
    write_index: TokenIndex | None
    last_index: torch.Tensor | None
    tables: RotaryTables
    new_lens: torch.Tensor | None = None
    snapshot_at: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    shifts: dict[tuple[str, int], Factors] = field(default_factory=dict)

    @classmethod
    def on(
        cls, device: torch.device, lengths: Lengths, rotary: RotaryTables, dtype: torch.dtype
    ) -> Batch:
        """Build the tensors on the host and copy them to the device, all rotary factors in one
        copy; equal lengths are filled in on the device, without a copy."""
        tables = _moved_together(rotary(lengths, dtype), device)
        write_index = last_index = new_lens = snapshot_at = None
        if lengths.snapshot_at:
            snapshot_at = move(torch.tensor(lengths.snapshot_at, dtype=torch.int32), device)
        if lengths.ragged or lengths.snapshot_at:
            new_lens = move(torch.tensor(lengths.new, dtype=torch.int32), device)
        if lengths.ragged:
            write_index = token_index(lengths, device)
            last_index = torch.tensor([max(new - 1, 0) for new in lengths.new]).to(device)
        return cls(
            lengths=lengths,
            past_lens=_past_lens(lengths, device),
            rotary=tables,
            write_index=write_index,
            last_index=last_index,
            tables=rotary,
            new_lens=new_lens,
            snapshot_at=snapshot_at,
            block_table=None if lengths.pages is None else move(lengths.pages, device),
        )

    def rotated_back(self, name: str, free: int) -> Factors:
        """Factors that rotate queries at positions beyond ``free`` back to it."""
        if (name, free) not in self.shifts:
            past = torch.tensor(self.lengths.past)
            beyond = past.unsqueeze(-1) + torch.arange(self.lengths.chunk) - free
            back = -beyond.clamp(min=0)
            self.shifts[name, free] = self.tables.shift(name, back, self.lengths)
        dtype, device = self.rotary[name][0].dtype, self.past_lens.device
        cos, sin = self.shifts[name, free]
        return cos.to(dtype).to(device), sin.to(dtype).to(device)

    def without(self, first: int) -> Batch:
        """The batch without the first ``first`` tokens of each row, for retentions, which only read
        its lengths."""
        return replace(
            self,
            lengths=self.lengths.without(first),
            past_lens=(self.past_lens - first).clamp(min=0),
            write_index=None,
            last_index=None,
        )

    def each_token(self, x: torch.Tensor) -> torch.Tensor:
        """All real tokens in row order: x (B, T, N) -> (tokens, 1, N)."""
        row, token, _ = token_index(self.lengths, x.device)
        return x[row, token].unsqueeze(1)

    def last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Each row's last real token: x (B, T, N) -> (B, 1, N)."""
        if self.lengths.chunk == 1:
            return x
        if self.last_index is None:
            return x[:, -1:]
        rows = torch.arange(x.shape[0], device=x.device)
        return x[rows, self.last_index].unsqueeze(1)


def _past_lens(lengths: Lengths, device: torch.device) -> torch.Tensor:
    """Past lengths, int32 (B,)."""
    past = lengths.past
    if len(set(past)) == 1:
        return torch.full((len(past),), past[0], dtype=torch.int32, device=device)
    return move(torch.tensor(past, dtype=torch.int32), device)


def _moved_together(tables: Mapping[str, Factors], device: torch.device) -> Mapping[str, Factors]:
    """Copy the factors of all kinds to the device in one copy; R may differ between kinds."""
    if device.type == "cpu":
        return tables
    factors = [factor for pair in tables.values() for factor in pair]
    there = move(torch.cat([factor.flatten() for factor in factors]), device)
    parts = there.split([factor.numel() for factor in factors])
    moved = [part.view(like.shape) for part, like in zip(parts, factors, strict=True)]
    return {name: (moved[2 * i], moved[2 * i + 1]) for i, name in enumerate(tables)}


def pad_rows(
    rows: Sequence[Sequence[int]], *, fill: int = 0, left: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """Pad rows of token ids into one tensor -> int64 (B, T), and the rows' lengths.

    Args:
        fill: the padding id.
        left: pad on the left, as transformers does; :meth:`Model.forward` takes right padding.
    """
    lengths = [len(row) for row in rows]
    width = max(lengths)
    gaps = [[fill] * (width - length) for length in lengths]
    pairs = zip(rows, gaps, strict=True)
    ids = torch.tensor([[*gap, *row] if left else [*row, *gap] for row, gap in pairs])
    return ids.view(len(rows), width).long(), lengths


def real_tokens(lengths: Lengths) -> torch.Tensor:
    """``(row, token, position)`` of every real token: int64 (3, N)."""
    new = np.array(lengths.new)
    row = np.arange(len(new)).repeat(new)
    token = np.arange(len(row)) - (new.cumsum() - new).repeat(new)
    position = token + np.array(lengths.past).repeat(new)
    return torch.tensor(np.stack((row, token, position)))


def token_index(lengths: Lengths, device: torch.device) -> TokenIndex:
    """:func:`real_tokens` as three tensors on the device."""
    row, token, position = real_tokens(lengths).to(device).unbind()
    return row, token, position

"""Which tokens a layer keeps and where they lie: all of them, or the last ones in a ring.

A retention stores a chunk's keys and values (as the layer encoded them) and answers with a view:
what attention is to read, as the ops of ``exkv.ops.attention`` take it. It knows nothing of how
values are encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from exkv.batch import Batch, Lengths

#: Name -> (B, S, ...): stored tensors, or a chunk's values to be stored.
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What attention reads: the first ``past_lens[b]`` tokens of a row come before the queries'
    own; the other fields as the ops take them."""

    stored: Tensors
    past_lens: torch.Tensor
    kv_len: int
    ragged: bool
    window: int


class Retention(Protocol):
    """A value: two layers with equal ones keep alike."""

    def capacity(self, max_seq_len: int) -> int:
        """Tokens of a row that there must be room for."""

    def slots(self, first: int, last: int) -> slice:
        """Where the tokens at positions ``first`` to ``last - 1`` of a row lie, at most."""

    def lost(self, length: int, kept: int) -> bool:
        """Whether a row that had ``length`` tokens lacks some that the one after its first
        ``kept`` would see."""

    def store(self, storage: Tensors, new: Tensors, batch: Batch, window: int) -> View:
        """Keep new (B, T, ...) values, and show what the queries of these tokens see.

        Args:
            window: of the layer's attention; 0 for none.
        """


@dataclass(frozen=True, slots=True)
class KeepAll:
    """A token at position p lies at p."""

    def capacity(self, max_seq_len: int) -> int:
        return max_seq_len

    def slots(self, first: int, last: int) -> slice:
        return slice(first, last)

    def lost(self, length: int, kept: int) -> bool:
        return False

    def store(self, storage: Tensors, new: Tensors, batch: Batch, window: int) -> View:
        for name, value in new.items():
            if batch.write_index is None:
                first = batch.lengths.past[0]
                storage[name][: value.shape[0], first : first + value.shape[1]] = value
            else:
                row, token, position = batch.write_index
                storage[name][row, position] = value[row, token]
        rows = len(batch.lengths.past)
        return View(
            stored={name: tensor[:rows] for name, tensor in storage.items()},
            past_lens=batch.past_lens,
            kv_len=batch.lengths.kv_len,
            ragged=batch.lengths.ragged,
            window=window,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """The last ``size`` tokens, in a ring: a token at position p lies at p modulo size.

    A single token takes the place of the one that has just left its window, so that the ring is
    what it sees, and the order of keys makes no difference. The queries of a longer chunk see
    tokens that the chunk's own will overwrite: these are laid out in order before the chunk, for
    this one call, and what is left of the chunk is kept afterwards.
    """

    size: int

    def capacity(self, max_seq_len: int) -> int:
        return min(self.size, max_seq_len)

    def slots(self, first: int, last: int) -> slice:
        return slice(first, last) if last <= self.size else slice(0, self.size)

    def lost(self, length: int, kept: int) -> bool:
        first_seen = max(kept - (self.size - 1), 0)
        return first_seen < kept and first_seen + self.size < length

    def store(self, storage: Tensors, new: Tensors, batch: Batch, window: int) -> View:
        if batch.lengths.chunk == 1:
            self._keep(storage, new, batch)
            return self._ring(storage, batch)
        view = self._in_order(storage, new, batch)
        self._keep(storage, new, batch)
        return view

    def _keep(self, storage: Tensors, new: Tensors, batch: Batch) -> None:
        """Write what is left of the chunk once all of it is in the past."""
        if batch.lengths.chunk > 1:
            row, token, slot = _tail_index(batch.lengths, self.size, batch.past_lens.device)
        elif batch.write_index is not None:
            row, token, position = batch.write_index
            slot = position % self.size
        else:  # one token a row, all at the same place: nothing to look up
            at = batch.lengths.past[0] % self.size
            for name, value in new.items():
                storage[name][: value.shape[0], at : at + 1] = value
            return
        for name, value in new.items():
            storage[name][row, slot] = value[row, token]

    def _ring(self, storage: Tensors, batch: Batch) -> View:
        lengths = batch.lengths
        return View(
            stored={name: tensor[: len(lengths.past)] for name, tensor in storage.items()},
            past_lens=batch.past_lens.clamp(max=self.size - 1),
            kv_len=min(lengths.kv_len, self.size),
            ragged=lengths.ragged,
            window=0,
        )

    def _in_order(self, storage: Tensors, new: Tensors, batch: Batch) -> View:
        lengths = batch.lengths
        before = tuple(min(past, self.size - 1) for past in lengths.past)
        if any(before):
            new = self._behind_the_ring(storage, new, before, batch)
        shown = Lengths(past=before, new=lengths.new)
        return View(
            stored=new,
            past_lens=batch.past_lens.clamp(max=self.size - 1),
            kv_len=shown.kv_len,
            ragged=shown.ragged,
            window=self.size,
        )

    def _behind_the_ring(
        self, storage: Tensors, new: Tensors, before: tuple[int, ...], batch: Batch
    ) -> Tensors:
        """The chunk's values behind the last ``before`` tokens of each row, in order."""
        device = batch.past_lens.device
        row = torch.arange(len(before)).unsqueeze(-1).to(device)
        index = _order_index(batch.lengths, before, self.size).to(device)
        return {
            name: torch.cat((storage[name][: len(before)], value), dim=1)[row, index]
            for name, value in new.items()
        }


def _tail_index(
    lengths: Lengths, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, token, slot) of the last tokens that each row brings: int64 (N,) each."""
    columns = []
    for row, (past, new) in enumerate(zip(lengths.past, lengths.new, strict=True)):
        token = torch.arange(max(new - size, 0), new)
        columns.append(torch.stack((torch.full(token.shape, row), token, (token + past) % size)))
    return torch.cat(columns, dim=1).to(device).unbind()


def _order_index(lengths: Lengths, before: tuple[int, ...], size: int) -> torch.Tensor:
    """Where the ring's tokens lie in order of position, then the chunk's behind the ring: int64
    (B, M + T), rows that are shorter filled up with whatever lies last."""
    width, rows = max(b + lengths.chunk for b in before), []
    for past, held in zip(lengths.past, before, strict=True):
        ring = torch.arange(past - held, past) % size
        chunk = size + torch.arange(width - held).clamp(max=lengths.chunk - 1)
        rows.append(torch.cat((ring, chunk)))
    return torch.stack(rows)

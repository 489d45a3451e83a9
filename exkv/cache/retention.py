"""Retention: which tokens a layer keeps, and where they are stored. One of the four properties of a
cache.

All tokens; the last ones in a ring; or attention sinks, and a ring of the last ones. A retention
stores a chunk's keys and values, as the storage encoded them, and returns a view of what the
chunk's queries see (``views.py``). It knows nothing of encodings or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths, TokenIndex, token_index
from exkv.ops.attention import AttentionParams

from .checks import whole_type
from .views import ContiguousView, Segment, SegmentedView, Tensors, View


def _rows(stored: Tensors, count: int) -> Tensors:
    """The first ``count`` rows; skips slicing if there are no others, which is cheaper."""
    if all(tensor.shape[0] == count for tensor in stored.values()):
        return stored
    return {name: tensor[:count] for name, tensor in stored.items()}


class Retention(Protocol):
    """A value: layers with equal retentions keep the same tokens."""

    @property
    def sinks(self) -> int:
        """How many first tokens are never evicted."""

    @property
    def size(self) -> int:
        """How many of the last others are kept; 0 for all."""

    def capacity(self, max_seq_len: int) -> int:
        """Tokens to have room for, in a row of up to ``max_seq_len``."""

    def slots(self, first: int, last: int) -> slice:
        """Slots that may hold the tokens at positions ``first`` to ``last - 1``."""

    def place(self, positions: Tensor) -> Tensor:
        """Slot of each position."""

    def lost(self, length: int, kept: int) -> bool:
        """Whether a row of ``length`` tokens has overwritten some that the next token would see
        once it is truncated to ``kept``."""

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths, batch: Batch | None) -> None:
        """Store new values (B, T, ...) on their device; ``batch`` if the call's batch is on this
        device."""

    def store(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        """Store new values, and return what the queries of these tokens see."""

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        """The view of :meth:`store`, without overwriting what a repeated call needs."""


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep all tokens: position p is in slot p."""

    sinks: ClassVar[int] = 0
    size: ClassVar[int] = 0

    def __str__(self) -> str:
        return "of all tokens"

    def capacity(self, max_seq_len: int) -> int:
        return max_seq_len

    def slots(self, first: int, last: int) -> slice:
        return slice(first, last)

    def place(self, positions: Tensor) -> Tensor:
        return positions

    def lost(self, length: int, kept: int) -> bool:
        return False

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths, batch: Batch | None) -> None:
        if lengths.ragged:
            row, token, position = _index(new, lengths, batch)
            for name, value in new.items():
                stored[name][row, position] = value[row, token]
            return
        first = lengths.past[0]
        for name, value in new.items():
            stored[name][: value.shape[0], first : first + value.shape[1]] = value

    def store(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        self.write(stored, new, batch.lengths, batch)
        return ContiguousView(
            stored=_rows(stored, len(batch.lengths.past)),
            past_lens=batch.past_lens,
            kv_len=batch.lengths.kv_len,
            ragged=batch.lengths.ragged,
            window=params.window,
        )

    show = store


@dataclass(frozen=True, slots=True)
class Window:
    """Keep the last ``size`` tokens in a ring: position p is in slot p modulo ``size``.

    A single token overwrites the one that has just left its window, so that it sees the whole ring,
    and the order of keys makes no difference. The queries of a longer chunk see tokens that the
    chunk itself will overwrite: these are laid out in order before the chunk, for this one call,
    and the last ``size`` tokens are stored afterwards.

    Raises:
        ValueError: ``size`` is below 1.
    """

    size: int
    sinks: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if whole_type("a window's size", self.size) < 1:
            raise ValueError(f"a window of {self.size} tokens: it must be at least 1")

    def __str__(self) -> str:
        return f"of the last {self.size} tokens"

    def capacity(self, max_seq_len: int) -> int:
        return min(self.size, max_seq_len)

    def slots(self, first: int, last: int) -> slice:
        return slice(first, last) if last <= self.size else slice(0, self.size)

    def place(self, positions: Tensor) -> Tensor:
        return positions % self.size

    def lost(self, length: int, kept: int) -> bool:
        first_seen = max(kept - (self.size - 1), 0)
        return first_seen < kept and first_seen + self.size < length

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths, batch: Batch | None) -> None:
        """Store the chunk's tokens that are still in the window after it."""
        if lengths.chunk == 1 and not lengths.ragged:  # one slot for all rows: no index needed
            at = lengths.past[0] % self.size
            for name, value in new.items():
                stored[name][: value.shape[0], at : at + 1] = value
            return
        if lengths.chunk == 1:
            row, token, position = _index(new, lengths, batch)
        else:
            device = next(iter(new.values())).device
            row, token, position = self._last_tokens(lengths).to(device).unbind()
        for name, value in new.items():
            stored[name][row, position % self.size] = value[row, token]

    def _last_tokens(self, lengths: Lengths) -> Tensor:
        """``(row, token, position)`` of the last ``size`` tokens that each row brings: int64 (3,
        N)."""
        columns = []
        for row, (past, new) in enumerate(zip(lengths.past, lengths.new, strict=True)):
            token = torch.arange(max(new - self.size, 0), new)
            columns.append(torch.stack((torch.full_like(token, row), token, token + past)))
        return torch.cat(columns, dim=1)

    def store(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        if batch.lengths.chunk == 1 and not params.chunk:
            self.write(stored, new, batch.lengths, batch)
            return self.ring(stored, batch)
        view = self.in_order(stored, new, batch)
        self.write(stored, new, batch.lengths, batch)
        return view

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        if batch.lengths.chunk == 1 and not params.chunk:
            return self.store(stored, new, batch, params)  # overwrites only what nobody sees
        return self.in_order(stored, new, batch)

    def ring(self, stored: Tensors, batch: Batch) -> ContiguousView:
        """View of the ring for one token a row, already stored."""
        lengths = batch.lengths
        return ContiguousView(
            stored=_rows(stored, len(lengths.past)),
            past_lens=batch.past_lens.clamp(max=self.size - 1),
            kv_len=min(lengths.kv_len, self.size),
            ragged=lengths.ragged,
            window=0,
        )

    def in_order(self, stored: Tensors, new: Tensors, batch: Batch) -> ContiguousView:
        """View for a chunk that is not stored yet."""
        lengths = batch.lengths
        before = tuple(min(past, self.size - 1) for past in lengths.past)
        shown = Lengths(past=before, new=lengths.new)
        return ContiguousView(
            stored=self.behind_the_ring(stored, new, lengths, before),
            past_lens=batch.past_lens.clamp(max=self.size - 1),
            kv_len=shown.kv_len,
            ragged=shown.ragged,
            window=self.size,
        )

    def behind_the_ring(
        self, stored: Tensors, new: Tensors, lengths: Lengths, before: tuple[int, ...]
    ) -> Tensors:
        """The chunk's values after the last ``before`` tokens of each row, in order."""
        if not any(before):
            return new
        device = next(iter(new.values())).device
        row = torch.arange(len(before)).unsqueeze(-1).to(device)
        index = self._order_index(lengths, before).to(device)
        kept = min(self.size, max(lengths.past))  # the ring may not have grown further
        return {
            name: torch.cat((stored[name][: len(before), :kept], value), dim=1)[row, index]
            for name, value in new.items()
        }

    def _order_index(self, lengths: Lengths, before: tuple[int, ...]) -> Tensor:
        """Index of the ring's last tokens in order of position, then of the chunk after the ring:
        int64 (B, M + T); shorter rows are padded arbitrarily."""
        kept = min(self.size, max(lengths.past))
        width, rows = max(b + lengths.chunk for b in before), []
        for past, count in zip(lengths.past, before, strict=True):
            ring = torch.arange(past - count, past) % self.size
            chunk = kept + torch.arange(width - count).clamp(max=lengths.chunk - 1)
            rows.append(torch.cat((ring, chunk)))
        return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Sinks:
    """Keep the first ``sinks`` tokens of a row, and a window of the last ``size`` others.

    Attention sinks are StreamingLLM's (Xiao et al., 2023); positions are those within the cache.
    Within the window that makes no difference, since rotary positions encode distances only; but
    the sinks stay right before the window, however many tokens were evicted. So queries are rotated
    back by that distance for the sinks' keys, and stored keys never change.

    Raises:
        ValueError: no sinks, or no window.
    """

    size: int
    sinks: int

    def __post_init__(self) -> None:
        if whole_type("a window's size", self.size) < 1 or whole_type("sinks", self.sinks) < 1:
            raise ValueError(
                f"{self.sinks} sinks and a window of {self.size} tokens after them: there must be "
                "at least one of each"
            )

    def __str__(self) -> str:
        return f"of the first {self.sinks} tokens and the last {self.size}"

    @property
    def window(self) -> Window:
        """Retention of the other tokens, whose positions count from 0 there."""
        return Window(self.size)

    def capacity(self, max_seq_len: int) -> int:
        return min(self.sinks + self.size, max_seq_len)

    def slots(self, first: int, last: int) -> slice:
        kept = self.sinks + self.size
        return slice(first, last) if last <= kept else slice(0, kept)

    def place(self, positions: Tensor) -> Tensor:
        behind = self.sinks + (positions - self.sinks) % self.size
        return torch.where(positions < self.sinks, positions, behind)

    def lost(self, length: int, kept: int) -> bool:
        return kept > self.sinks and self.window.lost(length - self.sinks, kept - self.sinks)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths, batch: Batch | None) -> None:
        self.write_sinks(stored, new, lengths)
        others = lengths.without(self.sinks)
        if others.chunk:
            self.window.write(self._ring(stored), self.others(new, lengths), others, None)

    def write_sinks(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        """Store those of the new tokens that are sinks."""
        if min(lengths.past) < self.sinks:
            row, token, position = _index(new, self._of_sinks(lengths))
            for name, value in new.items():
                stored[name][row, position] = value[row, token]

    def _of_sinks(self, lengths: Lengths) -> Lengths:
        """Lengths of those new tokens that are sinks; computed on the host, since counting a mask
        would wait for the device."""
        room = (max(self.sinks - past, 0) for past in lengths.past)
        return Lengths(past=lengths.past, new=tuple(map(min, lengths.new, room)))

    def _ring(self, stored: Tensors) -> Tensors:
        return {name: tensor[:, self.sinks :] for name, tensor in stored.items()}

    def others(self, new: Tensors, lengths: Lengths) -> Tensors:
        """The chunk without its sinks: rows begin with their first other token."""
        others = lengths.without(self.sinks)
        if others.new == lengths.new:
            return new
        device = next(iter(new.values())).device
        skipped = [n - other for n, other in zip(lengths.new, others.new, strict=True)]
        token = torch.tensor(skipped).unsqueeze(-1) + torch.arange(others.chunk)
        token = token.clamp(max=lengths.chunk - 1).to(device)
        row = torch.arange(len(skipped)).unsqueeze(-1).to(device)
        return {name: value[row, token] for name, value in new.items()}

    def store(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        return self._seen(stored, new, batch, params, self.write)

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        one = batch.lengths.chunk == 1 and not params.chunk
        write = self.write if one else self._write_sinks_only
        return self._seen(stored, new, batch, params, write)

    def _write_sinks_only(
        self, stored: Tensors, new: Tensors, lengths: Lengths, batch: Batch | None
    ) -> None:
        self.write_sinks(stored, new, lengths)

    def _seen(
        self,
        stored: Tensors,
        new: Tensors,
        batch: Batch,
        params: AttentionParams,
        write: Callable[[Tensors, Tensors, Lengths, Batch | None], None],
    ) -> View:
        """What the queries see, once ``write`` has stored the new values."""
        lengths, ring = batch.lengths, self._ring(stored)
        if lengths.kv_len <= self.sinks + self.size:  # nothing was evicted
            return KeepAll().store(stored, new, batch, replace(params, window=0))
        others = batch.without(self.sinks)
        if lengths.chunk == 1 and not params.chunk:
            write(stored, new, lengths, batch)
            view = self.window.ring(ring, others)
        else:
            view = self.window.in_order(ring, self.others(new, lengths), others)
            write(stored, new, lengths, batch)
        segments = self.sink_segment(stored, batch, params), self._window(view, others)
        return SegmentedView(past_lens=batch.past_lens, segments=segments)

    def sink_segment(self, stored: Tensors, batch: Batch, params: AttentionParams) -> Segment:
        """The sinks, in the first slots."""
        rows = len(batch.lengths.past)
        kv_len = min(batch.lengths.kv_len, self.sinks)
        return Segment(
            stored={name: tensor[:rows, :kv_len] for name, tensor in stored.items()},
            start=torch.zeros_like(batch.past_lens),
            count=torch.zeros_like(batch.past_lens) + kv_len,
            kv_len=kv_len,
            rotary=batch.rotated_back(params.rotary, self.sinks + self.size - 1),
        )

    def _window(self, view: ContiguousView, others: Batch) -> Segment:
        """The window's keys; in a ring their order makes no difference."""
        return Segment(
            stored=view.stored,
            start=others.past_lens - view.past_lens + self.sinks,
            count=view.past_lens + max(others.lengths.chunk, 1),
            kv_len=view.kv_len,
            window=view.window,
        )


def _index(new: Tensors, lengths: Lengths, batch: Batch | None = None) -> TokenIndex:
    """``(row, token, position)`` of every real token of the new values."""
    if batch is not None and batch.write_index is not None:
        return batch.write_index
    return token_index(lengths, next(iter(new.values())).device)

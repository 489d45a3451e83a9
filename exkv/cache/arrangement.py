"""Which tensors a layer keeps and where a token lies in each: one store, or two tiers.

Everyone who cuts a layer's tensors (rows that move, files, copies to a device, conversions) asks
here which entries of a tensor hold which positions: not every tensor has one entry a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from exkv.batch import Batch, Lengths
from exkv.ops.attention import AttentionParams

from .retention import Part, Parts, Retention, Tensors, Whole, Window
from .storage import GROUP, Layout, Storage

_RECENT = "recent_"
_FLOAT = Storage()
_FLOATS = _FLOAT.formats


class Arrangement(Protocol):
    """A value: two layers with equal ones are arranged alike."""

    @property
    def group(self) -> int:
        """Tokens of a row that are encoded together."""

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of each tensor for rows of so many tokens, (B, S, H_kv, D)."""

    def slots(self, name: str, first: int, last: int) -> slice:
        """Which entries of a tensor's second dimension hold the tokens at positions ``first`` to
        ``last - 1``, at most."""

    def stays(self, longest: int) -> bool:
        """Whether what is stored of a token stays as it is while rows grow to this length."""

    def in_place(self, common: int, written: int, new: int) -> int:
        """How many of the first ``common`` tokens, which two rows have in common, can stay where
        they are when one row becomes like another of ``new`` tokens; the :meth:`slots` of what
        comes after are copied.

        Args:
            written: the most tokens that either row has had.
        """

    def lost(self, length: int, kept: int) -> bool:
        """As :meth:`Retention.lost`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> dict:
        """k, v (B, T, H_kv, D) as far as they can be encoded before it is known what is stored."""

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, Whole | Parts]:
        """Keep what was encoded: all that was written, for :meth:`write`, and what the queries of
        these tokens see."""

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        """Write the same once more, elsewhere."""

    def read(
        self, stored: Tensors, part: slice, dtype: torch.dtype, head_dim: int, lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v of these slots, which are positions where all tokens are kept; rows have ``lens``
        tokens. Both ends are multiples of :data:`GROUP`, or the end."""

    def put(
        self,
        stored: Tensors,
        part: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        dtype: torch.dtype,
        lens: Sequence[int],
    ) -> None:
        """The inverse of :meth:`read`."""


@dataclass(frozen=True, slots=True)
class OneStore:
    """All that the retention keeps, in one storage."""

    storage: Storage
    retention: Retention

    @property
    def group(self) -> int:
        return 1

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return self.storage.layout(shape, dtype)

    def slots(self, name: str, first: int, last: int) -> slice:
        return self.retention.slots(first, last)

    def stays(self, longest: int) -> bool:
        return self.retention.slots(0, longest).stop == longest

    def in_place(self, common: int, written: int, new: int) -> int:
        return common if self.stays(written) else 0

    def lost(self, length: int, kept: int) -> bool:
        return self.retention.lost(length, kept)

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> dict:
        return self.storage.encode(k, v, dtype)

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, Whole | Parts]:
        return new, self.retention.store(stored, new, batch, params)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.retention.write(stored, new, lengths, None)

    def read(
        self, stored: Tensors, part: slice, dtype: torch.dtype, head_dim: int, lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = {name: tensor[:, part] for name, tensor in stored.items()}
        return self.storage.decode(held, dtype, head_dim)

    def put(
        self,
        stored: Tensors,
        part: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        dtype: torch.dtype,
        lens: Sequence[int],
    ) -> None:
        for name, value in self.storage.encode(k, v, dtype).items():
            stored[name][:, part] = value.to(stored[name].device)


@dataclass(frozen=True, slots=True)
class TwoTiers:
    """The last ``storage.recent`` tokens as floats in a ring, everything older in the storage's
    formats: KIVI's arrangement (Liu et al., 2024).

    The rule goes by token, so that it does not matter how a text is cut into calls: a query sees
    the last ``recent`` tokens, its own included, in full precision, and all others as the formats
    keep them. A group of 32 positions is encoded when its last token comes, from the floats that
    are all still there; that is at least as early as any query needs it, since ``recent`` is 32 or
    more. So most steps of decoding encode nothing.
    """

    storage: Storage

    @property
    def window(self) -> Window:
        return Window(self.storage.recent)

    @property
    def group(self) -> int:
        return GROUP

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        rows, tokens, *rest = shape
        recent = _FLOAT.layout((rows, self.window.capacity(tokens), *rest), dtype)
        old = self.storage.layout((rows, _complete(tokens), *rest), dtype)
        return {_RECENT + name: tensor for name, tensor in recent.items()} | old

    def slots(self, name: str, first: int, last: int) -> slice:
        if name.startswith(_RECENT):
            return self.window.slots(first, last)
        tokens = self.storage.tokens_an_entry(name)
        return slice(_complete(first) // tokens, _complete(last) // tokens)

    def stays(self, longest: int) -> bool:
        return False

    def in_place(self, common: int, written: int, new: int) -> int:
        size = self.storage.recent
        if written <= size:
            return common
        # Groups stay. A ring that was overwritten is copied whole: that takes one token at least
        # beyond its size, or all tokens up to that.
        return max(common - 1, 0) if new > size else 0

    def lost(self, length: int, kept: int) -> bool:
        return self.window.lost(length, kept)

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> dict:
        k, v = self.storage.turned(k, v)
        return {_RECENT + "k": k.to(dtype), _RECENT + "v": v.to(dtype)}

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, Whole | Parts]:
        ring, floats, size = _recent(stored), _recent(new), self.storage.recent
        if batch.lengths.chunk == 1 and not 0 < params.window < size:
            self.window.write(ring, floats, batch.lengths, batch)
            shown = self.window.ring(ring, batch)
            places = self._in_ring(batch.lengths)
        else:
            shown = self.window.in_order(ring, floats, batch)
            shown = replace(shown, window=min(size, params.window or size))
            self.window.write(ring, floats, batch.lengths, batch)
            places = self._in_order(batch.lengths)
        groups = self._encoded(shown, places)
        self._write_groups(stored, groups, batch.lengths)
        return {**new, **groups}, self._shown(stored, shown, batch, params)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.window.write(_recent(stored), _recent(new), lengths, None)
        self._write_groups(stored, _old(new), lengths)

    # Groups -------------------------------------------------------------------------------

    def _in_ring(self, lengths: Lengths) -> Iterator[torch.Tensor]:
        """Each row's places in the ring of the groups that are complete now, int64 (N,); N is what
        the row with most of them has."""
        steps = _steps(lengths)
        for past in lengths.past:
            yield (_complete(past) + steps) % self.storage.recent

    def _in_order(self, lengths: Lengths) -> Iterator[torch.Tensor]:
        """The same where floats lie in order, as :meth:`Window.in_order` lays them out."""
        steps = _steps(lengths)
        for past in lengths.past:
            first = max(past - (self.storage.recent - 1), 0)
            yield _complete(past) - first + steps

    def _encoded(self, shown: Whole, places: Iterator[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The groups at these places, (B, N, ...) as they are stored; rows that have fewer are
        filled up with anything, so that memory depends on no row's length."""
        k, v, index = shown.stored["k"], shown.stored["v"], torch.stack(list(places))
        if not index.numel():
            return {}
        index = index.clamp(max=k.shape[1] - 1).to(k.device)
        row = torch.arange(len(index)).unsqueeze(-1).to(k.device)
        return self.storage.pack(k[row, index], v[row, index])

    def _write_groups(self, stored: Tensors, groups: Tensors, lengths: Lengths) -> None:
        spans = list(zip(lengths.past, lengths.new, strict=True))
        rows = [slice(row, row + 1) for row in range(len(spans))]
        if not lengths.ragged:
            rows, spans = [slice(len(rows))], spans[:1]
        for name, value in groups.items():
            for row, (past, new) in zip(rows, spans, strict=True):
                held = self.slots(name, past, past + new)
                stored[name][row, held] = value[row, : held.stop - held.start]

    # What queries see ---------------------------------------------------------------------

    def _shown(
        self, stored: Tensors, ring: Whole, batch: Batch, params: AttentionParams
    ) -> Whole | Parts:
        size, window = self.storage.recent, params.window
        older = max(batch.lengths.kv_len - size, 0)
        ring = replace(ring, formats=_FLOATS)
        if not older or 0 < window <= size:
            return ring
        (part,) = ring.as_parts().parts
        recent = replace(part, start=batch.past_lens - ring.past_lens)
        rows, start = len(batch.lengths.past), torch.zeros_like(batch.past_lens)
        old = Part(
            stored={name: tensor[:rows] for name, tensor in _old(stored).items()},
            start=start,
            count=start + older,
            kv_len=older,
            window=window and window - size,
            behind=size,
        )
        return Parts(past_lens=batch.past_lens, parts=(old, recent))

    # Conversion ---------------------------------------------------------------------------

    def read(
        self, stored: Tensors, part: slice, dtype: torch.dtype, head_dim: int, lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring = _recent(stored)
        held = {
            name: tensor[:, self.slots(name, part.start, part.stop)]
            for name, tensor in _old(stored).items()
        }
        pair = []
        for name, old in zip("kv", self.storage.widen(held, dtype, head_dim), strict=True):
            missing = part.stop - part.start - old.shape[1]
            x = torch.nn.functional.pad(old, (0, 0, 0, 0, 0, missing))
            for row, positions in self._recent_positions(part, lens):
                x[row, positions - part.start] = ring[name][row, positions % len(ring[name][row])]
            pair.append(x)
        return self.storage.turned(*pair)

    def put(
        self,
        stored: Tensors,
        part: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        dtype: torch.dtype,
        lens: Sequence[int],
    ) -> None:
        k, v = (x.to(dtype) for x in self.storage.turned(k, v))
        whole = _complete(part.stop) - part.start
        if whole:
            for name, value in self.storage.pack(k[:, :whole], v[:, :whole]).items():
                stored[name][:, self.slots(name, part.start, part.stop)] = value.to(
                    stored[name].device
                )
        for name, x in (("k", k), ("v", v)):
            ring = _recent(stored)[name]
            for row, positions in self._recent_positions(part, lens):
                ring[row, positions % len(ring[row])] = x[row, positions - part.start].to(
                    ring.device
                )

    def _recent_positions(
        self, part: slice, lens: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Which of these positions each row's ring holds, for rows where it holds any."""
        for row, length in enumerate(lens):
            first = max(length - self.storage.recent, part.start)
            if first < (last := min(length, part.stop)):
                yield row, torch.arange(first, last)


def _complete(tokens: int) -> int:
    """How many of the first tokens lie in complete groups."""
    return tokens // GROUP * GROUP


def _steps(lengths: Lengths) -> torch.Tensor:
    ends = zip(lengths.past, lengths.new, strict=True)
    return torch.arange(max(_complete(past + new) - _complete(past) for past, new in ends))


def _recent(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The ring's tensors by the names that floats have."""
    return {
        name.removeprefix(_RECENT): tensor
        for name, tensor in tensors.items()
        if name.startswith(_RECENT)
    }


def _old(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_RECENT)}

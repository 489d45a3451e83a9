"""Two tiers: recent tokens as floats, older ones quantized, as in KIVI (Liu et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.ops.attention import AttentionParams

from .retention import KeepAll, Sinks, Window
from .spans import TokenSpan, put_at
from .storage import GROUP, Layout, Shape, Storage
from .views import ContiguousView, Segment, SegmentedView, Tensors, View

_RECENT, _FIRST = "recent_", "first_"
_FLOATS = Storage().formats


class _Tiered:
    """Tiers of which the recent tokens are in a ring; :meth:`store` and :meth:`show` by
    :meth:`_seen`."""

    __slots__ = ()
    group: ClassVar[int] = GROUP

    def stays(self, longest: int) -> bool:
        return False

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        return self._seen(stored, new, batch, params, keep=True)

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        return self._seen(stored, new, batch, params, keep=False)[1]

    def _seen(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams, *, keep: bool
    ) -> tuple[Tensors, View]:
        """Store as :meth:`KVArrangement.store` does; with ``keep`` false, without overwriting what
        a repeated call needs."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TwoTiers(_Tiered):
    """The last ``storage.recent`` tokens as floats in a ring, everything older in the storage's
    formats: of all tokens, or of the last ``window``.

    Precision depends on distance alone, not on how a text is split into calls: a query sees the
    last ``recent`` tokens, its own included, in full precision, and all others quantized. A group
    of 32 positions is encoded when its last token comes, from floats that are all still in the
    ring; that is early enough for any query, since ``recent`` is at least 32. So most decode steps
    encode nothing.

    With a window, groups are in a ring too, of as many as a window touches; tokens of a group that
    have left the window are masked.
    """

    storage: Storage
    window: int = 0
    alone: ClassVar[int] = 0

    @property
    def ring(self) -> Window:
        """Retention of the float tier."""
        recent = self.storage.recent
        return Window(min(recent, self.window) if self.window else recent)

    @property
    def groups(self) -> KeepAll | Window:
        """Retention of the quantized tier, in which a group counts as one token."""
        return self._ring_of_groups if self.window else KeepAll()

    @property
    def _ring_of_groups(self) -> Window:
        """Ring of the groups that a window touches."""
        return Window(-(-self.window // GROUP))

    @property
    def _packs(self) -> bool:
        """Whether any query ever sees a quantized token."""
        return not 0 < self.window <= self.storage.recent

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rows, tokens, heads, dim = shape
        recent = self.storage.floats.layout((rows, self.ring.capacity(tokens), heads, dim), dtype)
        old = self.storage.layout((rows, self._room(tokens), heads, dim), dtype)
        return {_RECENT + name: tensor for name, tensor in recent.items()} | old

    def _room(self, tokens: int) -> int:
        """Tokens to have room for in groups, for rows of ``tokens``; rows of a whole window may
        hold more than that."""
        if not self._packs:
            return 0
        if self.window and tokens >= self.window:
            return self.groups.size * GROUP
        return _complete(tokens)

    def slots(self, name: str, first: int, last: int) -> slice:
        if name.startswith(_RECENT):
            return self.ring.slots(first, last)
        if not self._packs:
            return slice(0, 0)
        kept, size = self.groups.slots(first // GROUP, last // GROUP), self._entries(name)
        return slice(kept.start * size, kept.stop * size)

    def _entries(self, name: str) -> int:
        """Entries of a group."""
        return GROUP // self.storage.tokens_an_entry(name)

    def in_place(self, common: int, written: int, new: int) -> int:
        size = self.ring.size
        if written <= size:
            return common
        if self.window and written // GROUP > self.groups.size:
            return 0
        # Groups stay in place. A ring that has wrapped is copied whole, which takes at least one
        # token more than its size.
        return max(common - 1, 0) if new > size else 0

    def lost(self, length: int, kept: int) -> bool:
        return self.ring.lost(length, kept)

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensors:
        k, v = self.storage.hadamard(k, v)
        floats = self.storage.floats.pack(k.to(dtype), v.to(dtype))
        return {_RECENT + name: tensor for name, tensor in floats.items()}

    def _seen(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams, *, keep: bool
    ) -> tuple[Tensors, View]:
        lengths, ring, recent, floats = batch.lengths, self.ring, _named(stored), _named(new)
        seen = min(filter(None, (params.window, self.window)), default=0)
        if lengths.chunk == 1 and not 0 < seen < ring.size and not params.chunk:
            ring.write(recent, floats, lengths, batch)
            view = ring.ring(recent, batch)
            places = self._in_ring(lengths)
        else:
            view = ring.in_order(recent, floats, batch)
            view = replace(view, window=min(ring.size, seen or ring.size))
            if keep:
                ring.write(recent, floats, lengths, batch)
            places = self._in_order(lengths)
        groups = self._encoded(view, places)
        old = self._keep(stored, groups, batch, keep) if self._packs else ()
        if lengths.kv_len <= ring.size or 0 < seen <= ring.size:
            old = ()
        return {**new, **groups}, self._joined(old, view, batch, seen)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.ring.write(_named(stored), _named(new), lengths, None)
        self._write_groups(stored, _old(new), lengths)

    # Groups -------------------------------------------------------------------------------

    def _in_ring(self, lengths: Lengths) -> Iterator[Tensor]:
        """Yield each row's places in the ring of newly complete groups, int64 (N,); N is the most
        of any row."""
        steps = torch.arange(_in_groups(lengths).chunk * GROUP)
        for past in lengths.past:
            yield (_complete(past) + steps) % self.storage.recent

    def _in_order(self, lengths: Lengths) -> Iterator[Tensor]:
        """As :meth:`_in_ring`, for floats in order, as :meth:`Window.in_order` lays them out."""
        steps = torch.arange(_in_groups(lengths).chunk * GROUP)
        for past in lengths.past:
            first = max(past - (self.storage.recent - 1), 0)
            yield _complete(past) - first + steps

    def _encoded(self, view: ContiguousView, places: Iterator[Tensor]) -> Tensors:
        """Encode the groups at these places, (B, N, ...); rows with fewer are padded arbitrarily,
        so that memory depends on no row's length."""
        if not self._packs:
            return {}
        k, index = view.stored["k"], torch.stack(list(places))
        if not index.numel():
            return {}
        index = index.clamp(max=k.shape[1] - 1).to(k.device)
        row = torch.arange(len(index)).unsqueeze(-1).to(k.device)
        floats = {name: x[row, index] for name, x in view.stored.items()}
        return self.storage.pack(floats["k"], floats.get("v", floats["k"]))

    def _write_groups(self, stored: Tensors, groups: Tensors, lengths: Lengths) -> None:
        if groups:
            grouped = {name: self._grouped(name, stored[name]) for name in groups}
            new = {name: self._grouped(name, value) for name, value in groups.items()}
            self.groups.write(grouped, new, _in_groups(lengths), None)

    def _grouped(self, name: str, tensor: Tensor) -> Tensor:
        """(B, S, ...) -> (B, groups, entries of a group, ...)."""
        size = self._entries(name)
        return tensor.unflatten(1, (tensor.shape[1] // size, size))

    def _keep(
        self, stored: Tensors, groups: Tensors, batch: Batch, keep: bool
    ) -> tuple[Segment, ...]:
        """Write these groups, and return all that a query of this call may see. With ``keep`` false
        none is written over another that it may see."""
        lengths, old = batch.lengths, _old(stored)
        if not self.window or lengths.kv_len // GROUP <= self.groups.size:
            self._write_groups(stored, groups, lengths)
            return (self._from_the_first(old, batch),)
        if lengths.chunk == 1:
            self._write_groups(stored, groups, lengths)
            return self._laps(old, batch)
        segment = self._laid_out(old, groups, batch)  # before any is overwritten
        if keep:
            self._write_groups(stored, groups, lengths)
        return (segment,)

    def _from_the_first(self, old: Tensors, batch: Batch) -> Segment:
        """Groups that are all at their positions (the ring has not wrapped)."""
        start, rows = torch.zeros_like(batch.past_lens), len(batch.lengths.past)
        older = max(batch.lengths.kv_len - self.ring.size, 0)
        return Segment(
            stored={name: tensor[:rows] for name, tensor in old.items()},
            start=start,
            count=start + older,
            kv_len=older,
        )

    def _laps(self, old: Tensors, batch: Batch) -> tuple[Segment, Segment]:
        """A ring of groups, for one token a row: those of the current lap, and those of the
        previous one, positioned one lap earlier. The window masks the overwritten ones."""
        size, rows = self.groups.size * GROUP, len(batch.lengths.past)
        complete = (batch.past_lens + 1) // GROUP * GROUP
        this_lap = complete % size
        begin = complete - this_lap
        now = Segment(
            stored={name: tensor[:rows] for name, tensor in old.items()},
            start=begin,
            count=this_lap,
            kv_len=size,
        )
        return replace(now, start=begin - size, count=begin.clamp(max=size)), now

    def _laid_out(self, old: Tensors, groups: Tensors, batch: Batch) -> Segment:
        """The ring's groups in order, followed by the new ones."""
        grouped = {name: self._grouped(name, tensor) for name, tensor in old.items()}
        rows, lengths, size = len(batch.past_lens), _in_groups(batch.lengths), self.groups.size
        new = {name: tensor[:rows, :0] for name, tensor in grouped.items()}
        new |= {name: self._grouped(name, value) for name, value in groups.items()}
        before = tuple(min(past, size) for past in lengths.past)
        laid = self._ring_of_groups.behind_the_ring(grouped, new, lengths, before)
        start = (batch.past_lens // GROUP - size).clamp(min=0) * GROUP
        kv_len = (max(before) + lengths.chunk) * GROUP
        return Segment(
            stored={name: tensor.flatten(1, 2) for name, tensor in laid.items()},
            start=start,
            count=torch.zeros_like(start) + kv_len,
            kv_len=kv_len,
        )

    def _joined(
        self, old: tuple[Segment, ...], ring: ContiguousView, batch: Batch, seen: int
    ) -> View:
        ring, size = replace(ring, formats=_FLOATS), self.ring.size
        if not old:
            return ring
        recent = ring.as_segment(batch.past_lens)
        before = (replace(segment, window=seen and seen - size, skip_last=size) for segment in old)
        return SegmentedView(past_lens=batch.past_lens, segments=(*before, recent))

    # Conversion ---------------------------------------------------------------------------

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        at, row = span.positions(), torch.arange(len(span.lens)).unsqueeze(-1)
        recent = (at >= span.ends() - self.ring.size).view(*at.shape, 1, 1)
        place = self.ring.place(span.nearest_stored())
        old = self._read_groups(stored, at, dtype, head_dim)
        ring = _named(stored)
        floats = {name: x[row, place] for name, x in ring.items()}
        pairs = zip((floats["k"], floats.get("v", floats["k"])), old, strict=True)
        k, v = (torch.where(recent, x, y) for x, y in pairs)
        return self.storage.hadamard(k, v)

    def _read_groups(
        self, stored: Tensors, at: Tensor, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Decode the groups at these positions; arbitrary values where none is stored."""
        grouped = {name: self._grouped(name, tensor) for name, tensor in _old(stored).items()}
        count = next(iter(grouped.values())).shape[1]
        if not count:
            return torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
        place = self.groups.place(at[:, ::GROUP] // GROUP).clamp(max=count - 1)
        row = torch.arange(len(at)).unsqueeze(-1)
        taken = {name: tensor[row, place].flatten(1, 2) for name, tensor in grouped.items()}
        k, v = self.storage.widen(taken, dtype, head_dim)
        return k[:, : at.shape[1]], v[:, : at.shape[1]]

    def put(
        self, stored: Tensors, span: TokenSpan, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        k, v = (x.to(dtype) for x in self.storage.hadamard(k, v))
        at = span.positions()
        recent = span.are_stored() & (at >= span.ends() - self.ring.size)
        put_at(_named(stored), self.storage.floats.pack(k, v), self.ring.place(at), recent)
        whole = _complete(span.count)
        if self._packs and whole:
            packed = self.storage.pack(k[:, :whole], v[:, :whole])
            groups = {name: self._grouped(name, value) for name, value in packed.items()}
            grouped = {name: self._grouped(name, stored[name]) for name in packed}
            first = at[:, :whole:GROUP]
            complete = first + GROUP <= span.ends()
            put_at(grouped, groups, self.groups.place(first // GROUP), complete)


@dataclass(frozen=True, slots=True)
class SinksFirst(_Tiered):
    """A row's first tokens, the attention sinks, as floats, and two tiers of those after them,
    where positions count from 0; see :class:`Sinks`."""

    storage: Storage
    retention: Sinks

    @property
    def tiers(self) -> TwoTiers:
        return TwoTiers(self.storage, self.retention.size)

    @property
    def sinks(self) -> int:
        return self.retention.sinks

    @property
    def alone(self) -> int:
        return self.sinks

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rows, tokens, heads, dim = shape
        first = self.storage.floats.layout((rows, min(tokens, self.sinks), heads, dim), dtype)
        others = self.tiers.layout((rows, max(tokens - self.sinks, 0), heads, dim), dtype)
        return {_FIRST + name: tensor for name, tensor in first.items()} | others

    def slots(self, name: str, first: int, last: int) -> slice:
        if name.startswith(_FIRST):
            return slice(min(first, self.sinks), min(last, self.sinks))
        return self.tiers.slots(name, *(max(end - self.sinks, 0) for end in (first, last)))

    def in_place(self, common: int, written: int, new: int) -> int:
        if common <= self.sinks:
            return common
        others = (max(end - self.sinks, 0) for end in (common, written, new))
        return self.sinks + self.tiers.in_place(*others)

    def lost(self, length: int, kept: int) -> bool:
        return kept > self.sinks and self.tiers.lost(length - self.sinks, kept - self.sinks)

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensors:
        return self.tiers.encode(k, v, dtype)

    def _seen(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams, *, keep: bool
    ) -> tuple[Tensors, View]:
        self._write_sinks(stored, new, batch.lengths)
        others, segments = batch.without(self.sinks), [self._sinks(stored, batch, params)]
        if others.lengths.chunk:
            floats = self.retention.others(new, batch.lengths)
            params = replace(params, window=0)
            how = others, params
            written, view = self.tiers._seen(_others(stored), floats, *how, keep=keep)
            new = {**written, **new}
            segments += [
                replace(segment, start=segment.start + self.sinks)
                for segment in _segments(view, others.past_lens)
            ]
        return new, SegmentedView(past_lens=batch.past_lens, segments=tuple(segments))

    def _sinks(self, stored: Tensors, batch: Batch, params: AttentionParams) -> Segment:
        first = _named(stored, _FIRST)
        segment = self.retention.sink_segment(first, batch, params)
        return replace(segment, formats=_FLOATS)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self._write_sinks(stored, new, lengths)
        others = lengths.without(self.sinks)
        if others.chunk:
            floats = {name: new[name] for name in new if name.startswith(_RECENT)}
            new = {**new, **self.retention.others(floats, lengths)}
            self.tiers.write(_others(stored), new, others)

    def _write_sinks(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.retention.write_sinks(_named(stored, _FIRST), _named(new), lengths)

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        if not span.of_sinks:
            return self.tiers.read(_others(stored), span.counted_from(self.sinks), dtype, head_dim)
        first, row = _named(stored, _FIRST), torch.arange(len(span.lens)).unsqueeze(-1)
        at = span.nearest_stored()
        floats = {name: x[row, at] for name, x in first.items()}
        return self.storage.hadamard(floats["k"], floats.get("v", floats["k"]))

    def put(
        self, stored: Tensors, span: TokenSpan, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        if not span.of_sinks:
            return self.tiers.put(_others(stored), span.counted_from(self.sinks), k, v, dtype)
        k, v = (x.to(dtype) for x in self.storage.hadamard(k, v))
        first = self.storage.floats.pack(k, v)
        put_at(_named(stored, _FIRST), first, span.positions(), span.are_stored())


def _segments(view: View, past_lens: Tensor) -> tuple[Segment, ...]:
    """Segments of a view, for rows with ``past_lens`` tokens before the queries' own."""
    if isinstance(view, ContiguousView):
        return (view.as_segment(past_lens),)
    return view.segments


def _complete(tokens: int) -> int:
    """How many of the first tokens are in complete groups."""
    return tokens // GROUP * GROUP


def _in_groups(lengths: Lengths) -> Lengths:
    """Lengths in groups: those complete before the call, and those completed by it."""
    ends = (past + new for past, new in zip(lengths.past, lengths.new, strict=True))
    past = tuple(past // GROUP for past in lengths.past)
    new = tuple(end // GROUP - begin for end, begin in zip(ends, past, strict=True))
    return Lengths(past=past, new=new)


def _named(tensors: Tensors, prefix: str = _RECENT) -> dict[str, Tensor]:
    """Float tensors by the names that a storage gives them."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _old(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_RECENT)}


def _others(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_FIRST)}

"""One decoder layer's part of a cache: four properties, and the tensors that follow from them.

``attend`` is the only way in, and shows the four at work: the storage encodes new keys and values,
stored ones are at hand or prefetched from host memory, the retention keeps the new ones and returns
a view of what the queries see, and the storage runs attention over it. Storage and retention work
together in an arrangement (``arrangement.py``), which also knows where in each tensor a token lies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from exkv import devices
from exkv.batch import Batch, Lengths
from exkv.epochs import WatchedDict, advance
from exkv.ops.attention import AttentionParams

from .arrangement import OneStore
from .contents import contents
from .convert import HostCopy, restored
from .fetching import Prefetch, WriteBack
from .paging.growth import PagedStore
from .paging.host_tiers import HostPages
from .paging.pool import PageTable
from .residence import OnHost
from .retention import KeepAll, Window
from .shared import Shared
from .slots import Slots, index, pieces, put, views
from .spec import LayerSpec
from .views import Tensors, View


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Tensors in which every token has one place, where it is written and read: what a bound run
    needs to know of a layer's part of a cache.

    Attributes:
        keys, values: in the order of their format's names.
        hadamard: whether heads are transformed before they are stored.
        ring: the last tokens that are kept, at their positions modulo this number; 0 for all.
        paged: whether the tensors are pools of pages.
        window: keys that queries see at most of what is stored; 0 for all.
    """

    keys: list[torch.Tensor]
    key_format: str
    values: list[torch.Tensor]
    value_format: str
    hadamard: bool
    ring: int
    paged: bool
    window: int

    def append(self, k: torch.Tensor, v: torch.Tensor, past_lens: torch.Tensor, ring: int) -> None:
        """Write k, v (B, T, H_kv, D) behind the ``past_lens``, int32 (B,), tokens of their rows,
        by one op; ``ring`` is 0 where rows don't come round in it."""
        torch.ops.exkv.append_kv(
            k,
            v,
            None,
            None,
            self.keys,
            self.key_format,
            self.values,
            self.value_format,
            past_lens,
            ring=ring,
            hadamard=self.hadamard,
        )

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past_lens: torch.Tensor,
        kv_len: int,
        params: AttentionParams,
        ring: int,
    ) -> torch.Tensor:
        """The same of one token a row, and attention of q (B, 1, H, D) to ``kv_len`` keys at most,
        these counted -> (B, 1, H, D)."""
        return torch.ops.exkv.decode_attention(
            q,
            k,
            v,
            self.keys,
            self.key_format,
            self.values,
            self.value_format,
            past_lens,
            kv_len,
            params.scale,
            0 if self.ring else params.window,
            params.softcap,
            ring,
            self.hadamard,
        )


class CacheLayer:
    """Keys and values of one decoder layer. A change advances the epoch.

    Attributes:
        device: of the layer's weights, where attention runs; None while there is no storage.
        room: tokens a row that the storage has room for now.
        offloaded: whether the storage lies elsewhere than on the device.
        after: the next layer of the cache, whose tokens this one prefetches.
        prefetched: a copy of this layer's tokens that is on its way to its device.
        shared: what the rows of a fork begin with.
        row_lens: tells how many tokens each row of the cache has.
        pages: of a cache in pages, where its rows lie; the same for all layers.
        host_pages: of a cache in pages that has tiers in host memory, this layer's part of them.
        lender: the layer of another cache whose storage this one uses, of which it is a fork.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.device: torch.device | None = None
        self._written_back: list[WriteBack] = []
        self.tensors = {}
        self.room = 0
        self.offloaded = False
        self.after: CacheLayer | None = None
        self.prefetched: Prefetch | None = None
        self.shared: Shared | None = None
        self.row_lens: Callable[[], list[int]] = list
        self.pages: PageTable | None = None
        self.host_pages: HostPages | None = None
        self.lender: CacheLayer | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "prefetched":  # which comes and goes in every call
            advance()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The storage, by the storage's names; empty while there is none."""
        if self._written_back:
            self.settle()
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._written_back.clear()
        self._tensors = tensors if isinstance(tensors, WatchedDict) else WatchedDict(tensors)

    @property
    def keys(self) -> torch.Tensor:
        """What is stored of each row's keys, as floats: (B, H_kv, N, D), a copy on the host; see
        ``exkv.cache.contents``."""
        return contents(self, self.row_lens())[0]

    @property
    def values(self) -> torch.Tensor:
        """The same of values."""
        return contents(self, self.row_lens())[1]

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store k, v (B, T, H_kv, D) and attend q (B, T, H, D) over the rows -> (B, T, H, D)."""
        view = self.append(k, v, batch, params)
        return self.spec.storage.attend(q, view, params, self.spec.dtype)

    def append(
        self, k: torch.Tensor, v: torch.Tensor, batch: Batch, params: AttentionParams
    ) -> View:
        """Store k, v (B, T, H_kv, D); what the queries of these tokens see, until the next call."""
        spec = self.spec
        own = batch if self.shared is None else self.shared.rest(batch)
        new = spec.arrangement.encode(k, v, spec.dtype)
        stored = self.fetch(own.lengths)
        if self.offloaded and own.block_table is not None:  # only the rows' pages were fetched
            table = own.block_table
            pages = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
            own = replace(own, block_table=pages.view_as(table))
        new, view = spec.arrangement.store(stored, new, own, params)
        self._write_back(new, own.lengths)
        if self.shared is not None:
            view = self.shared.before(view, batch, params, fetched=self.offloaded)
        return view

    def in_place(self, dtype: torch.dtype) -> InPlace | None:
        """The tensors, where native code for heads of the dtype can do what :meth:`attend` does;
        None where something else is to be done."""
        arrangement = self.spec.arrangement
        replaced = type(self) is not CacheLayer or "attend" in vars(self)
        if replaced or self.offloaded or self.shared is not None or dtype != self.spec.dtype:
            return None
        paged = type(arrangement) is PagedStore
        if not self.tensors or not (paged or type(arrangement) is OneStore):
            return None
        assert isinstance(arrangement, OneStore)
        storage, retention = arrangement.storage, self.spec.retention
        if not storage.in_place or type(retention) not in (KeepAll, Window):
            return None
        return InPlace(
            keys=storage.tensors_of("k", self.tensors),
            key_format=storage.keys,
            values=storage.tensors_of("v", self.tensors),
            value_format=storage.values,
            hadamard=storage.rotate,
            ring=0 if paged else retention.size,
            paged=paged,
            window=retention.size if paged else 0,
        )

    @property
    def _placed(self) -> torch.device:
        assert self.device is not None, "a layer without storage attends to nothing"
        return self.device

    def fetch(self, lengths: Lengths) -> Tensors:
        """The tensors on the layer's device, with room for the new tokens."""
        if not self.offloaded:
            return self.tensors
        prefetch, self.prefetched = self.prefetched, None
        if prefetch is None:
            prefetch = self.start_prefetch(lengths)
        assert prefetch.lengths == lengths, "a call that fails drops what was prefetched"
        here = prefetch.arrive()
        if self.after is not None and self.after.tensors:
            self.after.prefetched = self.after.start_prefetch(lengths)
        return here

    def start_prefetch(self, lengths: Lengths) -> Prefetch:
        """Begin to copy the tokens that a call of these lengths reads to the layer's device."""
        return Prefetch.start(self.tensors, self.spec.arrangement, self._placed, lengths)

    def _write_back(self, new: Tensors, lengths: Lengths) -> None:
        """Keep new values (B, T, ...) on the host too, once they were stored in what was fetched;
        they are put in their places when these are next looked at."""
        if self.offloaded:
            self._written_back.append(WriteBack(new, lengths, self._placed))

    def settle(self) -> None:
        """Put new values that are on their way to the host in their places."""
        arrived = list(self._written_back)
        self._written_back.clear()
        for each in arrived:
            self.spec.arrangement.write(self._tensors, each.arrive(), each.lengths)

    # Memory -------------------------------------------------------------------------------

    @property
    def borrowed(self) -> bool:
        """Whether the storage is another cache's."""
        return self.lender is not None

    def bytes_needed(self, device: torch.device | str) -> int:
        """Bytes that a full storage takes from a device on which its layer is placed."""
        device = torch.device(device)
        return self.full_bytes() if self._on_device(device) else 0

    def full_bytes(self) -> int:
        """Bytes of a full storage, wherever it lies; none of one that is another cache's."""
        return 0 if self.borrowed else self.spec.nbytes(self.spec.capacity)

    def host_bytes_needed(self) -> int:
        """Bytes that it takes from the host although its layer is placed elsewhere."""
        offloaded = self.spec.residence.storage_device(torch.device("meta")) == devices.CPU
        return self.full_bytes() if offloaded else 0

    def tier_bytes(self) -> int:
        """Bytes of the tiers in host memory to which pages go that nobody holds."""
        return 0 if self.borrowed else HostPages.nbytes(self.spec)

    def growth_peak(self, device: torch.device | str) -> int:
        """Bytes beside a full storage that its last step of growth takes for a moment."""
        before = self.spec.growth.last_room(self.spec.capacity)
        return self.spec.nbytes(before) if before and self._on_device(torch.device(device)) else 0

    def _on_device(self, device: torch.device) -> bool:
        return self.spec.residence.storage_device(device) == device

    def nbytes(self) -> int:
        """Bytes that the storage takes now."""
        return sum(devices.rounded(tensor.nbytes) for tensor in self.own_tensors())

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """All that take memory now, and are not another cache's."""
        if not self.borrowed:
            yield from self.tensors.values()
            yield from self.host_pages.all_tensors() if self.host_pages else ()

    def allocate(self, device: torch.device, tokens: int = 0) -> None:
        """Create the storage, zeroed, all of it or none.

        Args:
            tokens: that a row is to have room for at least.

        Raises:
            torch.OutOfMemoryError: the device is full; nothing was allocated.
        """
        if self.lender is not None:
            if not self.lender.tensors:
                self.lender.allocate(device, tokens)
            self.borrow(self.lender)
            return
        room = self.spec.growth.room_for(tokens, self.spec.capacity)
        host_pages = HostPages.of(self.spec, device)
        self.tensors, self.room = self._zeros(device, room), room
        self.host_pages = host_pages
        self.device = device
        self.offloaded = not self._on_device(device)

    def borrow(self, lender: CacheLayer) -> None:
        """Use the storage of another cache's layer."""
        self.lender = lender
        self.tensors, self.room, self.device = lender.tensors, lender.room, lender.device
        self.host_pages, self.offloaded = lender.host_pages, lender.offloaded

    def _zeros(self, device: torch.device, tokens: int) -> dict[str, torch.Tensor]:
        storage_device = self.spec.residence.storage_device(device)
        return {
            name: devices.zeros(shape, dtype, storage_device, near=device)
            for name, (shape, dtype) in self.spec.layout(tokens).items()
        }

    @property
    def enough(self) -> int:
        """Tokens up to which :meth:`make_room` has nothing to do."""
        return self.room if self.tensors and self.room < self.spec.capacity else sys.maxsize

    def make_room(self, tokens: int) -> None:
        """Grow until rows of so many tokens fit, as far as the retention keeps them.

        Raises:
            torch.OutOfMemoryError: the device is full; the storage is as it was.
        """
        tokens = min(tokens, self.spec.capacity)
        if self.tensors and tokens > self.room:
            self._change_room(self.spec.growth.room_for(tokens, self.spec.capacity))

    def give_room_back(self) -> None:
        """Shrink to what it takes without a token."""
        if self.tensors and self.room > (least := self.spec.growth.room_for(0, self.spec.capacity)):
            self._change_room(least)

    def _change_room(self, tokens: int) -> None:
        """To other tensors; for a moment the layer is there twice."""
        self.prefetched = None
        larger = self._zeros(self._placed, tokens)
        for name, tensor in larger.items():
            kept = min(tensor.shape[1], self.tensors[name].shape[1])
            tensor[:, :kept] = self.tensors[name][:, :kept]
        self.tensors, self.room = larger, tokens

    @property
    def prefetches(self) -> CacheLayer | None:
        """The layer whose tokens are prefetched while this one computes."""
        return None if self._on_device(torch.device("meta")) else self.after

    # Rows ---------------------------------------------------------------------------------

    def row(self, row: int, tokens: int) -> dict[str, torch.Tensor]:
        """What is stored of a row that has so many tokens: its entries, on the host."""
        if self.pages is None:
            return {name: tensor[row].cpu() for name, tensor in self.tensors.items()}
        index = self.pages.index(row, tokens)
        return {
            name: _flat(tensor)[index.to(tensor.device)].cpu()
            for name, tensor in self.tensors.items()
        }

    def rows(self, name: str, lens: Sequence[int]) -> torch.Tensor:
        """A tensor's entries (R, S, ...) of the first rows, which have so many tokens; S is what
        the longest has. What lies in pages is copied, and shorter rows are filled up."""
        tensor = self.tensors[name]
        if self.pages is None:
            return tensor[: len(lens), self.spec.arrangement.slots(name, 0, max(lens, default=0))]
        flat = _flat(tensor)
        rows = [flat[self.pages.index(row, n).to(flat.device)] for row, n in enumerate(lens)]
        return pad_sequence(rows, batch_first=True) if rows else tensor[:0, :0]

    def set_rows(self, name: str, lens: Sequence[int], values: torch.Tensor) -> None:
        """The inverse of :meth:`rows`, from the host; the rows have their pages."""
        tensor = self.tensors[name]
        if self.pages is None:
            slots = self.spec.arrangement.slots(name, 0, max(lens, default=0))
            return put(tensor, slots, values)
        for row, tokens in enumerate(lens):
            index = self.pages.index(row, tokens).to(tensor.device)
            _flat(tensor)[index] = values[row, :tokens].to(tensor.device)

    def copy_page(self, to: int, page: int) -> None:
        """Let a page hold what another one does."""
        for tensor in self.tensors.values():
            tensor[to].copy_(tensor[page])

    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Let page ``to`` of one tier hold what ``page`` of another one does."""
        if self.tensors:  # it is in this process
            assert self.host_pages is not None, "only layers with tiers move pages"
            self.host_pages.move(self.tensors, page, tier, to, to_tier)

    def move_rows(self, moves: Sequence[tuple[int, int]], positions: slice, step: int) -> None:
        """Copy what is kept of these positions, for each ``(to, row)`` from row to row, all rows at
        once, and no more than ``step`` tokens at once. It never runs out of a device's memory: some
        rows would be moved by then, and others not."""
        for name, tensor in self.tensors.items():
            slots = self.spec.arrangement.slots(name, positions.start, positions.stop)
            for part in pieces(slots, step):
                if not _moved(tensor, moves, part):
                    _move_by_host(tensor, moves, part)

    def copy_on_write(self) -> None:
        """Leave the tensors to the forks that read them, and go on with copies."""
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def convert(
        self, spec: LayerSpec, done: list[dict[str, torch.Tensor]], lens: Sequence[int]
    ) -> None:
        """Store the same by another spec: of other storage, residence or growth.

        Args:
            done: what was converted for layers that share it; this layer's is added.
            lens: tokens in each row.

        Raises:
            torch.OutOfMemoryError: the device is full; the layer stores what it did.
        """
        self.prefetched = None
        shared = None if self.shared is None else self.shared.tensors
        for tensors in (shared, self.tensors):
            if tensors and not any(tensors is other for other in done):
                self._convert(tensors, spec, lens)
                done.append(tensors)
        self.spec = spec
        if self.device is not None:
            self.offloaded = not self._on_device(self.device)
        if self.host_pages is not None:
            self.host_pages.store_as(spec)

    def _convert(
        self, tensors: dict[str, torch.Tensor], spec: LayerSpec, lens: Sequence[int]
    ) -> None:
        """In place, since forks share the dictionary."""
        own, device = tensors is self.tensors, self._placed
        old_room = self.room if own else next(iter(tensors.values())).shape[1]
        room = spec.growth.room_for(old_room, spec.capacity) if own else old_room
        if self.pages is not None:  # page by page, whosever they are
            old_room = next(iter(tensors.values())).shape[1]
        if not own or self.shared or self.pages:  # rows that are counted elsewhere: all there is
            lens = [old_room] * len(next(iter(tensors.values())))
        copy = HostCopy.of(tensors, old_room, lens)
        tensors.clear()
        converted = restored(copy, self.spec, spec, room, device)
        if converted is not None:
            tensors.update(converted)
            self.room = room if own else self.room
            return
        before = restored(copy, self.spec, self.spec, old_room, device)
        tensors.update(before or copy.tensors)
        if before is None and tensors is self.tensors:  # somebody took what was free a moment ago
            self.spec, self.offloaded = replace(self.spec, residence=OnHost()), True
        raise torch.OutOfMemoryError(f"{device} has no room for a layer as {spec.storage}")

    def take_rows(self, other: CacheLayer, rows: Sequence[int], tokens: int) -> None:
        """Copy these rows of a layer with another number of rows, up to so many tokens. Row by row:
        all at once they would be gathered first, for which no plan promises room."""
        self.make_room(tokens)
        for name, tensor in other.tensors.items():
            part = self.spec.arrangement.slots(name, 0, tokens)
            for to, row in enumerate(rows):
                for here, there in zip(
                    views(self.tensors[name][to], part), views(tensor[row], part), strict=True
                ):
                    here.copy_(there)

    def copy_from(self, other: CacheLayer) -> None:
        """Copy a layer of the same spec."""
        self.make_room(other.room)
        for name, tensor in other.tensors.items():
            self.tensors[name][:, : tensor.shape[1]].copy_(tensor)

    def free(self) -> None:
        self.tensors, self.room = {}, 0
        self.device = self.prefetched = self.shared = self.host_pages = None
        self.lender = None

    def move_out(self) -> None:
        """Give the storage back, to be allocated on another device."""
        lender = self.lender
        self.free()
        self.lender = lender


def _flat(pool: torch.Tensor) -> torch.Tensor:
    """Pages (N, page, ...) as one row of tokens."""
    return pool.flatten(0, 1)


def _moved(tensor: torch.Tensor, moves: Sequence[tuple[int, int]], part: Slots) -> bool:
    """Move rows within their device; False, and nothing is moved, where that is full."""
    try:
        to, rows = torch.tensor(moves).to(tensor.device).unbind(1)
        tensor[index(to, part)] = tensor[index(rows, part)]
    except torch.OutOfMemoryError:
        return False
    return True


def _move_by_host(tensor: torch.Tensor, moves: Sequence[tuple[int, int]], part: Slots) -> None:
    """The same, row by row through the host: slower, and takes nothing from the device."""
    kept = {
        row: [view.to(devices.CPU, copy=True) for view in views(tensor[row], part)]
        for row in {row for _, row in moves}
    }
    for to, row in moves:
        for view, value in zip(views(tensor[to], part), kept[row], strict=True):
            view.copy_(value)

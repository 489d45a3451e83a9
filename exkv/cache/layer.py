"""One decoder layer's part of a cache: four properties, and the tensors that follow from them.

``attend`` is the only entry point, and shows the four at work: the storage encodes new keys and
values, stored ones are at hand or prefetched from host memory, the retention stores the new ones
and returns a view of what the queries see, and the storage runs attention over it. Storage and
retention are combined by an arrangement (``arrangement.py``), which also knows where each token
lies.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exkv import devices
from exkv.batch import Batch, Lengths
from exkv.caching_allocator import LARGE
from exkv.checkpoint import StateTensor
from exkv.epochs import WatchedDict, advance
from exkv.errors import Attempt
from exkv.ops.attention import AttentionParams

from .arrangement import OneStore
from .chunks import over_chunks
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

if TYPE_CHECKING:
    from .state import States


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Tensors in which every token is written to and read from one fixed place: what a bound run
    needs to know of a cache layer.

    Attributes:
        keys, values: in the order of their format's names.
        hadamard: whether heads are transformed before they are stored.
        ring: size of the ring that the tokens are in, at their positions modulo it; 0 for none.
        paged: whether the tensors are pools of pages.
        window: sliding window over stored keys; 0 for none.
    """

    keys: list[Tensor]
    key_format: str
    values: list[Tensor]
    value_format: str
    hadamard: bool
    ring: int
    paged: bool
    window: int

    def append(self, k: Tensor, v: Tensor, past_lens: Tensor, ring: int) -> None:
        """Append k, v (B, T, H_kv, D) to rows of ``past_lens``, int32 (B,), tokens, in one op;
        ``ring`` is 0 if no row wraps around."""
        how = {"ring": ring, "hadamard": self.hadamard}
        torch.ops.exkv.append_kv(k, v, None, None, *self._stores, past_lens, **how)

    @property
    def _stores(self) -> tuple[list[Tensor], str, list[Tensor], str]:
        return self.keys, self.key_format, self.values, self.value_format

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past_lens: Tensor,
        kv_len: int,
        params: AttentionParams,
        ring: int,
    ) -> Tensor:
        """Append one token a row, and attend q (B, 1, H, D) to up to ``kv_len`` keys, new ones
        included -> (B, 1, H, D)."""
        window = 0 if self.ring else params.window
        how = params.scale, window, params.softcap, ring, self.hadamard
        return torch.ops.exkv.decode_attention(q, k, v, *self._stores, past_lens, kv_len, *how)


class CacheLayer:
    """Keys and values of one decoder layer. Any change advances the epoch.

    Attributes:
        device: of the layer's weights, where attention runs; None while unallocated.
        room: tokens a row that the storage has room for now.
        offloaded: whether the storage is elsewhere than on the device.
        after: the next layer of the cache, whose tokens this one prefetches.
        prefetched: this layer's tokens in flight to its device.
        shared: prefix of a fork's rows.
        row_lens: returns the number of tokens in each row.
        pages: page table of a paged cache; the same for all layers.
        host_pages: this layer's part of the host memory tiers, if the cache has any.
        lender: the layer of another cache whose storage this one borrows, if it shares a pool.
        beside: the cache layer with the decoder layer's state, if it has one beside these keys and
            values.
        read_by: the next layer of the cache with the same keys and values.
        shares: whether this layer shares the storage of ``reads``, which it does on the same
            device. On another it stores a copy, since every call brings both the new tokens.
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
        self.beside: CacheLayer | None = None
        self._reads: weakref.ref[CacheLayer] | None = None
        self.read_by: CacheLayer | None = None
        self.shares = False
        #: Bytes of the largest storage that was converted since the layer was placed.
        self.converted_from = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "prefetched":  # changes in every call
            advance()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The storage, by tensor name; empty while unallocated."""
        if self._written_back:
            self.settle()
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: dict[str, Tensor]) -> None:
        self._written_back.clear()
        self._tensors = tensors if isinstance(tensors, WatchedDict) else WatchedDict(tensors)

    @property
    def reads(self) -> CacheLayer | None:
        """An earlier layer of the cache with the same keys and values."""
        return None if self._reads is None else self._reads()

    @reads.setter
    def reads(self, layer: CacheLayer | None) -> None:
        # Weak, for a cycle would hold storage for longer than its cache.
        self._reads = None if layer is None else weakref.ref(layer)

    @property
    def keys(self) -> Tensor:
        """Stored keys of each row as floats: (B, H_kv, N, D), a copy on the host; see
        ``exkv.cache.contents``."""
        return contents(self, self.row_lens())[0]

    @property
    def values(self) -> Tensor:
        """Stored values, as :attr:`keys`."""
        return contents(self, self.row_lens())[1]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        """Store k, v (B, T, H_kv, D) and attend q (B, T, H, D) over the rows -> (B, T, H, D)."""
        keeps_all = isinstance(self.spec.retention, KeepAll)
        params = params.within(batch.lengths, windows=keeps_all)
        view = self.append(k, v, batch, params)
        out = self._over(q, view, batch, params)
        self.release_written()
        return out

    def _over(self, q: Tensor, view: View, batch: Batch, params: AttentionParams) -> Tensor:
        """Attend q (B, T, H, D) over a view, chunk by chunk in chunked attention."""
        storage, dtype = self.spec.storage, self.spec.dtype
        if params.chunk:
            within = replace(params, chunk=0)
            each = lambda q, shown: storage.attend(q, shown, within, dtype)  # noqa: E731
            out = over_chunks(each, q, view, storage.formats, batch, params.chunk)
            if out is not None:
                return out
            view = view.as_segments(batch.past_lens)
        return storage.attend(q, view, params, dtype)

    def states(self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype) -> States:
        """The decoder layer's states: see :meth:`StateLayer.states`."""
        assert self.beside is not None, "the config says which layers have a state"
        return self.beside.states(batch, tensors, dtype)

    @property
    def parts(self) -> tuple[CacheLayer, ...]:
        """The cache layers of the decoder layer: this one, and the one beside."""
        return (self,) if self.beside is None else (self, self.beside)

    def release_written(self) -> None:
        """Free a call's values on the device, which were copied to host memory while attention
        ran."""
        if self._written_back:
            self._written_back[-1].free_source()

    def append(self, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams) -> View:
        """Store k, v (B, T, H_kv, D); returns the view that these tokens' queries see, valid until
        the next call."""
        spec = self.spec
        own = batch if self.shared is None else self.shared.rest(batch)
        new = spec.kv.encode(k, v, spec.dtype)
        stored = self.fetch(own.lengths)
        if self.offloaded and own.block_table is not None:  # only the rows' pages were fetched
            table = own.block_table
            pages = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
            own = replace(own, block_table=pages.view_as(table))
        if self.read_by is not None and self.read_by.shares:  # the last layer that shares stores
            view = spec.kv.show(stored, new, own, params)
        else:
            new, view = spec.kv.store(stored, new, own, params)
            self._write_back(new, own.lengths)
        if self.shared is not None:
            view = self.shared.before(view, batch, params, fetched=self.offloaded)
        return view

    def in_place(self, dtype: torch.dtype) -> InPlace | None:
        """The tensors, if native code for heads of this dtype can do what :meth:`attend` does; None
        otherwise."""
        arrangement = self.spec.arrangement
        replaced = type(self) is not CacheLayer or "attend" in vars(self)
        if replaced or self.offloaded or self.shared is not None or dtype != self.spec.dtype:
            return None
        if self.reads is not None or self.read_by is not None:  # who stores depends on the others
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
        assert self.device is not None, "the layer is not allocated"
        return self.device

    def fetch(self, lengths: Lengths) -> Tensors:
        """The tensors on the layer's device, with room for the new tokens."""
        if not self.offloaded:
            return self.tensors
        prefetch, self.prefetched = self.prefetched, None
        if prefetch is None:
            prefetch = self.start_prefetch(lengths)
        assert prefetch.lengths == lengths, "a failed call drops its prefetch"
        here = prefetch.arrive()
        if self.after is not None and self.after.tensors and self.after.offloaded:
            self.after.prefetched = self.after.start_prefetch(lengths, prefetch)
        return here

    def start_prefetch(self, lengths: Lengths, before: Prefetch | None = None) -> Prefetch:
        """Start to copy the tokens that a call of these lengths reads to the layer's device.

        Args:
            before: that of the layer before, whose spare buffer is taken if it is on this device.
        """
        memory = spare = None
        if before is not None and before.memory.device == self._placed:
            memory, spare, before.spare = before.spare, before.memory, None
        return Prefetch.start(
            self.tensors,
            self.spec.arrangement,
            self._placed,
            lengths,
            memory=memory,
            spare=spare,
        )

    def _write_back(self, new: Tensors, lengths: Lengths) -> None:
        """Start to copy new values (B, T, ...) to an offloaded storage; :meth:`settle` stores
        them."""
        if self.offloaded:
            self._written_back.append(WriteBack(new, lengths, self._placed))

    def settle(self) -> None:
        """Finish pending write-backs."""
        arrived = list(self._written_back)
        self._written_back.clear()
        for each in arrived:
            self.spec.kv.write(self._tensors, each.arrive(), each.lengths)

    # Memory -------------------------------------------------------------------------------

    @property
    def borrowed(self) -> bool:
        """Whether the storage belongs to another cache."""
        return self.lender is not None

    def bytes_needed(self, device: torch.device | str) -> int:
        """Bytes of a full storage on a device, if its layer is placed there."""
        device = torch.device(device)
        return self.full_bytes() if self._on_device(device) else 0

    def full_bytes(self) -> int:
        """Bytes of a full storage, wherever it is; 0 if borrowed."""
        return 0 if self.borrowed else self.spec.nbytes(self.spec.capacity)

    def bytes_before(self) -> int:
        """Bytes that the storage took on its device before it grew or was converted, when others
        were allocated around it; 0 if it did neither."""
        if self.borrowed or self.host_bytes_needed() > 0 and not self.converted_from:
            return 0
        start = self.spec.growth.room_for(0, self.spec.capacity)
        grows = start < self.spec.capacity
        return max(self.converted_from, self.spec.nbytes(start) if grows else 0)

    def host_bytes_needed(self) -> int:
        """Bytes of host memory for a layer placed on another device."""
        offloaded = self.spec.residence.storage_device(torch.device("meta")) == devices.CPU
        return self.full_bytes() if offloaded else 0

    def tier_bytes(self) -> int:
        """Bytes of the host memory tiers for evicted pages."""
        return 0 if self.borrowed else HostPages.nbytes(self.spec)

    def growth_peak(self, device: torch.device | str) -> int:
        """Temporary bytes of the last step of growth, beside a full storage."""
        before = self.spec.growth.last_room(self.spec.capacity)
        return self.spec.nbytes(before) if before and self._on_device(torch.device(device)) else 0

    def _on_device(self, device: torch.device) -> bool:
        return self.spec.residence.storage_device(device) == device

    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(devices.rounded(tensor.nbytes) for tensor in self.own_tensors())

    def own_tensors(self) -> Iterator[Tensor]:
        """Yield all allocated tensors that are not borrowed."""
        if not self.borrowed and not self.shares:
            yield from self.tensors.values()
            yield from self.host_pages.all_tensors() if self.host_pages else ()

    def allocate(self, device: torch.device, tokens: int = 0) -> None:
        """Allocate the storage, zeroed, all of it or none.

        Args:
            tokens: least room of a row.

        Raises:
            torch.OutOfMemoryError: the device is full; nothing was allocated.
        """
        if self.lender is not None:
            if not self.lender.tensors:
                self.lender.allocate(device, tokens)
            self.borrow(self.lender)
            return
        if self.reads is not None and self.reads.tensors and self.reads.device == device:
            self._share()
            return
        after = self.read_by
        if after is not None and after.tensors and after.device == device:  # it moved back
            self._adopt(after)
            after._share()
            return
        room = self.spec.growth.room_for(tokens, self.spec.capacity)
        host_pages = HostPages.of(self.spec, device)
        self.tensors, self.room = self._zeros(device, room), room
        self.host_pages = host_pages
        self.device = device
        self.offloaded = not self._on_device(device)

    def borrow(self, lender: CacheLayer) -> None:
        """Share the storage of another cache's layer."""
        self.lender = lender
        self.tensors, self.room, self.device = lender.tensors, lender.room, lender.device
        self.host_pages, self.offloaded = lender.host_pages, lender.offloaded
        if lender.shares and self.reads is not None:
            self.shares, self._written_back = True, self.reads._written_back

    def _share(self) -> None:
        """Share the current storage of ``reads``."""
        assert self.reads is not None
        self._adopt(self.reads)
        self.shares = True
        self._update_sharers()

    def _adopt(self, other: CacheLayer) -> None:
        """Refer to another layer's storage."""
        self.tensors, self.room, self.device = other.tensors, other.room, other.device
        self.host_pages, self.offloaded = other.host_pages, other.offloaded
        self._written_back = other._written_back
        self.spec = replace(other.spec, reads=self.spec.reads)

    def _stop_sharing(self) -> None:
        """Leave the storage to the layers that share it."""
        after = self.read_by
        if after is not None and after.shares and not self.shares:
            self.settle()
            after.shares = False
        self._written_back, self.shares = [], False

    def _update_sharers(self) -> None:
        """Point the layers that share this one's storage to its current tensors."""
        if self.read_by is not None and self.read_by.shares:
            self.read_by._share()

    def _zeros(self, device: torch.device, tokens: int) -> dict[str, Tensor]:
        storage_device = self.spec.residence.storage_device(device)
        return devices.zeros(self.spec.layout(tokens), storage_device, near=device)

    @property
    def enough(self) -> int:
        """Tokens up to which :meth:`make_room` is a no-op."""
        return self.room if self.tensors and self.room < self.spec.capacity else sys.maxsize

    def make_room(self, tokens: int) -> None:
        """Grow to hold rows of ``tokens`` tokens, as far as the retention keeps them.

        Raises:
            torch.OutOfMemoryError: the device is full; the storage is unchanged.
        """
        tokens = min(tokens, self.spec.capacity)
        if self.tensors and tokens > self.room and not self.shares:
            self._change_room(self.spec.growth.room_for(tokens, self.spec.capacity))

    def shrink(self) -> None:
        """Shrink to the room of an empty layer."""
        least = self.spec.growth.room_for(0, self.spec.capacity)
        if self.tensors and self.room > least and not self.shares:
            self._change_room(least)

    def _change_room(self, tokens: int) -> None:
        """Reallocate with other room; old and new tensors coexist for a moment."""
        self.prefetched = None
        larger = self._zeros(self._placed, tokens)
        for name, tensor in larger.items():
            kept = min(tensor.shape[1], self.tensors[name].shape[1])
            tensor[:, :kept] = self.tensors[name][:, :kept]
        self.tensors, self.room = larger, tokens
        self._update_sharers()

    @property
    def prefetches(self) -> CacheLayer | None:
        """The layer whose tokens are prefetched while this one computes."""
        return None if self._on_device(torch.device("meta")) else self.after

    # Rows ---------------------------------------------------------------------------------

    def row(self, row: int, tokens: int) -> dict[str, Tensor]:
        """Stored entries of a row of ``tokens`` tokens, on the host."""
        if self.pages is None:
            return {name: tensor[row].cpu() for name, tensor in self.tensors.items()}
        index = self.pages.index(row, tokens)
        return {
            name: _flat(tensor)[index.to(tensor.device)].cpu()
            for name, tensor in self.tensors.items()
        }

    def rows(self, name: str, lens: Sequence[int]) -> Tensor:
        """A tensor's entries (R, S, ...) of the first rows, of ``lens`` tokens; S is the longest
        row's. Paged rows are copied, and shorter ones padded."""
        tensor = self.tensors[name]
        if self.pages is None:
            return tensor[: len(lens), self.spec.arrangement.slots(name, 0, max(lens, default=0))]
        flat = _flat(tensor)
        rows = [flat[self.pages.index(row, n).to(flat.device)] for row, n in enumerate(lens)]
        return pad_sequence(rows, batch_first=True) if rows else tensor[:0, :0]

    def set_rows(self, name: str, lens: Sequence[int], values: Tensor) -> None:
        """Inverse of :meth:`rows`, from the host; pages are allocated already."""
        tensor = self.tensors[name]
        if self.pages is None:
            slots = self.spec.arrangement.slots(name, 0, max(lens, default=0))
            return put(tensor, slots, values)
        for row, tokens in enumerate(lens):
            index = self.pages.index(row, tokens).to(tensor.device)
            _flat(tensor)[index] = values[row, :tokens].to(tensor.device)

    @property
    def pooled(self) -> dict[str, Tensor]:
        """The tensors of a paged cache that consist of pages; none where another layer has them."""
        return {} if self.shares else self.tensors

    def copy_page(self, to: int, page: int) -> None:
        """Copy page ``page`` to page ``to``."""
        for tensor in self.pooled.values():
            tensor[to].copy_(tensor[page])

    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Copy ``page`` of one tier to page ``to`` of another."""
        if self.pooled:  # the layer is in this process
            assert self.host_pages is not None, "only layers with tiers move pages"
            self.host_pages.move(self.tensors, page, tier, to, to_tier)

    def state(self, row: int) -> dict[str, Tensor]:
        """What a row keeps outside of pages: views, by tensor name."""
        return {}

    def set_state(self, row: int, state: Tensors) -> None:
        """Copy another row's :meth:`state` to this row."""

    def move_rows(self, moves: Sequence[tuple[int, int]], positions: slice, step: int) -> None:
        """Copy the stored tokens at these positions from row to row, for all ``(to, row)`` at once
        and ``step`` tokens at a time. Falls back to the host when a device is full, since failing
        half way would corrupt rows."""
        if self.shares:
            return
        for name, tensor in self.tensors.items():
            slots = self.spec.arrangement.slots(name, positions.start, positions.stop)
            for part in pieces(slots, step):
                if not _moved(tensor, moves, part):
                    _move_by_host(tensor, moves, part)

    def copy_on_write(self) -> None:
        """Clone the tensors, and leave the old ones to the forks that read them."""
        if not self.shares:
            self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
            self._update_sharers()

    def convert(self, spec: LayerSpec, done: list[dict[str, Tensor]], lens: Sequence[int]) -> None:
        """Convert to a spec with another storage, residence or growth.

        Args:
            done: tensors already converted for layers that share them; this layer's are added.
            lens: tokens in each row.

        Raises:
            torch.OutOfMemoryError: the device is full; the layer's contents are unchanged.
        """
        self.prefetched = None
        if self.shares:  # converted with the layer that owns the storage
            return
        try:
            for tensors in self._stored():
                if not any(tensors is other for other in done):
                    self._convert(tensors, spec, lens)
                    done.append(tensors)
            if not self.host_bytes_needed():
                self.converted_from = max(self.converted_from, self.full_bytes())
            self.spec = spec
            if self.device is not None:
                self.offloaded = not self._on_device(self.device)
            if self.host_pages is not None:
                self.host_pages.store_as(spec)
        finally:
            self._update_sharers()

    def convert_on_host(
        self, spec: LayerSpec, done: list[dict[str, Tensor]], lens: Sequence[int]
    ) -> None:
        """Convert in host memory, where there is room; tensors that are ``done`` move there too."""
        for tensors in self._stored():
            if any(tensors is other for other in done):
                tensors.update({name: each.to(devices.CPU) for name, each in tensors.items()})
        self.convert(replace(spec, residence=OnHost()), done, lens)

    def _stored(self) -> list[dict[str, Tensor]]:
        """The layer's dictionaries of tensors: that of a shared prefix, and its own."""
        shared = {} if self.shared is None else self.shared.tensors
        return [tensors for tensors in (shared, self.tensors) if tensors]

    def _convert(self, tensors: dict[str, Tensor], spec: LayerSpec, lens: Sequence[int]) -> None:
        """Convert a dictionary of tensors in place, since forks share it."""
        own, device = tensors is self.tensors, self._placed
        old_room = self.room if own else next(iter(tensors.values())).shape[1]
        room = spec.growth.room_for(old_room, spec.capacity) if own else old_room
        if self.pages is not None:  # all pages, whoever holds them
            old_room = next(iter(tensors.values())).shape[1]
        if not own or self.shared or self.pages:  # lengths unknown: convert it all
            lens = [old_room] * len(next(iter(tensors.values())))
        copy = HostCopy.of(tensors, lens)
        tensors.clear()
        if devices.allocator_rules(device.type) is not None:
            # Else a smaller storage would take a piece of the old one's segment, and keep it all.
            devices.release_idle_memory()
        converted = restored(copy, self.spec, spec, room, device)
        if converted is not None:
            tensors.update(converted)
            self.room = room if own else self.room
            return
        before = restored(copy, self.spec, self.spec, old_room, device)
        tensors.update(before or copy.tensors)
        if before is None and tensors is self.tensors:  # someone took the memory meanwhile
            self.spec, self.offloaded = replace(self.spec, residence=OnHost()), True
        raise torch.OutOfMemoryError(f"{device} has no room for a layer stored as {spec.storage}")

    @property
    def grew(self) -> bool:
        """Whether the storage grew."""
        return self.packable and self.spec.growth.last_room(self.spec.capacity) > 0

    @property
    def packable(self) -> bool:
        """Whether the storage is the layer's own, where a device gives memory in segments."""
        lies = bool(self.tensors) and not (self.borrowed or self.shares or self.offloaded)
        return lies and devices.allocator_rules(self._placed.type) is not None

    @property
    def fragmented(self) -> bool:
        """Whether the storage was converted from one that shared segments with others."""
        return self.packable and 0 < self.converted_from < LARGE

    def lift(self) -> HostCopy:
        """Move the storage to the host, for :meth:`put_back`."""
        self.prefetched = None
        copy = HostCopy.of(self.tensors, ())
        self.tensors.clear()
        return copy

    def put_back(self, copy: HostCopy) -> bool:
        """Reallocate the storage for what was lifted. False if the device has no room any more: the
        tensors are then on the host, and :meth:`convert_on_host` has to follow."""
        room = self.room if self.pages is None else next(iter(copy.tensors.values())).shape[1]
        back = restored(copy, self.spec, self.spec, room, self._placed)
        self.tensors.update(copy.tensors if back is None else back)
        return back is not None

    def take_rows(self, other: CacheLayer, rows: Sequence[int], tokens: int) -> None:
        """Copy these rows of another layer, up to ``tokens`` tokens. Row by row: gathering them
        first would need memory that no plan counts."""
        if self.shares:
            return
        self.make_room(tokens)
        for name, tensor in other.tensors.items():
            part = self.spec.arrangement.slots(name, 0, tokens)
            for to, row in enumerate(rows):
                for here, there in zip(
                    views(self.tensors[name][to], part), views(tensor[row], part), strict=True
                ):
                    here.copy_(there)

    def copy_from(self, other: CacheLayer) -> None:
        """Copy the contents of a layer of the same spec."""
        if self.shares:
            return
        self.make_room(other.room)
        for name, tensor in other.tensors.items():
            self.tensors[name][:, : tensor.shape[1]].copy_(tensor)

    def free(self) -> None:
        self._stop_sharing()
        self.tensors, self.room = {}, 0
        self.device = self.prefetched = self.shared = self.host_pages = None
        self.lender, self.converted_from = None, 0

    def move_out(self) -> None:
        """Free the storage, to be allocated on another device."""
        lender = self.lender
        self.free()
        self.lender = lender


def _flat(pool: Tensor) -> Tensor:
    """Pages (N, page, ...) viewed as one row of tokens."""
    return pool.flatten(0, 1)


def _moved(tensor: Tensor, moves: Sequence[tuple[int, int]], part: Slots) -> bool:
    """Move rows within their device; returns False, with nothing moved, if it is full."""
    with Attempt() as attempt:
        to, rows = torch.tensor(moves).to(tensor.device).unbind(1)
        tensor[index(to, part)] = tensor[index(rows, part)]
    return not attempt.why


def _move_by_host(tensor: Tensor, moves: Sequence[tuple[int, int]], part: Slots) -> None:
    """Move rows one by one through the host: slower, but needs no device memory."""
    kept = {
        row: [view.to(devices.CPU, copy=True) for view in views(tensor[row], part)]
        for row in {row for _, row in moves}
    }
    for to, row in moves:
        for view, value in zip(views(tensor[to], part), kept[row], strict=True):
            view.copy_(value)

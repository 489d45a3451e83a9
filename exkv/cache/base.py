"""What every cache is: a list of per-layer stores, and which tokens each row holds.

``KVCache`` knows rows and their tokens; a ``CacheLayer`` (``layer.py``) knows how one layer's keys
and values are kept and attended to, by four properties: ``storage.py``, ``retention.py``,
``residence.py``, ``growth.py``. A kind of cache is a choice of them: see ``presets.py``.

A layer's storage comes to life in ``CacheLayer.allocate(device)`` and nowhere else. The cache is
registered with its model, and whichever comes last, the cache or the placement of the layer,
makes the call. So eager and lazy, before and after ``load``, are the same thing.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias

import torch

from exkv import devices, epochs
from exkv.batch import Lengths
from exkv.checkpoint import ModelConfig, WeightReader
from exkv.errors import PlacementError

from .checks import MOST_ROWS, whole, whole_type
from .file import Elsewhere, load, save
from .layer import CacheLayer
from .lease import Desk, Lease, changes_cache, mirrored, reads_cache
from .paging.growth import Paged
from .paging.pool import KnownPage, PagePool, PageTable
from .paging.swap import SwappedPages
from .rows import Rows
from .shared import Shared
from .spec import PROPERTIES, LayerSpec, LayerWindows, Prefix

logger = logging.getLogger(__name__)

#: Has other processes make a call of a cache, too: by name and arguments, and how it is made here.
Mirror: TypeAlias = Callable[
    ["KVCache", str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any
]


class CacheOwner(Protocol):
    """What a cache asks of its model."""

    config: ModelConfig
    dtype: torch.dtype
    max_input_len: int
    checkpoint: WeightReader | None
    pool_kind: type[PagePool]

    @property
    def cache_map(self) -> dict[int, torch.device]:
        """Decoder layer -> device, for the layers that are placed."""

    def check_cache(self, cache: KVCache) -> None:
        """Raise PlacementError where the model is loaded and has no room for this cache."""

    def register_cache(self, cache: KVCache) -> None:
        """Remember the cache, weakly, and allocate its layers as they are placed."""

    def cache_changed(self, cache: KVCache) -> None:
        """Take note that the cache's layers take other bytes from now on."""


class KVCache(Rows):
    """The cache of a whole model: ``layers`` on their devices, ``sequences`` on the host.

    Args:
        model: the model that it serves, loaded or not.
        max_seq_len: tokens a row can hold; -1 for the model's ``max_position_embeddings``. In a
            cache of one row in pages these are the tokens of the pool, for however many jobs an
            ``exkv.Engine`` runs in it.
        batch_size: rows.
        lazy: ExLlamaV2's word, accepted for its users. It makes no difference here: storage is
            always allocated as soon as both the cache and its layers' devices are known.
        dtype: of the stored values where the kind stores floats; None for the model's.
        properties: what the kind of cache takes besides; here ``storage``, ``retention``,
            ``residence`` and ``growth`` of every layer, as :class:`LayerSpec` has them.

    Attributes:
        IGNORED: of a kind: what it takes for others' sake and makes no use of, each with why.
        call_len: tokens that calls promise to bring a row at most, which is what the planner
            leaves room for; None for the model's ``max_input_len``.
        sequences: the token ids of each row, in order; what prefix reuse compares with.
        rotary_variants: for which variant of the model's rotary positions each row's keys were
            made, where it has several (longrope); None where that isn't known.
        made_with: by which adapter each row's keys and values were made, see :class:`Rows`.
        stale: rows whose stored keys are not those of their tokens, since tokens were taken back
            that had overwritten others; the model computes them again when they are next used.
        written: how many tokens each row has had since it was empty or computed again; where that
            is more than it has, a ring may lack what they overwrote.
        pages: of a cache whose growth is ``Paged``, where its rows lie; None of others.

    Raises:
        ValueError: a size below 1, or a property that makes no sense.
        TypeError: a property that the kind doesn't have.
        PlacementError: the model is loaded and a device has no room; nothing stays allocated.
    """

    IGNORED: ClassVar[Mapping[str, str]] = {}
    #: Of a model that lies on several hosts.
    mirror: Mirror | None = None
    elsewhere: Elsewhere | None = None

    def __init__(
        self,
        model: CacheOwner,
        max_seq_len: int = -1,
        batch_size: int = 1,
        lazy: bool = False,
        dtype: torch.dtype | None = None,
        **properties: Any,
    ) -> None:
        self.lazy = lazy
        self.call_len: int | None = None
        self._begin(model, self.layer_specs(model, max_seq_len, batch_size, dtype, **properties))

    @classmethod
    def of(
        cls,
        model: CacheOwner,
        specs: Sequence[LayerSpec],
        call_len: int | None = None,
        lender: KVCache | None = None,
    ) -> KVCache:
        """A cache of this kind with layers of these specs; errors as of the constructor.

        Args:
            lender: a cache in pages, whose pool the new one's rows share.
        """
        cache = cls.__new__(cls)
        cache.lazy, cache.call_len = False, call_len
        cache._begin(model, specs, lender)
        return cache

    def _begin(
        self, model: CacheOwner, specs: Sequence[LayerSpec], lender: KVCache | None = None
    ) -> None:
        self.model = model
        prefix = specs[0].prefix
        self.batch_size, self.dtype = specs[0].batch_size, specs[0].dtype
        self.max_seq_len = specs[0].max_seq_len + (min(prefix.lens) if prefix else 0)
        Rows.__init__(self, prefix or Prefix(rows=(), lens=(0,) * self.batch_size))
        self._sharers: list[weakref.ref[KVCache]] = []
        #: The epoch in which every placed layer was found to have its storage.
        self.allocated_in = -1
        #: An epoch, and for how many tokens of a row there is room in it.
        self._room = (-1, 0)
        self._desk = Desk(repr(self))
        self.layers = tuple(make_layers(specs))
        me = weakref.ref(self)
        for layer in self.layers:
            layer.row_lens = lambda: [] if (cache := me()) is None else cache.seq_lens
        if lender is None:
            self._use_pages(self._new_pool())
        else:
            self._borrow(lender)
        model.check_cache(self)
        self.allocate(model.cache_map)
        model.register_cache(self)

    @classmethod
    def layer_specs(
        cls,
        model: CacheOwner,
        max_seq_len: int = -1,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        **properties: Any,
    ) -> list[LayerSpec]:
        """Each layer's spec in such a cache; arguments and errors as of the constructor."""
        config = model.config
        if max_seq_len == -1:
            max_seq_len = config.max_position_embeddings
        spec = LayerSpec(
            batch_size=whole("batch_size", batch_size, most=MOST_ROWS),
            max_seq_len=whole("max_seq_len", max_seq_len),
            num_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=model.dtype if dtype is None else dtype,
        )
        properties = cls.known_options(properties)
        return [
            cls.compose(spec, config, layer, **properties)
            for layer in range(config.num_hidden_layers)
        ]

    @classmethod
    def known_options(cls, properties: dict[str, Any]) -> dict[str, Any]:
        """Those of the properties that mean something here.

        Raises:
            TypeError: one that this kind doesn't have.
        """
        takes = cls.options()
        for name in properties:
            if name in cls.IGNORED:
                _note_once(cls, name)
            elif name not in takes:
                names = ", ".join(("max_seq_len", "batch_size", "lazy", "dtype", *takes))
                raise TypeError(f"{cls.__name__} has no {name!r}; it takes {names}")
        return {name: value for name, value in properties.items() if name in takes}

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """What this kind of cache takes beside sizes and ``dtype``: what ``compose`` names."""
        found: dict[str, None] = {}
        for kind in cls.__mro__:
            if kind is KVCache:
                return (*found, *PROPERTIES)
            if (compose := vars(kind).get("compose")) is None:
                continue
            parameters = inspect.signature(compose.__func__).parameters.values()
            found |= {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
        return tuple(found)

    @classmethod
    def compose(
        cls, spec: LayerSpec, config: LayerWindows, layer: int, *_: Any, **options: Any
    ) -> LayerSpec:
        """The spec of one layer of this kind, from one with all properties as they are by default.

        A kind overrides it, and names its options as keyword-only arguments; here they are the four
        properties.
        """
        return replace(spec, **{name: each for name, each in options.items() if each is not None})

    # Users --------------------------------------------------------------------------------

    def lease(self, user: str) -> Lease:
        """The cache for a user who works with it over several calls: see :class:`Lease`.

        Raises:
            CacheUseError: somebody has it; the message says who.
        """
        return self._desk.take(user)

    def use(self, user: str) -> AbstractContextManager[None]:
        """The cache for the length of a ``with`` block, or for that of a call in the name of the
        lease for which this thread acts.

        Raises:
            CacheUseError: somebody has it, or it was freed under the lease.
        """
        return self._desk.use(user)

    def revoke(self, by: str) -> None:
        """Take the cache from whoever uses it, before its storage is freed: the user's next call
        raises CacheUseError.

        Raises:
            CacheUseError: another thread is in the middle of a call.
        """
        self._desk.revoke(by)

    # Storage ------------------------------------------------------------------------------

    def allocate(self, cache_map: dict[int, torch.device]) -> None:
        """Give every placed layer its storage where it has none yet; all of them or none."""
        missing = [index for index in cache_map if not self.layers[index].tensors]
        full = self._first_full(cache_map, missing)
        if full is None:
            return
        for index in missing:
            self.layers[index].free()
        devices.release_idle_memory()
        device = cache_map[full]
        needed, available = self.layers[full].bytes_needed(device), devices.available_memory(device)
        total = sum(self.layers[i].bytes_needed(device) for i in missing if cache_map[i] == device)
        raise PlacementError(
            f"{self!r} needs {total:,} bytes on {device} for the layers that are there, and "
            f"{available:,} are available; layer {full} found no room. Build the cache before "
            "load_autosplit, so that it is counted, or make it shorter, or use an 8-bit one",
            unit=f"cache layer {full}",
            device=str(device),
            needed=needed,
            available=available,
        )

    def _new_pool(self) -> PagePool | None:
        """As large as the layers' own; None where these are not in pages."""
        spec = self.layers[0].spec
        if not isinstance(spec.growth, Paged):
            return None
        pages = spec.growth.pool_size(spec.batch_size, spec.max_seq_len)
        tiers = [(tier.pages, tier.storage is not None) for tier in spec.growth.tiers]
        return self.model.pool_kind(pages, spec.growth.page, tiers)

    def _use_pages(self, pool: PagePool | None) -> None:
        """Rows take their pages from this pool, and have none."""
        self.pages = None if pool is None else PageTable(pool, self.batch_size)
        for layer in self.layers:
            layer.pages = self.pages
        if self.pages is not None:
            weakref.finalize(self, self.pages.release).atexit = False

    def _borrow(self, lender: KVCache) -> None:
        """Use the storage of another cache, and pages of its pool."""
        assert lender.pages is not None
        self._use_pages(lender.pages.pool)
        for layer, other in zip(self.layers, lender.layers, strict=True):
            layer.borrow(other)
        self.join(lender)

    def _first_full(self, cache_map: dict[int, torch.device], missing: list[int]) -> int | None:
        """Allocate; the layer that ran out of memory, once its error's frames are gone."""
        for index in missing:
            try:
                self.layers[index].allocate(cache_map[index])
            except torch.OutOfMemoryError:
                return index
        return None

    @mirrored
    def free(self) -> None:
        """Give the storage back; the model calls it when it unloads.

        Raises:
            CacheUseError: another thread is in the middle of a call.
        """
        self.revoke("cache.free")
        for layer in self.layers:
            layer.free()
        for row in range(self.batch_size):
            self._cut(row, 0)
        self._sharers = []
        self._use_pages(self._new_pool())

    def nbytes(self) -> dict[torch.device, int]:
        """Bytes taken on each device now, the host included."""
        total: dict[torch.device, int] = {}
        for layer in self.layers:
            for tensor in layer.own_tensors():
                taken = devices.rounded(tensor.nbytes)
                total[tensor.device] = total.get(tensor.device, 0) + taken
        return total

    def make_room(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """See that rows of these lengths fit; called once a forward call.

        Args:
            starts: from which token on rows will be written to; None for those that are new.

        Raises:
            torch.OutOfMemoryError: a device is full; the tokens are as they were.
            OutOfPagesError: rows that share a pool have no pages left in it; likewise.
        """
        if self.pages is not None:
            starts = self.seq_lens[: len(lengths)] if starts is None else starts
            self.pages.reserve(starts, lengths, self)
            return
        own = (length - shared for length, shared in zip(lengths, self.prefix_lens, strict=False))
        tokens = max(own, default=0)
        epoch = epochs.current()
        if self._room[0] != epoch:
            self._room = epoch, min(layer.enough for layer in self.layers)
        if tokens > self._room[1]:
            for layer in self.layers:
                layer.make_room(tokens)

    @mirrored
    def copy_page(self, to: int, page: int) -> None:
        """Let a page of the pool hold what another one does; whose they are is in ``pages``."""
        for layer in self.layers:
            layer.copy_page(to, page)

    @mirrored
    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Let page ``to`` of one tier hold what ``page`` of another one does; 0 is the pool, then
        come those in host memory."""
        for layer in self.layers:
            layer.move_page(page, tier, to, to_tier)

    @mirrored
    def copy_out(self, pages: Sequence[int]) -> SwappedPages:
        """What these pages of the pool hold, in host memory."""
        return SwappedPages.of([layer.tensors for layer in self.layers], pages)

    @mirrored
    def copy_in(self, away: SwappedPages, pages: Sequence[int], first: int = 0) -> None:
        """Let pages of the pool hold what was copied out, from its page ``first`` on."""
        away.copy_to([layer.tensors for layer in self.layers], pages, first)

    def placed(self, lengths: Lengths) -> Lengths:
        """The lengths of a call for which there is room, with where its rows lie."""
        if self.pages is None:
            return lengths
        return replace(lengths, pages=self.pages.block_table(lengths.final))

    def row_limit(self, row: int) -> int:
        """Tokens that this row can hold: a fork's may be fewer once it left what is shared."""
        if self.pages is not None:
            return self.max_seq_len
        return self.prefix_lens[row] + self.layers[0].spec.max_seq_len

    # Tokens -------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row, in whichever layer (Hugging Face's name)."""
        return self.current_seq_len

    @property
    def current_seq_len(self) -> int:
        """Tokens in the longest row. Setting it to less forgets the tokens after."""
        return max(self.seq_lens)

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        if length > min(self.seq_lens):
            raise ValueError(f"current_seq_len can only shrink: {self.seq_lens} to {length}")
        self.crop(length)

    @mirrored
    @changes_cache
    def reset(self) -> None:
        """Forget every token, and give back what a growing cache has grown to."""
        self.crop(0)
        for layer in self.layers:
            layer.give_room_back()

    @mirrored
    @changes_cache
    def crop(self, max_length: int | Sequence[int]) -> None:
        """Keep at most the first ``max_length`` tokens of each row; one number, or one a row."""
        limits = (
            list(max_length) if isinstance(max_length, Sequence) else [max_length] * self.batch_size
        )
        if min(whole_type("max_length", limit) for limit in limits) < 0:
            raise ValueError(f"crop keeps tokens, and {min(limits)} is negative: see trim")
        for row, limit in enumerate(limits[: self.batch_size]):
            self._cut(row, limit)

    def take_back(self, kept: Sequence[int], written: Sequence[int]) -> None:
        """Back to the first ``kept`` tokens of each row after a call that failed, of whose tokens
        some, perhaps ``written`` in all, may have been stored."""
        for layer in self.layers:
            layer.prefetched = None
        for row, (keep, length) in enumerate(zip(kept, written, strict=False)):
            self.written[row] = max(self.written[row], length)
            self._cut(row, keep)

    def _cut(self, row: int, kept: int) -> None:
        self._copy_on_write(row, kept)
        if self.pages is not None:
            self.pages.cut(row, min(kept, len(self.sequences[row])))
        written = self.written[row]
        lost = any(layer.spec.arrangement.lost(written, kept) for layer in self.layers)
        self.forget_after(row, kept, lost=lost)

    @mirrored
    @changes_cache
    def trim(self, n: int) -> None:
        """Forget the last ``n`` tokens of each row (all that it has, if it has fewer)."""
        if whole_type("n", n) < 0:
            raise ValueError(f"trim forgets tokens, and {n} is negative")
        self.crop([max(length - n, 0) for length in self.seq_lens])

    # Rows ---------------------------------------------------------------------------------

    @mirrored
    @changes_cache
    def reorder(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Make row ``i`` what row ``rows[i]`` was (Hugging Face's ``reorder_cache(beam_idx)``).

        A row may be taken several times or not at all; rows after the last one given forget
        their tokens. Where a row begins with the same tokens as the one that it becomes, these
        stay where they are: for beams over one prompt the cost does not grow with the prompt.

        Raises:
            ValueError: more rows than ``batch_size``, or one that isn't there.
        """
        source = [int(row) for row in rows]
        if len(source) > self.batch_size:
            raise ValueError(f"{len(source)} rows, but the cache was built for {self.batch_size}")
        for row in source:
            if not 0 <= row < self.batch_size:
                raise ValueError(f"there is no row {row}: the cache has {self.batch_size}")
        common = [self.common(to, row) for to, row in enumerate(source)]
        if self.pages is None:
            self._move_rows(source, common)
        else:
            self.pages.reorder(source)
        self.rename(source, common)

    def _move_rows(self, source: Sequence[int], common: Sequence[int]) -> None:
        """Store in row ``i`` what row ``source[i]`` stores."""
        first = [self._in_place(to, row, common[to]) for to, row in enumerate(source)]
        last = [len(self.sequences[row]) - self.prefix_lens[row] for row in source]
        moves = [(to, row) for to, row in enumerate(source) if to != row and first[to] < last[to]]
        for to, _ in moves:
            self._copy_on_write(to, 0)
        if moves:
            positions = slice(min(first[to] for to, _ in moves), max(last[to] for to, _ in moves))
            for layer in self.layers:
                layer.move_rows(moves, positions, self.model.max_input_len)

    def _in_place(self, to: int, row: int, common: int) -> int:
        """In how many of the first places both rows hold the same."""
        if self.rotary_variants[to] != self.rotary_variants[row] or self.stale & {to, row}:
            return 0
        if self.prefix_of(to) != self.prefix_of(row):
            return 0
        written, new = max(self.written[to], self.written[row]), len(self.sequences[row])
        kept = min(layer.spec.arrangement.in_place(common, written, new) for layer in self.layers)
        return max(kept - self.prefix_lens[row], 0)

    @mirrored
    @changes_cache
    def select(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Keep these rows, in this order, as the first ones; the others forget their tokens."""
        self.reorder(rows)

    @mirrored
    @changes_cache
    def repeat_interleave(self, repeats: int, rows: int | None = None) -> None:
        """Make every row into ``repeats`` rows beside each other: a, b -> a, a, b, b.

        Args:
            rows: how many of the first rows; None for those up to the last that has tokens.

        Raises:
            ValueError: that makes more rows than ``batch_size``.
        """
        repeats = whole("repeats", repeats)
        if rows is None:
            rows = max((i + 1 for i, sequence in enumerate(self.sequences) if sequence), default=0)
        self.reorder([row for row in range(rows) for _ in range(repeats)])

    @mirrored
    @reads_cache
    def clone(self) -> KVCache:
        """A second cache of the same kind on the same model, with the same tokens in it."""
        other = self.of(self.model, [layer.spec for layer in self.layers], self.call_len)
        if shared := [layer.shared.tensors for layer in self.layers if layer.shared is not None]:
            other._share(shared, self)
        for layer, copy in zip(self.layers, other.layers, strict=True):
            copy.copy_from(layer)
        if self.pages is not None and other.pages is not None:
            other.pages.become(self.pages)
        other.become(self.sequences, self.stale)
        other.written = list(self.written)
        other.rotary_variants = list(self.rotary_variants)
        other.made_with = list(self.made_with)
        other.alike = self.alike.copy()
        return other

    @mirrored
    @reads_cache
    def fork(
        self, n: int = 1, max_seq_len: int | None = None, call_len: int | None = None
    ) -> KVCache:
        """A cache whose rows begin with this one's tokens, ``n`` rows for each, beside each other.

        What is stored of those tokens is shared, not copied: however many forks there are, each
        has memory of its own only for what comes after, and runs none of it again. Each row goes
        its own way, and what is shared is copied on write: once this cache goes back and on.
        (Rings, also those of recent tokens, and rows that longrope may change are copied at once:
        they are written to in place.)

        Args:
            n: rows for each row that has tokens.
            max_seq_len: tokens a row can hold, those that are shared included; None for as many as
                here.
            call_len: tokens that a call on the fork will bring a row at most; 1 where it only
                decodes, and needs no room for longer calls. None for the model's limit.

        Raises:
            ValueError: n below 1, a ``max_seq_len`` that doesn't hold what is there, or a fork of
                a fork.
            PlacementError: there is no room.
        """
        source = [row for row, ids in enumerate(self.sequences) if ids for _ in range(n)]
        limit = self.max_seq_len if max_seq_len is None else max_seq_len
        if n < 1 or not source or limit <= self.current_seq_len:
            raise ValueError(
                f"a fork into {n} rows of up to {limit} tokens each, with {self.current_seq_len} "
                "there: n must be at least 1, something must be there, and room for one token more"
            )
        if self.prefix_rows:
            raise ValueError("this is a fork itself: fork the cache that it came from")
        if self.pages is not None:
            return self._fork_pages(source, limit, call_len)
        lens = [len(self.sequences[row]) for row in source]
        prefix = Prefix(rows=tuple(source), lens=tuple(lens)) if self._can_share(limit) else None
        own = limit - min(lens) if prefix else limit
        specs = [
            replace(layer.spec, batch_size=len(source), max_seq_len=own, prefix=prefix)
            for layer in self.layers
        ]
        fork = self.of(self.model, specs, call_len)
        if prefix:
            fork._share([layer.tensors for layer in self.layers], self)
        else:
            for layer, copy in zip(self.layers, fork.layers, strict=True):
                copy.take_rows(layer, source, max(lens))
        self._name_rows(fork, source)
        return fork

    def _fork_pages(self, source: list[int], limit: int, call_len: int | None) -> KVCache:
        """A fork whose rows hold the same pages, and take more from the same pool."""
        fork = self.sharing_pool(len(source), limit, call_len)
        assert self.pages is not None and fork.pages is not None
        for to, row in enumerate(source):
            fork.pages.hold(to, self.pages.rows[row])
        self._name_rows(fork, source)
        return fork

    @mirrored
    def sharing_pool(
        self, rows: int, max_seq_len: int | None = None, call_len: int | None = None
    ) -> KVCache:
        """An empty cache of so many rows that takes its pages from this one's pool.

        Raises:
            ValueError: this cache has no pages.
        """
        if self.pages is None:
            raise ValueError(f"{self!r} has no pages to share: give it growth=Paged()")
        self.allocate(self.model.cache_map)  # or whoever shares it would have a pool each
        limit = self.max_seq_len if max_seq_len is None else max_seq_len
        specs = []
        for layer in self.layers:
            assert isinstance(layer.spec.growth, Paged)
            growth = replace(layer.spec.growth, pages=self.pages.pool.pages)
            specs.append(replace(layer.spec, batch_size=rows, max_seq_len=limit, growth=growth))
        return self.of(self.model, specs, call_len, lender=self)

    @changes_cache
    def set_row(
        self,
        row: int,
        tokens: Sequence[int],
        pages: Sequence[int] = (),
        made_with: str | None = None,
        known: Sequence[KnownPage] = (),
    ) -> None:
        """Let an empty row of a cache in pages hold these tokens, which lie in these pages of the
        pool, or in these known ones, as far as they go; whoever calls fills others.

        Raises:
            OutOfPagesError: known ones are in host memory, and there is no page to bring one to.
        """
        assert self.pages is not None
        self.pages.hold_known(row, known, self)
        self.pages.hold(row, pages)
        self.name_row(row, tokens, made_with)

    @mirrored
    def name_row(self, row: int, tokens: Sequence[int], made_with: str | None) -> None:
        """Note that an empty row has these tokens, whose keys and values are stored."""
        self.sequences[row] = list(tokens)
        self.written[row] = len(tokens)
        self.made_with[row] = made_with

    @mirrored
    @changes_cache
    def move_row(self, row: int, other: KVCache, source: int) -> None:
        """Make a row what another one is, of this cache or of one that shares its pool; that one is
        empty then. Both are in pages."""
        assert self.pages is not None and other.pages is not None
        self._cut(row, 0)
        variant, made_with = other.rotary_variants[source], other.made_with[source]
        self.set_row(row, other.sequences[source], other.pages.rows[source])
        self.rotary_variants[row], self.made_with[row] = variant, made_with
        other._cut(source, 0)

    def _name_rows(self, fork: KVCache, source: Sequence[int]) -> None:
        """Note what the rows of a fork hold."""
        fork.become([self.sequences[row] for row in source])
        fork.alike = self.alike_among(source)
        fork.written = [self.written[row] for row in source]
        fork.stale = {to for to, row in enumerate(source) if row in self.stale}
        fork.rotary_variants = [self.rotary_variants[row] for row in source]
        fork.made_with = [self.made_with[row] for row in source]

    def _can_share(self, limit: int) -> bool:
        """Whether what is stored stays as it is, and seen, while rows grow here, and to ``limit``
        tokens in a fork."""
        longest = max(self.max_seq_len, limit)
        stay = all(layer.spec.arrangement.stays(longest) for layer in self.layers)
        return stay and not self.stale and not any(self.rotary_variants)

    def _share(self, tensors: Sequence[dict[str, torch.Tensor]], owner: KVCache) -> None:
        """Begin rows with what these tensors of another cache store, those of a layer each."""
        for layer, shared in zip(self.layers, tensors, strict=True):
            layer.shared = Shared(shared, self.prefix_rows, self.prefix_lens)
        self.join(owner)

    def join(self, owner: KVCache) -> None:
        """Be of the family that shares the owner's storage."""
        self._sharers = owner._sharers
        living = [ref for ref in self._sharers if ref() is not None]
        self._sharers[:] = {*living, weakref.ref(owner), weakref.ref(self)}

    def owner(self) -> KVCache | None:
        """Of a fork, the cache whose tokens it begins with; None where that has gone on since."""
        return next((cache for cache in self.family() if not cache.prefix_rows), None)

    def lender(self) -> KVCache | None:
        """Of a cache that uses another one's pages, that one, as long as it lives."""
        of = self.layers[0].lender
        return next((cache for cache in self.family() if cache.layers[0] is of), None)

    def share_layer(self, index: int) -> None:
        """A fork's layer begins with what the owner's stores now, after both were allocated anew;
        nothing changes in another cache."""
        if self.prefix_rows and (owner := self.owner()) is not None:
            tensors = owner.layers[index].tensors
            self.layers[index].shared = Shared(tensors, self.prefix_rows, self.prefix_lens)

    def family(self) -> list[KVCache]:
        """This cache, and those that share storage with it."""
        return [cache for ref in self._sharers if (cache := ref()) is not None] or [self]

    def _copy_on_write(self, row: int, kept: int) -> None:
        """Before what comes after the first ``kept`` tokens of a row is overwritten: leave the
        tensors to the forks that still read it, and go on with copies."""
        if self.prefix_rows or self.pages is not None or len(self._sharers) < 2:
            return
        shared = [
            length
            for fork in self.family()
            for other, length in zip(fork.prefix_rows, fork.prefix_lens, strict=False)
            if other == row
        ]
        if max(shared, default=0) > kept:
            for layer in self.layers:
                layer.copy_on_write()
            me = weakref.ref(self)
            self._sharers.remove(me)
            self._sharers = []

    @changes_cache
    @mirrored
    def convert(self, /, **properties: Any) -> None:
        """Store the same in another way: ``storage``, ``residence`` or ``growth``, of every layer.

        Tokens stay; of forks and the cache that they came from, all are converted. Each layer goes
        through the host, so that there is never more of it on a device than before or after.

        Raises:
            ValueError: another retention: what was forgotten can't come back; or a storage with
                recent tokens as floats for rows that share a beginning.
            torch.OutOfMemoryError: a device has no room for the new; layers before that one are
                converted, all hold what they did, and the cache can be used.
        """
        if "retention" in properties:
            raise ValueError("a cache can't keep other tokens than it does: build another one")
        growths = self.layers[0].spec.growth, properties.get("growth")
        if growths[1] is not None and any(isinstance(each, Paged) for each in growths):
            raise ValueError(
                "a cache can't go into pages or out of them: save it, and load it into another one"
            )
        family = self.family()
        specs = [
            [replace(layer.spec, **properties) for layer in layers]
            for layers in zip(*(cache.layers for cache in family), strict=True)
        ]
        if any(layers[0].storage.recent for layers in specs) and len(family) > 1:
            raise ValueError(
                f"{len(family)} caches share storage, and recent tokens as floats can't be shared: "
                "give the forks up first, or build another cache"
            )
        for cache in family:  # between two calls of whoever uses them, they may be stored anew
            cache._desk.check_quiet("cache.convert")
        if self.pages is not None:
            self.pages.pool.forget_tiers()
        try:
            for index, layer_specs in enumerate(specs):
                done: list[dict[str, torch.Tensor]] = []
                for cache, spec in zip(family, layer_specs, strict=True):
                    cache.layers[index].convert(spec, done, cache.seq_lens)
        finally:
            for cache in family:
                self.model.cache_changed(cache)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cache can't be pickled: it belongs to a model and its devices. Write it by "
            "cache.save(file), and read the file by load(file) into a cache of the same kind"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        """The model is not copied: see :meth:`clone`."""
        memo[id(self)] = copy = self.clone()
        return copy

    @mirrored
    @reads_cache
    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the tokens and what is stored of them: see ``exkv.cache.file``.

        The file is replaced once all is written, and is as it was where that fails.

        Raises:
            ValueError: this is a fork, which stores only a part of what it knows, or the file is a
                folder, a device or a pipe.
            OSError: the disk is full, or the folder isn't there or can't be written to.
        """
        save(self, file)

    @mirrored
    @changes_cache
    def load(self, file: str | os.PathLike[str]) -> None:
        """Replace the contents by those that :meth:`save` wrote, from a cache of the same kind
        on the same model; the devices, the length and the number of rows may be others.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, of another kind of cache, of another model or of other
                weights, or has more rows or tokens than fit here; this cache stays as it was.
        """
        load(self, file)

    def __repr__(self) -> str:
        kind, rows = type(self).__name__, self.batch_size
        return f"{kind}(max_seq_len={self.max_seq_len}, batch_size={rows}, dtype={self.dtype})"


_noted: set[tuple[str, str]] = set()


def _note_once(kind: type[KVCache], name: str) -> None:
    """Say of an option that is taken for others' sake that it changes nothing; once a process."""
    if (kind.__name__, name) not in _noted:
        _noted.add((kind.__name__, name))
        logger.warning("%s makes no use of %s: %s", kind.__name__, name, kind.IGNORED[name])


def make_layers(specs: Sequence[LayerSpec]) -> list[CacheLayer]:
    """The layers of a cache, each knowing the next; without storage."""
    layers = [CacheLayer(spec) for spec in specs]
    for layer, after in pairwise(layers):
        layer.after = after
    return layers

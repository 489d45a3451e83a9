"""The cache of a model: a list of cache layers, and the tokens of each row.

``KVCache`` tracks rows and their tokens; a ``CacheLayer`` (``layer.py``) stores one layer's keys
and values and attends to them, by four properties: ``storage.py``, ``retention.py``,
``residence.py``, ``growth.py``. A kind of cache is a choice of them: see ``presets.py``.

A layer's storage is allocated in ``CacheLayer.allocate(device)`` and nowhere else. The cache is
registered with its model, and whichever comes last, the cache or the placement of the layer, makes
the call. So eager and lazy, before and after ``load``, are the same thing.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from exkv import devices, epochs
from exkv.batch import Lengths
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.errors import Attempt, PlacementError

from .checks import MOST_ROWS, whole, whole_type
from .convert import HostCopy
from .file import Elsewhere, load, save
from .layer import CacheLayer
from .lease import Lease, Leases, changes_cache, mirrored, reads_cache
from .paging.growth import Paged
from .paging.pool import KnownPage, PagePool, PageTable
from .paging.swap import SwappedPages
from .rows import Rows
from .shared import Shared
from .spec import PROPERTIES, LayerSpec, LayerWindows, Prefix, placed
from .state import StateLayer, with_snapshots

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Repeats a cache's method call in other processes: cache, name, arguments, and the local call.
Mirror: TypeAlias = Callable[
    ["KVCache", str, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any
]


class HasConfig(Protocol):
    """What layer specs are derived from."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...


class CacheOwner(Protocol):
    """What a cache needs of its model."""

    config: ModelConfig
    dtype: torch.dtype
    max_input_len: int
    checkpoint: Checkpoint | None
    pool_kind: type[PagePool]

    @property
    def cache_map(self) -> dict[int, torch.device]:
        """Decoder layer -> device, for the placed layers."""

    def check_cache(self, cache: KVCache) -> None:
        """Raise PlacementError if the model is loaded and has no room for this cache."""

    def register_cache(self, cache: KVCache) -> None:
        """Keep a weak reference, and allocate the cache's layers as they are placed."""

    def cache_changed(self, cache: KVCache) -> None:
        """Take the new size of the cache's layers into account."""


class KVCache(Rows):
    """The cache of a whole model: ``layers`` on their devices, ``sequences`` on the host.

    Args:
        model: the model that it serves, loaded or not. A config, or None, as in transformers, for
            the first model that it is used with, which must have this config (``config`` is
            another name). Until then it has no storage, and no plan counts it.
        max_seq_len: capacity of a row in tokens; -1 for the model's ``max_position_embeddings``. In
            a paged cache of one row it is the size of the pool that an ``exkv.Engine`` shares among
            its jobs.
        batch_size: rows; None for 1, or for those of the first call where ``model`` is None.
        lazy: accepted for ExLlamaV2 compatibility, without effect: storage is always allocated as
            soon as both the cache and its layers' devices are known.
        dtype: of stored floats; None for the model's.
        snapshots: make room for a snapshot of each row's recurrent states, so that rejected draft
            tokens can be rolled back (speculation). Doubles the bytes of states; no effect on
            models without any.
        max_cache_len, max_batch_size: transformers' names of ``max_seq_len`` and ``batch_size``.
        properties: options of the kind; for ``KVCache`` itself ``storage``, ``retention``,
            ``residence`` and ``growth`` of every layer, see :class:`LayerSpec`.

    Attributes:
        sequences: token ids of each row; what else is known of rows is in :class:`Rows`.
        IGNORED: options that the kind accepts for compatibility and ignores, each with the reason.
        call_len: upper bound on new tokens a row in one call, for which the planner leaves room;
            None for the model's ``max_input_len``.
        pages: page table of a paged cache; None for others.

    Raises:
        ValueError: a size below 1, or an invalid property.
        TypeError: a property that the kind doesn't have.
        PlacementError: the model is loaded and a device has no room; nothing stays allocated.
    """

    IGNORED: ClassVar[Mapping[str, str]] = {
        "device": "a layer's cache is on the device of its weights",
        "offload_only_non_sliding": "all layers are offloaded, or none",
    }
    #: Set for a model that is distributed over several hosts.
    mirror: Mirror | None = None
    elsewhere: Elsewhere | None = None
    #: Of a cache without a model yet: the config that the model must have, None for any; and the
    #: arguments of ``layer_specs``.
    _unbound: tuple[ModelConfig | None, dict[str, Any]] | None = None

    def __init__(
        self,
        model: CacheOwner | ModelConfig | None = None,
        max_seq_len: int = -1,
        batch_size: int | None = None,
        lazy: bool = False,
        dtype: torch.dtype | None = None,
        *,
        snapshots: bool = False,
        config: ModelConfig | None = None,
        max_cache_len: int | None = None,
        max_batch_size: int | None = None,
        **properties: Any,
    ) -> None:
        if isinstance(model, ModelConfig):
            model, config = None, model
        max_seq_len = _either("max_seq_len", max_seq_len, -1, "max_cache_len", max_cache_len)
        batch_size = _either("batch_size", batch_size, None, "max_batch_size", max_batch_size)
        self.lazy = lazy
        self.call_len: int | None = None
        options = {"max_seq_len": max_seq_len, "dtype": dtype, "snapshots": snapshots}
        options |= self.known_options(properties)
        if batch_size is not None:
            options["batch_size"] = batch_size
        Rows.__init__(self, Prefix(rows=(), lens=(0,)))
        self._unbound = config, options
        if model is not None:
            self.bind(model)

    def bind(self, model: CacheOwner, rows: int = 1) -> None:
        """Check that the cache is this model's. An unbound cache is bound to it, with ``rows`` rows
        unless it was built with a ``batch_size``.

        Raises:
            ValueError: it is another model's, or was made with an invalid number.
            PlacementError: a device has no room; the cache stays unbound.
        """
        unbound = self._unbound
        fits = self.model is model if unbound is None else _is_of(model.config, unbound[0])
        if not fits:
            raise ValueError("the cache was built for another model")
        if unbound is None:
            return
        specs = self.layer_specs(model, **{"batch_size": rows, **unbound[1]})
        self._unbound = None
        try:
            self._begin(model, specs)
        except BaseException:
            self._unbound = unbound
            raise

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self).__name__
            if self._unbound is None or name.startswith("__"):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(
                f"this {kind} is bound to no model yet, and has no storage: pass it to generate() "
                f"or to a call of the model first, or build it as {kind}(model)"
            )

    @classmethod
    def of(
        cls,
        model: CacheOwner,
        specs: Sequence[LayerSpec],
        call_len: int | None = None,
        lender: KVCache | None = None,
    ) -> KVCache:
        """Build a cache of this kind with layers of these specs; errors as for the constructor.

        Args:
            lender: a paged cache whose pool the new one shares.
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
        #: Last epoch in which every placed layer was known to be allocated.
        self.allocated_in = -1
        #: An epoch, and the room of a row, in tokens, during it.
        self._room = (-1, 0)
        self._leases = Leases(repr(self))
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
        model: HasConfig,
        max_seq_len: int = -1,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        snapshots: bool = False,
        **properties: Any,
    ) -> list[LayerSpec]:
        """One spec a layer; arguments and errors as for the constructor."""
        config = model.config
        if max_seq_len == -1:
            max_seq_len = config.max_position_embeddings
        spec = LayerSpec(
            batch_size=whole("batch_size", batch_size, most=MOST_ROWS),
            max_seq_len=whole("max_seq_len", max_seq_len),
            num_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=model.dtype if dtype is None else dtype,
            values_are_keys=config.latent is not None,
        )
        properties = cls.known_options(properties)
        layers, specs = range(config.cache_layers), []
        for layer in layers:
            heads, width = config.heads(layer)
            sized = replace(spec, num_heads=heads, head_dim=width)
            composed = cls.compose(sized, config, layer, **properties)
            state, reads = config.state(layer), config.reads(layer)
            specs.append(replace(composed, state=state, reads=reads))
        for layer in layers:
            if state := config.state_beside(layer):
                specs.append(replace(specs[layer], state=state, beside=layer))
        if not snapshots:
            return specs
        return [replace(x, state=with_snapshots(x.state)) if x.state else x for x in specs]

    @classmethod
    def known_options(cls, properties: dict[str, Any]) -> dict[str, Any]:
        """Drop the ignored options (:attr:`IGNORED`), with a warning.

        Raises:
            TypeError: an option that this kind doesn't have.
        """
        takes = cls.options()
        for name in properties:
            if name in cls.IGNORED:
                _note_once(cls, name)
            elif name not in takes:
                names = ("max_seq_len", "batch_size", "lazy", "dtype", "snapshots", *takes)
                raise TypeError(f"{cls.__name__} has no {name!r}; it takes {', '.join(names)}")
        return {name: value for name, value in properties.items() if name in takes}

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """Names of the options of this kind, besides sizes and ``dtype``: the keyword arguments of
        ``compose``."""
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
        """The spec of one layer of this kind, from one with default properties.

        Kinds override it, with their options as keyword-only arguments; here the options are the
        four properties.
        """
        return replace(spec, **{name: each for name, each in options.items() if each is not None})

    # Users --------------------------------------------------------------------------------

    def lease(self, user: str) -> Lease:
        """Reserve the cache for a user over several calls: see :class:`Lease`.

        Raises:
            CacheUseError: it is in use; the message says by whom.
        """
        return self._leases.take(user)

    def use(self, user: str) -> AbstractContextManager[None]:
        """Reserve the cache for a ``with`` block; inside a block of a lease, act under that lease.

        Raises:
            CacheUseError: it is in use, or it was freed under the lease.
        """
        return self._leases.use(user)

    def revoke(self, by: str, *, wait: bool = False) -> None:
        """Revoke the current lease before the storage is freed: its holder's next call raises
        CacheUseError.

        Args:
            wait: wait for a call in another thread to end; forever if it never does.

        Raises:
            CacheUseError: another thread is in the middle of a call, without ``wait``.
        """
        self._leases.revoke(by, wait=wait)

    # Storage ------------------------------------------------------------------------------

    def allocate(self, cache_map: dict[int, torch.device]) -> None:
        """Allocate the storage of every placed layer that has none; all of them or none."""
        cache_map = placed([layer.spec for layer in self.layers], cache_map)
        missing = [index for index in cache_map if self.layers[index].device is None]
        full = self._first_full(cache_map, missing)
        if full is None:
            return
        for index in missing:
            self.layers[index].free()
        devices.release_idle_memory()
        device = cache_map[full]
        needed, available = self.layers[full].bytes_needed(device), devices.available_memory(device)
        own = (i for i in missing if cache_map[i] == device and not self._has_twin(i, cache_map))
        total = sum(self.layers[i].bytes_needed(device) for i in own)
        raise PlacementError(
            f"{self!r} needs {total:,} bytes on {device} for the layers placed there, and "
            f"{available:,} are available; layer {full} did not fit. Build the cache before "
            "load_autosplit, so that it is counted, or make it shorter, or use an 8-bit one",
            unit=f"cache layer {full}",
            device=str(device),
            needed=needed,
            available=available,
        )

    def _has_twin(self, index: int, cache_map: dict[int, torch.device]) -> bool:
        """Whether a layer shares another layer's storage."""
        reads = self.layers[index].spec.reads
        return reads is not None and cache_map.get(reads) == cache_map[index]

    def _new_pool(self) -> PagePool | None:
        """A new page pool as large as the layers' own; None if the cache is not paged."""
        spec = self.layers[0].spec
        if not isinstance(spec.growth, Paged):
            return None
        pages = spec.growth.pool_size(spec.batch_size, spec.max_seq_len)
        tiers = [(tier.pages, tier.storage is not None) for tier in spec.growth.tiers]
        return self.model.pool_kind(pages, spec.growth.page, tiers)

    def _use_pages(self, pool: PagePool | None) -> None:
        """Take pages from this pool from now on; all rows are empty."""
        self.pages = None if pool is None else PageTable(pool, self.batch_size)
        for layer in self.layers:
            layer.pages = self.pages if layer.spec.state is None else None
        if self.pages is not None:
            weakref.finalize(self, self.pages.release).atexit = False

    def _borrow(self, lender: KVCache) -> None:
        """Share the storage and the page pool of another cache."""
        assert lender.pages is not None
        self._use_pages(lender.pages.pool)
        for layer, other in zip(self.layers, lender.layers, strict=True):
            layer.borrow(other)
        self.join(lender)

    def _first_full(self, cache_map: dict[int, torch.device], missing: list[int]) -> int | None:
        """Allocate layers; returns the one that ran out of memory, once the error's frames are
        gone."""
        for index in missing:
            with Attempt() as attempt:
                self.layers[index].allocate(cache_map[index])
            if attempt.why:
                return index
        return None

    @mirrored
    def free(self) -> None:
        """Free the storage; the model calls it when it unloads.

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
        """Bytes allocated now on each device, the host included."""
        total: dict[torch.device, int] = {}
        for layer in self.layers:
            for tensor in layer.own_tensors():
                taken = devices.rounded(tensor.nbytes)
                total[tensor.device] = total.get(tensor.device, 0) + taken
        return total

    def make_room(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """Grow to hold rows of these lengths; called once a forward call.

        Args:
            starts: first token of each row that will be written; None for the row's end.

        Raises:
            torch.OutOfMemoryError: a device is full; the tokens are unchanged.
            OutOfPagesError: the shared pool has too few pages left; likewise.
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
        """Copy page ``page`` of the pool to page ``to`` in all layers."""
        for layer in self.layers:
            layer.copy_page(to, page)

    @mirrored
    def move_page(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Copy ``page`` of one tier to page ``to`` of another in all layers; tier 0 is the pool,
        the others are in host memory."""
        for layer in self.layers:
            layer.move_page(page, tier, to, to_tier)

    @mirrored
    def swap_out(self, pages: Sequence[int], row: int) -> SwappedPages:
        """Copy a row to host memory, to swap it out: its pages of the pool, and its states. A
        stale row returns to its snapshot."""
        if row in self.stale:
            self.restore_snapshots([row])
        states = [layer.state(row) for layer in self.layers]
        return SwappedPages.of([layer.pooled for layer in self.layers], pages, states)

    @mirrored
    def swap_in(self, away: SwappedPages, pages: Sequence[int], first: int, row: int) -> None:
        """Copy a swapped-out row back: its pages from page ``first`` on into ``pages`` of the pool,
        and its states."""
        away.copy_to([layer.pooled for layer in self.layers], pages, first)
        for layer, state in zip(self.layers, away.states, strict=True):
            layer.set_state(row, state)

    def placed(self, lengths: Lengths) -> Lengths:
        """A call's lengths with the block table of its rows, once there is room."""
        if self.pages is None:
            return lengths
        return replace(lengths, pages=self.pages.block_table(lengths.final))

    def row_limit(self, row: int) -> int:
        """Capacity of a row in tokens: a fork's shrinks once the row is cropped into the shared
        prefix."""
        if self.pages is not None:
            return self.max_seq_len
        return self.prefix_lens[row] + self.layers[0].spec.max_seq_len

    # Tokens -------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row; the same for every layer (Hugging Face's name)."""
        return self.current_seq_len

    @property
    def current_seq_len(self) -> int:
        """Tokens in the longest row. Setting it to less crops all rows."""
        return max(self.seq_lens)

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        if length > min(self.seq_lens):
            raise ValueError(f"current_seq_len can only shrink: {self.seq_lens} to {length}")
        self.crop(length)

    @mirrored
    @changes_cache
    def reset(self) -> None:
        """Drop every token, and shrink a cache that has grown."""
        self.crop(0)
        for layer in self.layers:
            layer.shrink()

    @mirrored
    @changes_cache
    def crop(self, max_length: int | Sequence[int]) -> None:
        """Truncate each row to ``max_length`` tokens: one number, or one a row."""
        limits = (
            list(max_length) if isinstance(max_length, Sequence) else [max_length] * self.batch_size
        )
        if min(whole_type("max_length", limit) for limit in limits) < 0:
            raise ValueError(f"crop keeps tokens, and {min(limits)} is negative: see trim")
        for row, limit in enumerate(limits[: self.batch_size]):
            self._cut(row, limit)

    def rollback(self, kept: Sequence[int], written: Sequence[int]) -> None:
        """Roll back a failed call: truncate rows to ``kept`` tokens, where up to ``written`` tokens
        in all may have been stored."""
        for layer in self.layers:
            layer.prefetched = None
        for row, (keep, length) in enumerate(zip(kept, written, strict=False)):
            self.written[row] = max(self.written[row], length)
            self._cut(row, keep)
            if self._states and 0 < keep < length:
                self.stale.add(row)

    def _cut(self, row: int, kept: int) -> None:
        self._copy_on_write(row, kept)
        if self.pages is not None:
            self.pages.cut(row, min(kept, len(self.sequences[row])))
        lost = self._lost_keys(row, kept)
        changed = bool(self._states) and kept < len(self.sequences[row])
        self.forget_after(row, kept, lost=lost or changed)
        if self.snapshot_lens[row] and self._lost_keys(row, self.snapshot_lens[row]):
            self.snapshot_lens[row] = 0

    def _lost_keys(self, row: int, kept: int) -> bool:
        """Whether the token after the first ``kept`` would see overwritten keys and values."""
        written = self.written[row]
        return any(layer.spec.arrangement.lost(written, kept) for layer in self._keys)

    @property
    def has_snapshots(self) -> bool:
        """Whether there is room for snapshots of recurrent states."""
        return any(layer.has_snapshot for layer in self._states)

    @property
    def _states(self) -> list[StateLayer]:
        states = (layer for layer in self.layers if isinstance(layer, StateLayer))
        return [layer for layer in states if layer.spec.state]

    @property
    def _keys(self) -> list[CacheLayer]:
        return [layer for layer in self.layers if not isinstance(layer, StateLayer)]

    def rerun_lens(self, rows: int) -> dict[int, int]:
        """Rows, among the first ``rows``, that rerun from their snapshot at next use -> tokens to
        rerun."""
        return {
            row: len(self.sequences[row]) - self.snapshot_lens[row]
            for row in self.stale
            if row < rows and self.snapshot_lens[row]
        }

    def restore_snapshots(self, rows: Iterable[int]) -> None:
        """Return these rows to their snapshots."""
        for row in rows:
            for layer in self._states:
                layer.restore(row)
            self.forget_after(row, self.snapshot_lens[row], lost=False)
            self.stale.discard(row)

    @mirrored
    @changes_cache
    def trim(self, n: int) -> None:
        """Drop the last ``n`` tokens of each row (all of them, if it has fewer)."""
        if whole_type("n", n) < 0:
            raise ValueError(f"trim forgets tokens, and {n} is negative")
        self.crop([max(length - n, 0) for length in self.seq_lens])

    # Rows ---------------------------------------------------------------------------------

    @mirrored
    @changes_cache
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Set row ``i`` to old row ``rows[i]`` (Hugging Face's ``reorder_cache(beam_idx)``).

        A row may be taken several times or not at all; rows after the last one given become empty.
        Tokens that a row has in common with its new contents are not copied: for beams over one
        prompt the cost does not grow with the prompt.

        Raises:
            ValueError: more rows than ``batch_size``, or a row that doesn't exist.
        """
        source = [int(row) for row in rows]
        if len(source) > self.batch_size:
            raise ValueError(f"{len(source)} rows, but the cache was built for {self.batch_size}")
        for row in source:
            if not 0 <= row < self.batch_size:
                raise ValueError(f"there is no row {row}: the cache has {self.batch_size} rows")
        common = [self.common(to, row) for to, row in enumerate(source)]
        if self.pages is not None:
            self.pages.reorder(source)
        for layers in self._groups_to_move():
            self._move_rows(layers, source, common)
        self.rename(source, common)

    def _groups_to_move(self) -> list[Sequence[CacheLayer]]:
        """Layers outside of pages, grouped by how their rows are moved."""
        others = [layer for layer in self._keys if layer.pages is None]
        return [each for each in (self._states, others) if each]

    def _move_rows(
        self, layers: Sequence[CacheLayer], source: Sequence[int], common: Sequence[int]
    ) -> None:
        """Copy what row ``source[i]`` stores in some layers to row ``i``."""
        first = [self._in_place(layers, to, row, common[to]) for to, row in enumerate(source)]
        last = [len(self.sequences[row]) - self.prefix_lens[row] for row in source]
        moves = [(to, row) for to, row in enumerate(source) if to != row and first[to] < last[to]]
        for to, _ in moves:
            self._copy_on_write(to, 0)
        if moves:
            positions = slice(min(first[to] for to, _ in moves), max(last[to] for to, _ in moves))
            for layer in layers:
                layer.move_rows(moves, positions, self.model.max_input_len)

    def _in_place(self, layers: Sequence[CacheLayer], to: int, row: int, common: int) -> int:
        """Length of the prefix that both rows store alike, so that it needs no copying."""
        if self.rotary_variants[to] != self.rotary_variants[row] or self.stale & {to, row}:
            return 0
        if self.prefix_of(to) != self.prefix_of(row):
            return 0
        if self.snapshot_lens[to] != self.snapshot_lens[row]:
            return 0
        written, new = max(self.written[to], self.written[row]), len(self.sequences[row])
        kept = min(layer.spec.arrangement.in_place(common, written, new) for layer in layers)
        return max(kept - self.prefix_lens[row], 0)

    @mirrored
    @changes_cache
    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows, in this order, as the first ones; all others become empty."""
        self.reorder(rows)

    @mirrored
    @changes_cache
    def repeat_interleave(self, repeats: int, rows: int | None = None) -> None:
        """Repeat each row ``repeats`` times in place: a, b -> a, a, b, b.

        Args:
            rows: how many of the first rows; None for up to the last non-empty one.

        Raises:
            ValueError: the result has more rows than ``batch_size``.
        """
        repeats = whole("repeats", repeats)
        if rows is None:
            rows = max((i + 1 for i, sequence in enumerate(self.sequences) if sequence), default=0)
        self.reorder([row for row in range(rows) for _ in range(repeats)])

    @mirrored
    @reads_cache
    def clone(self) -> KVCache:
        """A copy of the cache on the same model, with the same tokens."""
        other = self.of(self.model, [layer.spec for layer in self.layers], self.call_len)
        if shared := [layer.shared.tensors for layer in self.layers if layer.shared is not None]:
            other._share(shared, self)
        for layer, copy in zip(self.layers, other.layers, strict=True):
            copy.copy_from(layer)
        if self.pages is not None and other.pages is not None:
            other.pages.become(self.pages)
        other.copy_rows(self, range(self.batch_size))
        return other

    @mirrored
    @reads_cache
    def fork(
        self, n: int = 1, max_seq_len: int | None = None, call_len: int | None = None
    ) -> KVCache:
        """Fork each row into ``n`` adjacent rows of a new cache that begin with its tokens.

        The stored tokens are shared, not copied: each fork only allocates memory for what comes
        after, and recomputes nothing. Shared tokens are copied on write, when this cache is cropped
        into them and goes on. (Rings, also those of recent tokens, and rows that longrope may
        change are copied at once: they are written to in place.)

        Args:
            n: rows for each non-empty row.
            max_seq_len: capacity of a row, shared tokens included; None for this cache's.
            call_len: most tokens a row that one call on the fork brings; 1 for decoding only, which
                needs no room for longer calls. None for the model's limit.

        Raises:
            ValueError: n below 1, a ``max_seq_len`` too short for the tokens, or a fork of a fork.
            PlacementError: there is no room.
        """
        source = [row for row, ids in enumerate(self.sequences) if ids for _ in range(n)]
        limit = self.max_seq_len if max_seq_len is None else max_seq_len
        if n < 1 or not source or limit <= self.current_seq_len:
            raise ValueError(
                f"a fork of {self.current_seq_len} tokens into {n} rows of up to {limit} tokens: "
                "n must be at least 1, the cache must not be empty, and max_seq_len must leave "
                "room for one more token"
            )
        if self.prefix_rows:
            raise ValueError("a fork can't be forked: fork the cache that it came from")
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
        fork.copy_rows(self, source)
        return fork

    def _fork_pages(self, source: list[int], limit: int, call_len: int | None) -> KVCache:
        """Fork a paged cache: rows share pages, and allocate more from the same pool."""
        fork = self.sharing_pool(len(source), limit, call_len)
        assert self.pages is not None and fork.pages is not None
        for to, row in enumerate(source):
            fork.pages.hold(to, self.pages.rows[row])
            if self.model.config.has_states:
                fork.copy_state(to, self, row)
        fork.copy_rows(self, source)
        return fork

    @mirrored
    def sharing_pool(
        self, rows: int, max_seq_len: int | None = None, call_len: int | None = None
    ) -> KVCache:
        """An empty cache of ``rows`` rows that shares this cache's page pool.

        Raises:
            ValueError: this cache is not paged.
        """
        if self.pages is None:
            raise ValueError(f"{self!r} is not paged: give it growth=Paged()")
        self.allocate(self.model.cache_map)  # else each sharing cache would allocate its own pool
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
        """Fill an empty row of a paged cache with tokens already stored in cached pages (``known``)
        or other ``pages`` of the pool; the caller fills the remaining ones.

        Raises:
            OutOfPagesError: too few pages to bring cached ones back from host memory.
        """
        assert self.pages is not None
        self.pages.hold_known(row, known, self)
        self.pages.hold(row, pages)
        self.name_row(row, tokens, made_with)

    @mirrored
    def name_row(self, row: int, tokens: Sequence[int], made_with: str | None) -> None:
        """Record the tokens of an empty row whose keys and values are stored."""
        self.sequences[row] = list(tokens)
        self.snapshot_lens[row], self.written[row] = 0, len(tokens)
        self.made_with[row] = made_with
        self.hidden[row] = None

    @mirrored
    @changes_cache
    def move_row(self, row: int, other: KVCache, source: int) -> None:
        """Move a row of this cache, or of one that shares its pool, to row ``row``. Both are paged;
        the source becomes empty."""
        assert self.pages is not None and other.pages is not None
        self._cut(row, 0)
        if self.model.config.has_states:
            self.copy_state(row, other, source)
        facts = other.facts(source)
        self.set_row(row, other.sequences[source], other.pages.rows[source])
        self.set_facts(row, facts)
        if source in other.stale:
            self.stale.add(row)
        other._cut(source, 0)

    @mirrored
    def copy_state(self, row: int, other: KVCache, source: int) -> None:
        """Copy the states of row ``source`` of another cache to row ``row``."""
        for layer, there in zip(self.layers, other.layers, strict=True):
            layer.set_state(row, there.state(source))

    def _can_share(self, limit: int) -> bool:
        """Whether stored tokens stay in place and visible while rows grow, here and to ``limit``
        tokens in a fork."""
        longest = max(self.max_seq_len, limit)
        stay = all(layer.spec.arrangement.stays(longest) for layer in self.layers)
        return stay and not self.stale and not any(self.rotary_variants)

    def _share(self, tensors: Sequence[dict[str, Tensor]], owner: KVCache) -> None:
        """Share another cache's tensors, one dictionary a layer, as the prefix of all rows."""
        for layer, shared in zip(self.layers, tensors, strict=True):
            layer.shared = Shared(shared, self.prefix_rows, self.prefix_lens)
        self.join(owner)

    def join(self, owner: KVCache) -> None:
        """Join the family of caches that share the owner's storage."""
        self._sharers = owner._sharers
        living = [ref for ref in self._sharers if ref() is not None]
        self._sharers[:] = {*living, weakref.ref(owner), weakref.ref(self)}

    def owner(self) -> KVCache | None:
        """The cache that a fork shares its prefix with; None once that one has copied on write."""
        return next((cache for cache in self.family() if not cache.prefix_rows), None)

    def lender(self) -> KVCache | None:
        """The cache whose pages this one borrows, while it lives."""
        of = {layer.lender for layer in self.layers} - {None}
        return next((cache for cache in self.family() if of & set(cache.layers)), None)

    def share_layer(self, index: int) -> None:
        """Share the owner's tensors again after a layer of both was reallocated; no-op unless this
        is a fork."""
        if self.prefix_rows and (owner := self.owner()) is not None:
            tensors = owner.layers[index].tensors
            self.layers[index].shared = Shared(tensors, self.prefix_rows, self.prefix_lens)

    def family(self) -> list[KVCache]:
        """This cache and all that share storage with it."""
        return [cache for ref in self._sharers if (cache := ref()) is not None] or [self]

    def _copy_on_write(self, row: int, kept: int) -> None:
        """Copy shared tensors before tokens after the first ``kept`` of a row are overwritten:
        forks keep the old ones."""
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
        """Convert every layer to another ``storage``, ``residence`` or ``growth``, keeping all
        tokens.

        Forks are converted together with the cache they share. Each layer goes through the host, so
        that a device never holds more of it than before or after.

        Raises:
            ValueError: another retention, since evicted tokens can't come back; or a storage with
                recent tokens as floats for rows that share a prefix.
            torch.OutOfMemoryError: a device has no room for the new storage; layers before that one
                are converted, no token is lost, and the cache remains usable.
        """
        if "retention" in properties:
            raise ValueError("convert can't change a cache's retention: build another cache")
        growths = self.layers[0].spec.growth, properties.get("growth")
        if growths[1] is not None and any(isinstance(each, Paged) for each in growths):
            raise ValueError(
                "convert can't change to or from pages: save the cache, and load it into another"
            )
        family = self.family()
        specs = [
            [replace(layer.spec, **properties) for layer in layers]
            for layers in zip(*(cache.layers for cache in family), strict=True)
        ]
        if any(layers[0].storage.recent for layers in specs) and len(family) > 1:
            raise ValueError(
                f"{len(family)} caches share storage, and recent tokens as floats can't be shared: "
                "delete the forks first, or build another cache"
            )
        for cache in family:  # a lease holder may be between two calls, but not in one
            cache._leases.check_idle("cache.convert")
        if self.pages is not None:
            self.pages.pool.forget_tiers()
        try:
            for index, layer_specs in enumerate(specs):
                _convert_layer(family, index, layer_specs)
            _defragment(family, lambda layer: layer.fragmented)
        finally:
            for cache in family:
                self.model.cache_changed(cache)

    def defragment(self) -> None:
        """Release idle memory, and reallocate storages that grew, packed: growth leaves holes in
        segments that hold other tensors too."""
        family = self.family()
        if _defragment(family, lambda layer: layer.grew):
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
        """Write the tokens and their stored keys and values: see ``exkv.cache.file``.

        The file is replaced once everything is written, and unchanged if that fails.

        Raises:
            ValueError: this is a fork, which stores only part of its rows, or the file is a folder,
                a device or a pipe.
            OSError: the disk is full, or the folder doesn't exist or isn't writable.
        """
        save(self, file)

    @mirrored
    @changes_cache
    def load(self, file: str | os.PathLike[str]) -> None:
        """Replace the contents by those that :meth:`save` wrote, from a cache of the same kind on
        the same model; devices, capacity and number of rows may differ.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, of another kind of cache, another model or other weights, or
                has more rows or tokens than fit; this cache is unchanged.
        """
        load(self, file)

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self._unbound is not None:
            return f"{kind}(of no model yet)"
        rows = self.batch_size
        return f"{kind}(max_seq_len={self.max_seq_len}, batch_size={rows}, dtype={self.dtype})"


def _convert_layer(family: Sequence[KVCache], index: int, specs: Sequence[LayerSpec]) -> None:
    """Convert one layer of caches that share storage, to a spec each.

    Raises:
        torch.OutOfMemoryError: its device is full. If some of the layer's tensors were converted
            already, the others were, too, and all of them are in host memory.
    """
    done: list[dict[str, Tensor]] = []
    try:
        for cache, spec in zip(family, specs, strict=True):
            cache.layers[index].convert(spec, done, cache.seq_lens)
    except torch.OutOfMemoryError:
        if done:
            for cache, spec in zip(family, specs, strict=True):
                cache.layers[index].convert_on_host(spec, done, cache.seq_lens)
        raise


def _defragment(family: Sequence[KVCache], which: Callable[[CacheLayer], bool]) -> bool:
    """Reallocate the storages of some layers, one after the other, once no segment holds a part of
    them. Contents go through the host, and stay there if a device has no room any more.

    Returns:
        Whether a device had no room.
    """
    layers = [
        (index, layer)
        for cache in family
        for index, layer in enumerate(cache.layers)
        if which(layer)
    ]
    copies: list[HostCopy] = []
    full = set()
    try:
        copies += (layer.lift() for _, layer in layers)
        if layers:
            devices.release_idle_memory()
    finally:
        for (index, layer), copy in zip(layers, copies, strict=False):
            if not layer.put_back(copy):
                full.add(index)
        for index in full:
            held = [cache.layers[index].tensors for cache in family]
            for cache in family:
                cache.layers[index].convert_on_host(cache.layers[index].spec, held, cache.seq_lens)
    return bool(full)


def check_kind(cache: object) -> None:
    """TypeError unless this is one of exkv's caches."""
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache is a {type(cache).__name__}; it must be one of exkv's, whose classes have the "
            "names of transformers': exkv.DynamicCache, exkv.StaticCache, or exkv.make_cache(model)"
        )


def _is_of(config: ModelConfig, wanted: ModelConfig | None) -> bool:
    """Whether a cache built for the config ``wanted`` (None for any) fits a model of this config,
    with or without its MTP head."""
    return wanted is None or config.replace(mtp=wanted.mtp) == wanted


def _either(name: str, value: T, default: T, theirs: str, given: T | None) -> T:
    """The value of an argument that transformers has under another name; ValueError for both."""
    if given is not None and value != default:
        raise ValueError(f"{name} and {theirs} are both given, and are the same: leave out one")
    return value if given is None else given


_noted: set[tuple[str, str]] = set()


def _note_once(kind: type[KVCache], name: str) -> None:
    """Warn once a process that an option accepted for compatibility is ignored."""
    if (kind.__name__, name) not in _noted:
        _noted.add((kind.__name__, name))
        logger.warning("%s makes no use of %s: %s", kind.__name__, name, kind.IGNORED[name])


def make_layers(specs: Sequence[LayerSpec]) -> list[CacheLayer]:
    """Unallocated layers. Those with keys and values are linked to the next of their kind, and to
    the state that their decoder layer has beside them."""
    layers = [CacheLayer(spec) if spec.state is None else StateLayer(spec) for spec in specs]
    for layer, after in pairwise(layer for layer in layers if layer.spec.state is None):
        layer.after = after
    for layer in layers:
        if layer.spec.beside is not None:
            layers[layer.spec.beside].beside = layer
        if layer.spec.reads is not None:
            layer.reads = layers[layer.spec.reads]
            layer.reads.read_by = layer
    return layers

"""One attention layer of an :class:`HFCache`: transformers' methods over exkv's ``CacheLayer``.

transformers stores keys and values in ``update`` and attends afterwards, with a mask that
``update`` doesn't know. So ``update`` only records the call's tokens (:class:`Call`) and returns
stand-ins for all keys and values. exkv's attention (``attention.py``) stores them without left
padding and reads them as stored; for any other use they become plain tensors with left padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from exkv.batch import Batch, Lengths, RotaryTables, token_index
from exkv.cache import CacheLayer, KeepAll, LayerSpec, OnDevice, OnHost, Sinks, Window
from exkv.cache.arrangement import OneStore
from exkv.cache.contents import contents
from exkv.cache.layer import InPlace
from exkv.cache.tiers import TwoTiers
from exkv.cache.views import ContiguousView, View
from exkv.epochs import current
from exkv.ops.attention import AttentionParams

from .lazy import LazyTensor, outside_graphs
from .versions import SINCE_5, query_count

#: Tokens that a reorder copies at once.
_MOVED_AT_ONCE = 1024


class Rows:
    """Stored tokens and left padding of each row: a value that layers of equal length share.

    Attributes:
        length: of the longest row, including left padding.
        filled: whether any token is stored.
    """

    __slots__ = ("__weakref__", "_after", "filled", "length", "lens", "pads")

    def __init__(self, lens: tuple[int, ...], pads: tuple[int, ...]) -> None:
        self.lens, self.pads = lens, pads
        self.length, self.filled = max(map(add, lens, pads), default=0), any(lens)
        self._after: Rows | None = None

    def after(self) -> Rows:
        """The rows with one more token each."""
        if self._after is None:
            self._after = Rows(tuple(past + 1 for past in self.lens), self.pads)
        return self._after


class Batches:
    """Tensors of the last call's lengths, shared by all layers on a device.

    Args:
        tables: the model's rotary tables, for kinds that rotate queries; None for others.
    """

    def __init__(self, tables: RotaryTables | None) -> None:
        self.tables = tables
        self._known: dict[torch.device, Batch] = {}
        self._rows: WeakValueDictionary[tuple[tuple[int, ...], ...], Rows] = WeakValueDictionary()
        self._decoded = Rows((), ())
        self._decoding: dict[torch.device, Batch] = {}

    def rows(self, lens: Sequence[int], pads: Sequence[int]) -> Rows:
        """The shared ``Rows`` of these lengths."""
        of = tuple(lens), tuple(pads)
        found = self._rows.get(of)
        if found is None:
            found = self._rows[of] = Rows(*of)
        return found

    def decoding(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> Batch:
        """The batch of a decode step of these rows."""
        if self._decoded is not rows:
            self._decoded, self._decoding = rows, {}
        found = self._decoding.get(device)
        if found is None:
            found = self.of(rows.lens, (1,) * len(rows.lens), device, dtype)
            self._decoding[device] = found
        return found

    def of(
        self, past: tuple[int, ...], new: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Batch:
        """The batch of rows with ``past`` tokens and ``new`` ones."""
        known = self._known.get(device)
        if known is None or known.lengths.past != past or known.lengths.new != new:
            lengths = Lengths(past=past, new=new)
            known = self._known[device] = self._made(lengths, device, dtype)
        return known

    def _made(self, lengths: Lengths, device: torch.device, dtype: torch.dtype) -> Batch:
        like = torch.empty(0, dtype=dtype)  # only the factors' dtype is read
        return Batch(
            lengths=lengths,
            past_lens=torch.tensor(lengths.past, dtype=torch.int32).to(device),
            rotary={"main": (like, like), "local": (like, like)},
            write_index=token_index(lengths, device) if lengths.ragged else None,
            last_index=None,
            tables=self.tables,  # type: ignore[arg-type]  # read only by kinds that have tables
        )


@dataclass(slots=True, eq=False)
class Call:
    """New keys and values of one call, and how they were stored.

    Attributes:
        k, v: (B, T, H_kv, D); T = 0 if a call only reads.
        tokens: T.
        params: the attention's when the tokens were stored; None before.
        rolled: left padding of each row, which isn't stored; None for none.
    """

    layer: HFLayer
    k: torch.Tensor
    v: torch.Tensor
    tokens: int
    params: AttentionParams | None = None
    rolled: tuple[int, ...] | None = None
    made: tuple[torch.Tensor, torch.Tensor] | None = None
    _view: View | Callable[[], View] | None = None

    @property
    def stored(self) -> bool:
        return self.params is not None

    def was_stored(
        self,
        view: View | Callable[[], View],
        params: AttentionParams,
        rolled: tuple[int, ...] | None = None,
    ) -> None:
        """Record how the tokens were stored; a function makes the view on demand."""
        self._view, self.params, self.rolled = view, params, rolled

    def view(self) -> View:
        """The call's view of the cache; its tokens must be stored."""
        assert self._view is not None, "the tokens are not stored yet"
        if callable(self._view):
            self._view = self._view()
        return self._view

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values visible to the call's queries: (B, H_kv, N, D)."""
        if self.made is None:
            self.made = self.layer.full(self)
        return self.made


@dataclass(frozen=True, slots=True)
class Places:
    """Where native ops write and read a layer's tokens; valid for one epoch.

    Attributes:
        place: None if tokens have no fixed places.
        tensors: the storage's.
        ring: size of the ring; 0 before the storage has grown to it.
        enough: tokens per row up to which no growth is needed.
    """

    epoch: int
    place: InPlace | None
    tensors: Mapping[str, torch.Tensor]
    ring: int
    enough: int


@dataclass(slots=True)
class Undo:
    """What a layer has overwritten since the last crop, and the tokens since then."""

    tensors: Mapping[str, torch.Tensor]
    rows: Rows
    written: tuple[int, ...]
    chunks: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class CacheFullError(ValueError, IndexError):
    """More tokens than a cache was made for; an IndexError, as stock static layers raise."""


class HFLayer(CacheLayerMixin):
    """Keys and values of one layer in exkv's storage.

    Args:
        template: the layer's spec without its shape, which the first tokens determine.
        window: the model layer's sliding window; 0 for none.
        dtype: of stored floats; None for the keys' and values'.
        batches: shared by the layers of a cache.
        static: whether keys and values are returned at the layer's full length, with zeros after
            the last token, as stock static layers do.

    Attributes:
        store: None before the first tokens.
        dims: head width of keys, and of values.
        rows: stored tokens and left padding of each row.
        after: the next layer, whose offloaded tokens this one prefetches.
        record_past: whether tokens can be cropped although the layer evicts others.
        limit: most tokens per row.
        full_length: least length of returned keys and values; 0 for that of the stored ones.
    """

    is_compileable = False
    #: Name of this class in files.
    file_type: ClassVar[str] = "HFLayer"

    def __init__(
        self,
        template: LayerSpec,
        *,
        window: int,
        dtype: torch.dtype | None,
        batches: Batches,
        static: bool = False,
    ) -> None:
        self.template, self.window, self.batches = template, window, batches
        self.limit = template.max_seq_len
        self.stored_dtype = dtype
        self.is_sliding = bool(window) and template.retention == Window(window)
        self.full_length = min(self.limit, window or self.limit) if static else 0
        self.store: CacheLayer | None = None
        self.rows = batches.rows((), ())
        self._written: tuple[int, ...] = ()
        self.after: HFLayer | None = None
        self.record_past = False
        self._call: Call | None = None
        self._undo: Undo | None = None
        self.dims = (0, 0)
        self._places = _NO_PLACES

    def __repr__(self) -> str:
        spec = self.template
        where = "" if isinstance(spec.residence, OnDevice) else ", offloaded"
        return f"{type(self).__name__}({spec.storage} {spec.retention}{where})"

    # Tokens -------------------------------------------------------------------------------

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Allocate storage for rows like these, (B, H_kv, any, D)."""
        value_states = key_states if value_states is None else value_states
        rows, heads, _, key_dim = key_states.shape
        self.dims = key_dim, value_states.shape[-1]
        spec = replace(
            self.template,
            batch_size=rows,
            num_heads=heads,
            head_dim=max(self.dims),
            dtype=self.stored_dtype or _common_dtype(key_states, value_states),
        )
        self.store = None  # frees the old storage first
        store = CacheLayer(spec)
        store.row_lens = lambda: list(self.lens)
        tokens = key_states.shape[2] + 1  # the next token, for which it would grow at once
        store.allocate(key_states.device, min(tokens, spec.capacity))
        self.store = store
        self._forget()

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # an attribute there
        return self.store is not None

    def _forget(self) -> None:
        none = (0,) * self.batch_size
        self.set_rows(none, none, none)
        self._call = self._undo = None

    @property
    def lens(self) -> tuple[int, ...]:
        """Stored tokens of each row, without left padding."""
        return self.rows.lens

    @property
    def pads(self) -> tuple[int, ...]:
        """Left padding of each row."""
        return self.rows.pads

    @property
    def written(self) -> tuple[int, ...]:
        """Most tokens of each row that were stored at any time since the cache was empty."""
        return tuple(map(max, self._written, self.rows.lens))

    def set_rows(self, lens: Sequence[int], pads: Sequence[int], written: Sequence[int]) -> None:
        """Set the rows' lengths."""
        self.rows, self._written = self.batches.rows(lens, pads), tuple(written)

    @property
    def batch_size(self) -> int:
        return self._placed.spec.batch_size if self.store is not None else 0

    @property
    def device(self) -> torch.device | None:
        """The model layer's device; None before the first tokens."""
        return None if self.store is None else self.store.device

    @property
    def _placed(self) -> CacheLayer:
        if self.store is None:
            raise ValueError("this cache layer has no tokens yet: run the model with it first")
        return self.store

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens (B, H_kv, T, D) -> stand-ins for all keys and values that they see."""
        self.settle()
        rows, heads, tokens, _ = key_states.shape
        if self.store is None or (rows != len(self.rows.lens) and not self.rows.length):
            self.lazy_initialization(key_states, value_states)
        self._check(rows, tokens)
        dtype = _common_dtype(key_states, value_states)
        k, v = self._by_token(key_states.to(dtype)), self._by_token(value_states.to(dtype))
        self._call = call = Call(self, k, v, tokens)
        dtypes = key_states.dtype, value_states.dtype
        return self._stand_ins(call, (rows, heads, self._sizes(tokens)[0]), dtypes)

    def _check(self, rows: int, tokens: int) -> None:
        if rows != len(self.rows.lens):
            raise ValueError(
                f"the cache holds {self.batch_size} rows, but the call has {rows}: use reset(), "
                "batch_repeat_interleave() or batch_select_indices(), or another cache"
            )
        if self.rows.length + tokens > self.limit:
            raise CacheFullError(
                f"the cache holds {self.rows.length} tokens and the call adds {tokens}, but it was "
                f"made for {self.limit}: make it with a larger max_seq_len"
            )

    def lift_limit(self) -> None:
        """Let a sliding window move past the cache's length."""
        if self.is_sliding and self.window <= self.limit:
            self.limit = UNLIMITED

    def _by_token(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H_kv, T, D) -> (B, T, H_kv, D), without a gradient."""
        return self._widened(x.detach() if x.requires_grad else x).transpose(1, 2)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        """Pad heads to the larger width of keys and values."""
        if self.dims[0] == self.dims[1]:
            return x
        missing = max(self.dims) - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def _stand_ins(
        self, call: Call, shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stand-ins for keys and values of this shape, (B, H_kv, N)."""

        def stand_in(which: int) -> torch.Tensor:
            dtype, full = dtypes[which], (*shape, self.dims[which])
            return LazyTensor.of(
                lambda: call.full()[which].to(dtype), full, dtype, call.k.device, call
            )

        return stand_in(0), stand_in(1)

    def settle(self) -> None:
        """Store the last call's tokens if no attention has stored them."""
        if self._call is None:
            return
        if not self._call.stored:
            if self.is_sliding:  # its stand-ins may be read after the window has moved on
                self._call.full()
            else:
                self._commit(self._call, self.pads, self._own_params())
                self._placed.release_written()
        self._call = None

    def _own_params(self) -> AttentionParams:
        return AttentionParams(scale=1.0, window=self.window)

    def _commit(self, call: Call, pads: tuple[int, ...], params: AttentionParams) -> None:
        """Store a call's tokens; in an empty cache, without left padding."""
        first = not self.rows.filled
        if self._commit_in_place(call, params):
            return
        skipped = pads if first else (0,) * len(pads)
        new = tuple(call.tokens - pad for pad in skipped)
        rolled = skipped if any(skipped) else None
        k, v = (_rolled(x, rolled, 1) for x in (call.k, call.v))
        store = self._placed
        batch = self.batches.of(self.lens, new, call.k.device, store.spec.dtype)
        store.make_room(batch.lengths.kv_len)
        self._link(batch.lengths)
        self._note_undo(call, pads)
        lens = tuple(map(add, self.lens, new))
        self._written = tuple(map(max, self.written, lens))  # also by a call that fails in between
        call.was_stored(store.append(k, v, batch, params), params, rolled)
        self.rows = self.batches.rows(lens, pads)
        if self._call is call:
            self._call = None

    def _commit_in_place(self, call: Call, params: AttentionParams) -> bool:
        """Append one token per row with one op; False if tokens have no fixed places, or another
        dtype."""
        found = self._next_places(call)
        if found is None:
            return False
        place, batch = found
        place.append(call.k, call.v, batch.past_lens, self._places.ring)
        self._note_one(call, params, place, batch)
        return True

    def _decode(self, call: Call, q: torch.Tensor, params: AttentionParams) -> torch.Tensor | None:
        """Append, and attend with q (B, 1, H, D) to all tokens, with one op; None where
        :meth:`_commit_in_place` is False."""
        found = self._next_places(call)
        if found is None:
            return None
        place, batch = found
        kv_len = _stored_keys(place, batch)
        out = place.decode(q, call.k, call.v, batch.past_lens, kv_len, params, self._places.ring)
        self._note_one(call, params, place, batch)
        return out

    def _next_places(self, call: Call) -> tuple[InPlace, Batch] | None:
        """The place of each row's next token, after growth if needed."""
        rows, store = self.rows, self._placed
        if call.tokens != 1 or not rows.filled or call.k.dtype != store.spec.dtype:
            return None
        batch = self.batches.decoding(rows, call.k.device, call.k.dtype)
        if current() != self._places.epoch:
            self._find_places()
        if batch.lengths.kv_len > self._places.enough:
            store.make_room(batch.lengths.kv_len)
            self._find_places()
        if self._places.place is None:
            return None
        self._note_undo(call, rows.pads)
        return self._places.place, batch

    def _find_places(self) -> None:
        """Find where tokens are written and read in this epoch."""
        epoch, store = current(), self._placed  # the epoch first: it may end in between
        place = store.in_place(store.spec.dtype)
        ring = place.ring if place is not None and place.ring <= store.room else 0
        self._places = Places(epoch, place, store.tensors, ring, store.enough)

    def _note_one(self, call: Call, params: AttentionParams, place: InPlace, batch: Batch) -> None:
        """Count one stored token per row, and record its view."""
        tensors = self._places.tensors
        call.was_stored(lambda: _view_in_place(tensors, place, batch, params), params)
        self.rows = self.rows.after()
        if self._call is call:
            self._call = None

    def _link(self, lengths: Lengths) -> None:
        """Drop a prefetch for other lengths, and let the next layer's be started."""
        store = self._placed
        if store.prefetched is not None and store.prefetched.lengths != lengths:
            store.prefetched = None
        after = None if self.after is None else self.after.store
        alike = after is not None and self.after is not None and self.after.lens == self.lens
        store.after = after if alike and after is not None and after.offloaded else None

    # Attention ----------------------------------------------------------------------------

    def attend(
        self, call: Call, q: torch.Tensor, pads: tuple[int, ...], params: AttentionParams
    ) -> torch.Tensor | None:
        """Causal attention of q (B, T, H, D) over stored keys -> (B, T, H, D); None if the rows
        were stored with other padding, or the call's tokens with another window."""
        if call.params is None:
            if self.rows.filled and pads != self.rows.pads:
                return None
            out = self._decode(call, self._widened(q), params)
            if out is not None:
                return self._as_wide_as_values(out)
            self._commit(call, pads, params)
        elif pads != self.pads or call.params.window != params.window:
            return None
        spec = self._placed.spec
        skipped = min(call.rolled or (0,))  # padding that all rows have
        rows = _rolled(self._widened(q), call.rolled, 1)[:, : q.shape[1] - skipped]
        out = spec.storage.attend(rows, call.view(), params, spec.dtype)
        out = _rolled(F.pad(out, (0, 0, 0, 0, 0, skipped)) if skipped else out, call.rolled, -1)
        self._placed.release_written()
        return self._as_wide_as_values(out)

    def _as_wide_as_values(self, out: torch.Tensor) -> torch.Tensor:
        key_dim, value_dim = self.dims
        return out if key_dim <= value_dim else out[..., :value_dim]

    def attend_all(
        self, call: Call, q: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor | None:
        """Attention in which every query sees every key, as over an encoder's output; None if the
        keys aren't contiguous."""
        if not call.stored and call.tokens:
            self._commit(call, self.pads, params)
        if not self._in_order or any(self.pads):
            return None
        stored, kv_len = self._fetched(), self.lens[0]
        view = ContiguousView(
            stored=stored,
            past_lens=torch.full((len(q),), kv_len - 1, dtype=torch.int32, device=q.device),
            kv_len=kv_len,
            ragged=False,
            window=0,
        )
        spec = self._placed.spec
        folded = _folded(self._widened(q), spec.num_heads)
        out = spec.storage.attend(folded, view, params, spec.dtype)
        return _unfolded(out, q.shape[1], spec.num_heads)[..., : self.dims[1]]

    @property
    def _in_order(self) -> bool:
        """Whether each row's tokens are contiguous, in order."""
        arrangement = self.template.arrangement
        return type(arrangement) is OneStore and type(arrangement.retention) is KeepAll

    def _fetched(self) -> Mapping[str, torch.Tensor]:
        store, lengths = self._placed, Lengths(past=self.lens, new=(0,) * len(self.lens))
        self._link(lengths)
        return store.fetch(lengths)

    # Plain keys and values ----------------------------------------------------------------

    def full(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H_kv, N, D), as returned by a stock layer's ``update``."""
        tokens = call.tokens
        if self._in_order:
            if not call.stored and tokens:
                self._commit(call, self.pads, self._own_params())
            k, v = self._read(call.view() if call.stored else None)
        elif call.stored or not tokens:
            k, v = self._kept(self._seen(0)[0])
        else:
            self._check_visible(tokens)
            past = self._kept(self._seen(tokens)[0] - tokens)
            new = self._rounded(call.k, call.v)
            k, v = (torch.cat(pair, dim=1) for pair in zip(past, new, strict=True))
            self._commit(call, self.pads, self._own_params())
        self._placed.release_written()
        missing = self.full_length - k.shape[1]
        if missing > 0:
            k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
        key_dim, value_dim = self.dims
        return k[..., :key_dim].transpose(1, 2), v[..., :value_dim].transpose(1, 2)

    def _read(self, view: View | None) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens (B, N, H_kv, D) in order; for floats a view unless rows are padded."""
        spec, padded = self._placed.spec, any(self.pads)
        until = max(self.lens) if padded or not self.full_length else self.full_length
        stored = view.stored if isinstance(view, ContiguousView) else self._fetched()
        taken = {name: tensor[:, :until] for name, tensor in stored.items()}
        k, v = spec.storage.decode(taken, spec.dtype, spec.head_dim)
        if padded:
            k, v = (_padded(x, self.pads, self.rows.length) for x in (k, v))
        return k, v

    def _kept(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The last ``length`` tokens (B, N, H_kv, D), with zeros to the left of shorter rows."""
        store = self._placed
        k, v = (x.transpose(1, 2) for x in contents(store, self.lens))
        sizes = self.template.retention
        most = sizes.size + sizes.sinks if sizes.size else max(self.lens)
        held = [min(count, most) for count in self.lens]
        moved = [length - count for count in held]
        device = store.device
        return _padded(k, moved, length).to(device), _padded(v, moved, length).to(device)

    def _rounded(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values as they will be read back, if storage rounds every token at once."""
        spec = self._placed.spec
        if spec.storage.recent:
            return k.to(spec.dtype), v.to(spec.dtype)
        encoded = spec.storage.encode(k, v, spec.dtype)
        return spec.storage.decode(encoded, spec.dtype, spec.head_dim)

    def _check_visible(self, tokens: int) -> None:
        """Raise ValueError if transformers' masks can't express what queries see."""
        kept, seen = self.template.retention, self.rows.length + tokens
        if isinstance(kept, Sinks) and seen > kept.sinks + kept.size:
            raise ValueError(
                f"{seen} tokens in a cache {kept}: only exkv's attention knows the distance to the "
                'sinks: call model.set_attn_implementation("exkv")'
            )
        if kept.size and kept.size != self.window and tokens > 1 and seen > kept.size:
            raise ValueError(
                f"a call of {tokens} tokens with {seen} in total, in a cache {kept}: the model's "
                "own masks don't have this window within a call: call "
                'model.set_attn_implementation("exkv"), or pass fewer tokens per call'
            )

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        """Stored keys, (B, H_kv, N, D); None before the first tokens."""
        return None if self.store is None else self._stored()[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # an attribute there
        return None if self.store is None else self._stored()[1]

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.settle()
        spec = self._placed.spec
        rows, heads = spec.batch_size, spec.num_heads
        shape = rows, 0, heads, spec.head_dim
        none = torch.empty(shape, dtype=spec.dtype, device=self._placed.device)
        call = Call(self, none, none, 0)
        return self._stand_ins(call, (rows, heads, self._sizes(0)[0]), (spec.dtype, spec.dtype))

    # Sizes --------------------------------------------------------------------------------

    @outside_graphs
    def get_seq_length(self) -> int:
        """Tokens of the longest row, including left padding."""
        self.settle()
        return self.rows.length

    @outside_graphs
    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Number of keys that a call of this length sees, including its own, and the first one's
        position."""
        self.settle()
        return self._sizes(query_count(query_length))

    def _sizes(self, tokens: int) -> tuple[int, int]:
        """Mask sizes for a call whose tokens are not stored yet."""
        seen, first = self._seen(tokens)
        return max(seen, self.full_length), first

    def _seen(self, tokens: int) -> tuple[int, int]:
        """Number of tokens that a call sees, and the first one's position."""
        past, window = self.rows.length, self.template.retention
        if not isinstance(window, Window):
            return past + tokens, 0
        kept = min(past, window.size - 1 if tokens else window.size)
        return kept + tokens, past - kept

    def get_max_length(self) -> int:
        """Most tokens per row; -1 for no limit."""
        return -1 if self.limit >= UNLIMITED else self.limit

    def get_max_cache_shape(self) -> int:
        """The older name of :meth:`get_max_length`."""
        return self.get_max_length()

    # Going back ---------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # an attribute there
        """Whether tokens can be cropped: none are evicted, overwritten ones are recorded, or the
        window is as large as the cache."""
        spec = self.template
        forgets = spec.arrangement.lost(spec.max_seq_len, spec.retention.sinks + 1)
        return self.record_past or not forgets

    def activate_past_recording(self) -> None:
        """Record overwritten tokens from now on, so that a layer that evicts can be cropped."""
        self.record_past = True

    def _note_undo(self, call: Call, pads: tuple[int, ...]) -> None:
        if not self.record_past or self._in_order:
            return
        if self._undo is None:
            self._undo = self._copied(pads)
        self._undo.chunks.append((call.k, call.v))

    def overwritten(self) -> Undo | None:
        """Copy what the next tokens may overwrite; None if they overwrite nothing."""
        self.settle()
        return None if self.store is None or self._in_order else self._copied(self.pads)

    def _copied(self, pads: Sequence[int]) -> Undo:
        tensors = {name: x.clone() for name, x in self._placed.tensors.items()
                   if self._overwrites(name)}  # fmt: skip
        return Undo(tensors, self.batches.rows(self.lens, pads), self.written)

    def go_back(self, undo: Undo) -> None:
        """Restore the state at which this copy was made; it can be used again."""
        self.settle()
        self._undo = self._placed.prefetched = None
        self._restore(undo)

    def _overwrites(self, name: str) -> bool:
        """Whether new tokens overwrite others in this tensor."""
        arrangement = self.template.arrangement
        grows = isinstance(arrangement, TwoTiers) and not arrangement.window
        return not grows or name.startswith("recent_")

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of each row. A positive number, as older
        versions of transformers pass, is the number to keep; so is 0 in 4.57.

        Raises:
            ValueError: tokens that would become visible again were overwritten.
        """
        self.cut(after_crop(self.get_seq_length(), tokens_to_remove))

    def cut(self, length: int) -> None:
        """Truncate to ``length`` tokens, including left padding."""
        if self.store is None:
            return
        self.settle()
        undo, self._undo = self._undo, None
        removed = self.rows.length - length
        if removed <= 0:
            return
        self.store.prefetched = None
        if undo is not None and removed <= sum(k.shape[1] for k, _ in undo.chunks):
            return self._redo(undo, removed)
        self._check_kept(length)
        kept = tuple(max(length - pad, 0) for pad in self.pads)
        self.set_rows(kept, self.pads, self.written)
        if not length:
            self._forget()

    def _check_kept(self, length: int) -> None:
        """Raise ValueError if tokens that the next one would see were overwritten."""
        arrangement, kept = self.template.arrangement, [max(length - pad, 0) for pad in self.pads]
        lost = [arrangement.lost(*pair) for pair in zip(self.written, kept, strict=True)]
        if any(lost) and length:
            raise ValueError(
                f"{max(self.written) - max(kept)} tokens can't be cropped from a layer "
                f"{self.template.retention} as {self.template.storage}: it has evicted tokens that "
                "would be visible. Call activate_past_recording() before, or reset() the cache"
            )

    def _redo(self, undo: Undo, removed: int) -> None:
        """Restore the record's beginning, and store its tokens again except the last ones."""
        self._restore(undo)
        k, v = (torch.cat(x, dim=1) for x in zip(*undo.chunks, strict=True))
        if kept := k.shape[1] - removed:
            call = Call(self, k[:, :kept], v[:, :kept], kept)
            self._commit(call, self.pads, self._own_params())
            self._undo = None

    def _restore(self, undo: Undo) -> None:
        for name, tensor in undo.tensors.items():
            self._placed.tensors[name][:, : tensor.shape[1]] = tensor
        self.rows, self._written = undo.rows, undo.written

    def rollback(self, length: int) -> None:
        """Go back to ``length`` tokens after a failed call, which may have stored some.

        Raises:
            ValueError: as :meth:`crop` does.
        """
        self._call = None
        self.cut(length)
        if self.store is not None:
            self.store.prefetched = None
            self._check_kept(length)

    def reset(self) -> None:
        """Drop all tokens, and release storage that grew."""
        if self.store is not None:
            self._call, self._places = None, _NO_PLACES
            self.store.prefetched = None
            self._forget()
            self.store.shrink()

    # Rows ---------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``i`` by row ``beam_idx[i]``."""
        rows = [int(row) for row in beam_idx]
        if self.store is None or rows == list(range(self.batch_size)):
            return
        if len(rows) != self.batch_size:
            return self.batch_select_indices(beam_idx)
        self._before_rows_change()
        moves = [(to, row) for to, row in enumerate(rows) if to != row]
        self.store.move_rows(moves, slice(0, max(self.written)), _MOVED_AT_ONCE)
        self._rename(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        if self.store is None:
            return
        self._before_rows_change()
        index = torch.arange(self.batch_size)[torch.as_tensor(indices).cpu()]
        store = self.store
        store.tensors = {
            name: tensor.index_select(0, index.to(tensor.device))
            for name, tensor in store.tensors.items()
        }
        store.spec = replace(store.spec, batch_size=len(index))
        self._rename(index.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to each other."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def _before_rows_change(self) -> None:
        self.settle()
        self._undo = None
        self._placed.prefetched = None

    def _rename(self, rows: Sequence[int]) -> None:
        of = self.lens, self.pads, self.written
        self.set_rows(*([numbers[row] for row in rows] for numbers in of))

    # Memory -------------------------------------------------------------------------------

    def convert(self, **properties: Any) -> None:
        """Change ``storage`` or ``residence``; see ``CacheLayer.convert``.

        Raises:
            torch.OutOfMemoryError: there is no room; nothing has changed.
        """
        self.settle()
        self._undo, self._places = None, _NO_PLACES
        if self.store is not None:
            self.store.convert(replace(self.store.spec, **properties), [], self.lens)
        self.template = replace(self.template, **properties)
        self.full_length = self.full_length if type(self.template.arrangement) is OneStore else 0

    def offload(self) -> None:
        """Move the storage to host memory."""
        self.convert(residence=OnHost())

    def prefetch(self) -> None:
        """Move the storage to the layer's device."""
        self.convert(residence=OnDevice())

    def nbytes(self) -> int:
        """Bytes that the storage takes now."""
        return 0 if self.store is None else self.store.nbytes()

    def __deepcopy__(self, memo: dict[int, Any]) -> HFLayer:
        self.settle()
        other = copy.copy(self)
        memo[id(self)] = other
        other.after, other._undo, other._places = None, None, _NO_PLACES
        if self.store is not None:
            store = other.store = CacheLayer(self.store.spec)
            store.row_lens = lambda: list(other.lens)
            store.device, store.room = self.store.device, self.store.room
            store.offloaded = self.store.offloaded
            store.tensors = {name: x.clone() for name, x in self.store.tensors.items()}
        return other


_NO_PLACES = Places(-1, None, {}, 0, 0)


def _view_in_place(
    tensors: Mapping[str, torch.Tensor], place: InPlace, batch: Batch, params: AttentionParams
) -> View:
    """The view of one token per row after it was stored in place."""
    size = place.ring
    return ContiguousView(
        stored=tensors,
        past_lens=batch.past_lens.clamp(max=size - 1) if size else batch.past_lens,
        kv_len=_stored_keys(place, batch),
        ragged=batch.lengths.ragged,
        window=0 if size else params.window,
    )


def _stored_keys(place: InPlace, batch: Batch) -> int:
    """Keys of the longest row, including the call's."""
    kv_len = batch.lengths.kv_len
    return min(kv_len, place.ring) if place.ring else kv_len


def _common_dtype(keys: torch.Tensor, values: torch.Tensor) -> torch.dtype:
    """The dtype that holds both."""
    return torch.promote_types(keys.dtype, values.dtype)


def after_crop(length: int, tokens_to_remove: int) -> int:
    """Length after ``crop``; see :meth:`HFLayer.crop`."""
    is_length = tokens_to_remove > 0 or not (tokens_to_remove or SINCE_5)
    kept = tokens_to_remove if is_length else length + tokens_to_remove
    return min(max(kept, 0), length)


#: Length of a cache without a limit: more tokens than any text has.
UNLIMITED = 1 << 40


def _rolled(x: torch.Tensor, pads: tuple[int, ...] | None, way: int) -> torch.Tensor:
    """Roll each row of x (B, T, ...) by its padding: to the left if ``way`` is 1, back if -1."""
    if pads is None:
        return x
    steps = torch.arange(x.shape[1], device=x.device)
    moved = torch.tensor(pads, device=x.device).unsqueeze(-1) * way
    rows = torch.arange(len(x), device=x.device).unsqueeze(-1)
    return x[rows, (steps + moved) % x.shape[1]]


def _padded(x: torch.Tensor, pads: Sequence[int], length: int) -> torch.Tensor:
    """Pad each row of x (B, N, ...) with ``pads`` zeros on the left -> (B, length, ...)."""
    index = torch.arange(length, device=x.device) - torch.tensor(pads, device=x.device).unsqueeze(1)
    if not x.shape[1]:
        return x.new_zeros((len(x), length, *x.shape[2:]))
    rows = torch.arange(len(x), device=x.device).unsqueeze(-1)
    taken = x[rows, index.clamp(0, x.shape[1] - 1)]
    return taken.masked_fill_((index < 0).view(*index.shape, 1, 1), 0)


def _folded(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Fold queries that see the same keys into heads: (B, T, H, D) -> (B, 1, H * T, D)."""
    rows, length, heads, dim = q.shape
    grouped = q.view(rows, length, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    return grouped.reshape(rows, 1, heads * length, dim)


def _unfolded(out: torch.Tensor, length: int, kv_heads: int) -> torch.Tensor:
    rows, _, heads, dim = out.shape
    grouped = out.view(rows, kv_heads, length, heads // (kv_heads * length), dim)
    return grouped.transpose(1, 2).reshape(rows, length, heads // length, dim)

"""Paged growth: rows take pages from a shared pool as tokens come.

A layer's tensors are the pool, (pages, page, H_kv, ...), allocated at once. The cache's
:class:`PageTable`, one for all layers, says which pages belong to which row; it travels with the
lengths of a call, and attention reads through it (``exkv.ops.pages``). A sliding window is only a
mask here: a row keeps its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.cache.arrangement import KVArrangement, OneStore
from exkv.cache.checks import whole_type
from exkv.cache.growth import Static
from exkv.cache.retention import KeepAll, Retention, Window
from exkv.cache.spans import TokenSpan
from exkv.cache.storage import Layout, Shape, Storage
from exkv.cache.views import Segment, SegmentedView, Tensors, View
from exkv.ops.attention import AttentionParams
from exkv.ops.pages import PAGE_STEP

#: Default page size in tokens.
PAGE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Host memory for evicted pages of the prefix cache: they are still found there, and brought
    back on a hit.

    Attributes:
        pages: capacity.
        storage: how pages are stored; None for unchanged. Fewer bits take less memory, and come
            back rounded.

    Raises:
        ValueError: no page.
    """

    pages: int
    storage: Storage | None = None

    def __post_init__(self) -> None:
        if whole_type("pages", self.pages) < 1:
            raise ValueError(f"a tier of {self.pages} pages: there must be at least 1")


@dataclass(frozen=True, slots=True)
class Paged(Static):
    """A pool of pages for all rows.

    Attributes:
        page: tokens a page, a multiple of 16.
        pages: size of the pool; None for enough to fill all rows, so that a cache of one row has
            ``max_seq_len`` tokens to share.
        tiers: where evicted pages go; each tier evicts into the next.

    Raises:
        ValueError: ``page`` is not a multiple of 16, or ``pages`` is below 1.
    """

    page: int = PAGE
    pages: int | None = None
    tiers: tuple[HostTier, ...] = ()

    def __post_init__(self) -> None:
        if whole_type("page", self.page) < 1 or self.page % PAGE_STEP:
            raise ValueError(f"pages of {self.page} tokens: it must be a multiple of {PAGE_STEP}")
        if self.pages is not None and whole_type("pages", self.pages) < 1:
            raise ValueError(f"{self.pages} pages: there must be at least 1")

    def kept(self, retention: Retention) -> Retention:
        return KeepAll()

    def arranged(self, arrangement: KVArrangement) -> KVArrangement:
        one = arrangement if type(arrangement) is OneStore else None
        if one is None or not one.storage.in_place or type(one.retention) not in (KeepAll, Window):
            raise ValueError(
                f"{arrangement} can't be paged: pages need a storage that encodes each token by "
                "itself, and all tokens or a window kept; use Static() or Dynamic() growth for "
                "sinks and recent float tokens"
            )
        return PagedStore(one.storage, one.retention, self)

    def pool_size(self, rows: int, tokens: int) -> int:
        """Number of pages for ``rows`` rows of ``tokens`` tokens."""
        return self.pages or rows * -(-tokens // self.page)


@dataclass(frozen=True, slots=True)
class PagedStore(OneStore):
    """One storage in pages; the tensors are pools. :meth:`read` and :meth:`put` take pages, or rows
    already gathered, each from its first token on."""

    growth: Paged

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rows, tokens, heads, dim = shape
        pages = self.growth.pool_size(rows, tokens)
        return self.storage.layout((pages, self.growth.page, heads, dim), dtype)

    def slots(self, name: str, first: int, last: int) -> slice:
        return slice(first, last)

    def stays(self, longest: int) -> bool:
        return True

    def in_place(self, common: int, written: int, new: int) -> int:
        return common

    def lost(self, length: int, kept: int) -> bool:
        return False

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensors:
        return self.storage.floats.pack(k.to(dtype), v.to(dtype))  # append_kv encodes

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        assert batch.block_table is not None, "a paged cache sets the block table"
        self._append(stored, new, batch.past_lens, batch.new_lens, batch.block_table)
        brought = batch.lengths.chunk if batch.new_lens is None else batch.new_lens
        segment = Segment(
            stored=stored,
            start=torch.zeros_like(batch.past_lens),
            count=batch.past_lens + brought,  # keeps padding off missing pages
            kv_len=batch.lengths.kv_len,
            window=min(filter(None, (params.window, self.retention.size)), default=0),
            block_table=batch.block_table,
        )
        return new, SegmentedView(past_lens=batch.past_lens, segments=(segment,))

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        return self.store(stored, new, batch, params)[1]

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        assert lengths.pages is not None
        past, brought = (torch.tensor(x, dtype=torch.int32) for x in (lengths.past, lengths.new))
        self._append(stored, new, past, brought, lengths.pages)

    def _append(
        self,
        stored: Tensors,
        new: Tensors,
        past_lens: Tensor,
        new_lens: Tensor | None,
        block_table: Tensor,
    ) -> None:
        storage = self.storage
        keys, values = (storage.tensors_of(side, stored) for side in ("k", "v"))
        torch.ops.exkv.append_kv(
            *(new["k"], new.get("v", new["k"]), None, None),
            *(keys, storage.keys, values, storage.values),
            *(past_lens, new_lens, block_table, 0, storage.rotate),
        )

    @property
    def _rows(self) -> OneStore:
        return OneStore(self.storage, KeepAll())

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        return self._rows.read(stored, span, dtype, head_dim)

    def put(
        self, stored: Tensors, span: TokenSpan, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        self._rows.put(stored, span, k, v, dtype)


def any_pages(growth: Paged, rows: int, lengths: Lengths) -> Lengths:
    """Lengths with an arbitrary block table, for planning a call in a cache of ``rows`` rows."""
    needed = -(-lengths.kv_len // growth.page)
    numbers = torch.arange(len(lengths.past) * needed, dtype=torch.int32)
    pages = numbers % growth.pool_size(rows, lengths.kv_len)
    return replace(lengths, pages=pages.view(-1, needed))

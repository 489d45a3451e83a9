"""Growth in pages: rows take them out of a pool that they share, as tokens come.

A layer's tensors are the pool, (pages, page, H_kv, ...), allocated at once. Which pages are whose
is in the cache's :class:`PageTable`, one for all layers, and comes to them with the lengths of a
call; attention reads through it (``exkv.ops.pages``). A window is a mask here: a row keeps its
pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from exkv.batch import Batch, Lengths
from exkv.cache.arrangement import Arrangement, OneStore
from exkv.cache.checks import whole_type
from exkv.cache.retention import KeepAll, Retention, Window
from exkv.cache.spans import TokenSpan
from exkv.cache.storage import Layout, Shape, Storage
from exkv.cache.views import Segment, SegmentedView, Tensors, View
from exkv.ops.attention import AttentionParams
from exkv.ops.pages import PAGE_STEP

#: Tokens of a page where nothing is said.
PAGE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Host memory for pages that nobody holds, and that make place for others: they are found
    there, and come back.

    Attributes:
        pages: how many there is room for.
        storage: how they are stored; None for as they were. In fewer bits they take less, and come
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
class Paged:
    """A pool of pages for all rows.

    Attributes:
        page: tokens of one, a multiple of 16.
        pages: how many there are; None for as many as all rows need in full, so that a cache of
            one row of ``max_seq_len`` has that many tokens for whoever shares them.
        tiers: where pages go that nobody holds, once others need their place; each one's go on to
            the next.

    Raises:
        ValueError: a page that is no multiple of 16, or no page.
    """

    page: int = PAGE
    pages: int | None = None
    tiers: tuple[HostTier, ...] = ()

    def __post_init__(self) -> None:
        if whole_type("page", self.page) < 1 or self.page % PAGE_STEP:
            raise ValueError(f"pages of {self.page} tokens: it must be a multiple of {PAGE_STEP}")
        if self.pages is not None and whole_type("pages", self.pages) < 1:
            raise ValueError(f"{self.pages} pages: there must be at least 1")

    def room_for(self, tokens: int, capacity: int) -> int:
        return capacity

    def last_room(self, capacity: int) -> int:
        return 0

    def kept(self, retention: Retention) -> Retention:
        return KeepAll()

    def arranged(self, arrangement: Arrangement) -> Arrangement:
        one = arrangement if type(arrangement) is OneStore else None
        if one is None or not one.storage.in_place or type(one.retention) not in (KeepAll, Window):
            raise ValueError(
                f"{arrangement} can't lie in pages: they hold every token by itself, of all tokens "
                "or of a window; sinks and recent tokens as floats need a static or dynamic growth"
            )
        return PagedStore(one.storage, one.retention, self)

    def pool_size(self, rows: int, tokens: int) -> int:
        """Pages that there are, for rows of so many tokens."""
        return self.pages or rows * -(-tokens // self.page)


@dataclass(frozen=True, slots=True)
class PagedStore(OneStore):
    """Every token in one page, in one storage; tensors are pools. What is read and put by
    :meth:`read` and :meth:`put` are pages, or rows that were gathered, each from its first token
    on."""

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

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Tensors:
        return {"k": k.to(dtype), "v": v.to(dtype)}  # the op that stores them does the rest

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        assert batch.block_table is not None, "a cache tells a call where its rows lie"
        self._append(stored, new, batch.past_lens, batch.new_lens, batch.block_table)
        brought = batch.lengths.chunk if batch.new_lens is None else batch.new_lens
        segment = Segment(
            stored=stored,
            start=torch.zeros_like(batch.past_lens),
            count=batch.past_lens + brought,  # padding sees no key for which there is no page
            kv_len=batch.lengths.kv_len,
            window=min(filter(None, (params.window, self.retention.size)), default=0),
            block_table=batch.block_table,
        )
        return new, SegmentedView(past_lens=batch.past_lens, segments=(segment,))

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        assert lengths.pages is not None
        past, brought = (torch.tensor(x, dtype=torch.int32) for x in (lengths.past, lengths.new))
        self._append(stored, new, past, brought, lengths.pages)

    def _append(
        self,
        stored: Tensors,
        new: Tensors,
        past_lens: torch.Tensor,
        new_lens: torch.Tensor | None,
        block_table: torch.Tensor,
    ) -> None:
        storage = self.storage
        keys, values = (storage.tensors_of(side, stored) for side in ("k", "v"))
        torch.ops.exkv.append_kv(
            *(new["k"], new["v"], None, None),
            *(keys, storage.keys, values, storage.values),
            *(past_lens, new_lens, block_table, 0, storage.rotate),
        )

    @property
    def _rows(self) -> OneStore:
        return OneStore(self.storage, KeepAll())

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.read(stored, span, dtype, head_dim)

    def put(
        self, stored: Tensors, span: TokenSpan, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._rows.put(stored, span, k, v, dtype)


def any_pages(growth: Paged, rows: int, lengths: Lengths) -> Lengths:
    """The lengths of a call that is only planned, in a cache of so many rows, with pages."""
    needed = -(-lengths.kv_len // growth.page)
    numbers = torch.arange(len(lengths.past) * needed, dtype=torch.int32)
    pages = numbers % growth.pool_size(rows, lengths.kv_len)
    return replace(lengths, pages=pages.view(-1, needed))

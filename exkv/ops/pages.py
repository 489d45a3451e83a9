"""Block tables: where a row's tokens are in a pool of pages (named as in vLLM).

A pool is a store's tensors with pages for rows, (N, page, H_kv, ...). A block table, int32 (B,
pages), lists each row's pages in token order: token ``j`` of row ``b`` is token ``j % page`` of
page ``block_table[b, j // page]`` (PagedAttention, Kwon et al., 2023). If an entry of a tensor
covers 32 tokens, a page of it has ``page / 32`` entries. Rows may share pages. Pages without a key
that a row's queries see are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_formats import KVFormat
from .registry import is_readable

#: Page sizes are multiples of this many tokens, the kernels' shortest step over keys.
PAGE_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Locations of rows' tokens in a pool of pages.

    Attributes:
        table: int64 (B, pages); 0 for a page that no query of the row sees.
        begin, end: int64 (B, 1), bounds of the keys that the row's queries see.
    """

    table: Tensor
    begin: Tensor
    end: Tensor

    @classmethod
    def of(
        cls,
        block_table: Tensor | None,
        pool: Tensor,
        lens: tuple[Tensor, ...],
        length: int,
        window: int,
        kv_len: int,
    ) -> Pages | None:
        """Pages for the rows' queries; ``lens`` are the int32 arguments of
        :func:`attention_part`."""
        if block_table is None:
            return None
        past_lens, key_start, key_count = (x.long().unsqueeze(-1) for x in lens)
        first = past_lens - key_start  # the query's position among the keys
        end = torch.minimum(key_count.clamp(max=kv_len), first + length).clamp_(min=0)
        begin = (first - window + 1).clamp_(min=0) if window else torch.zeros_like(end)
        page = pool.shape[1]
        starts = torch.arange(block_table.shape[1], device=block_table.device) * page
        read = (starts < end) & (starts + page > begin)
        check_entries("attention_part", block_table, read, len(pool))
        return cls(table=block_table.where(read, 0).long(), begin=begin, end=end)

    def taken(self, pool: Tensor, entries: slice) -> Tensor:
        """Copy these entries of all rows out of (N, entries of a page, ...)."""
        index = torch.arange(entries.start, entries.stop, device=pool.device)
        size = pool.shape[1]
        return pool[self.table[:, index // size], index % size]

    def cleared(self, x: Tensor, tile: slice) -> Tensor:
        """Zero x (B, S, ...) in place at tokens that no query of their row sees: they may hold
        NaNs, and 0 times NaN is NaN."""
        index = torch.arange(tile.start, tile.stop, device=x.device)
        seen = (index >= self.begin) & (index < self.end)
        return x.masked_fill_(~seen[..., None, None], 0)


# Checks -----------------------------------------------------------------------------------------


def check_table(op: str, block_table: Tensor, q: Tensor, kv_len: int, page: int) -> None:
    found = tuple(block_table.shape)
    if block_table.dtype != torch.int32 or len(found) != 2 or found[0] != len(q):
        raise ValueError(
            f"{op}: block_table must be int32 ({len(q)}, pages), a list of pages for "
            f"each row; it is {block_table.dtype} {found}"
        )
    if kv_len > found[1] * page:
        raise ValueError(
            f"{op}: kv_len {kv_len} must be at most the {found[1] * page} tokens of "
            f"block_table's {found[1]} pages of {page}"
        )


def check_entries(op: str, entries: Tensor, read: Tensor, pages: int) -> None:
    """Raise ValueError if an entry that is read is not a page, as far as the host can see the
    numbers."""
    if not (is_readable(entries) and is_readable(read)):
        return
    wrong = (read & ((entries < 0) | (entries >= pages))).nonzero()
    if len(wrong):
        row, entry = wrong[0].tolist()
        raise ValueError(
            f"{op}: block_table's row {row} has {int(entries[row, entry])} as entry "
            f"{entry}; k and v have {pages} pages, 0 to {pages - 1}"
        )


def check_page(op: str, name: str, kind: KVFormat, page: int) -> None:
    if page < 1 or page % PAGE_STEP:
        raise ValueError(
            f"{op}: {name} has pages of {page} tokens; they must be a multiple of {PAGE_STEP}"
        )
    if page % kind.group:
        raise ValueError(
            f"{op}: {name} has pages of {page} tokens, and {kind.name} encodes "
            f"{kind.group} together; make pages a multiple of that"
        )

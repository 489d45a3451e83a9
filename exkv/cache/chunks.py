"""Chunked attention (Llama 4), in which a token sees only its own chunk of positions, by kernels
without chunks: the queries of each chunk are a call of their own, over keys from the chunk's first
one on. So each layer reads no more than its queries see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.ops.kv_formats import FORMATS

from .views import SegmentedView, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Queries of some rows that see the same chunk of positions.

    Attributes:
        rows: adjacent rows of the call.
        tokens: the queries, among the call's tokens of each row.
        first: position of the chunk's first token.
        kv_len: keys of the longest row, from that position on.
    """

    rows: slice
    tokens: slice
    first: int
    kv_len: int

    def past_lens(self, batch: Batch) -> Tensor:
        """Tokens of each row between the chunk's first and the piece's own: int32."""
        return batch.past_lens[self.rows] + (self.tokens.start - self.first)


def pieces(lengths: Lengths, chunk: int) -> Iterator[Piece]:
    """Split the call's queries by chunk; padding goes with the row's last real token."""
    cuts = [
        tuple(_cuts(past, new, chunk)) for past, new in zip(lengths.past, lengths.new, strict=True)
    ]
    for own, rows in groupby(range(len(cuts)), cuts.__getitem__):
        first_row, *_, last_row = 2 * list(rows)
        rows_of = slice(first_row, last_row + 1)
        ends = [sum(each) for each in zip(lengths.past, lengths.new, strict=True)][rows_of]
        stops = [*(start for start, _ in own[1:]), None]
        for (start, first), stop in zip(own, stops, strict=True):
            tokens = slice(start, lengths.chunk if stop is None else stop)
            kv_len = max(ends) - first if stop is None else chunk
            yield Piece(rows=rows_of, tokens=tokens, first=first, kv_len=kv_len)


def _cuts(past: int, new: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield each piece's first token and the position at which its chunk starts, for one row."""
    last = max(past + new - 1, 0)
    first = min(past, last) // chunk * chunk
    yield 0, first
    for at in range(first + chunk, last + 1, chunk):
        yield at - past, at


def over_chunks(
    attend: Callable[[Tensor, View], Tensor],
    q: Tensor,
    view: View,
    formats: tuple[str, str],
    batch: Batch,
    chunk: int,
) -> Tensor | None:
    """Attend q (B, T, H, D) over a view of all keys, piece by piece -> (B, T, H, D); None if the
    view can't be cut where a chunk starts.

    Args:
        attend: runs a piece's queries over the keys that they see.
        formats: formats of stored keys and values.
    """
    found = [(piece, _since(view, formats, piece, batch)) for piece in pieces(batch.lengths, chunk)]
    if any(shown is None for _, shown in found):
        return None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for piece, shown in found:
        assert shown is not None
        out[piece.rows, piece.tokens] = attend(q[piece.rows, piece.tokens], shown)
    return out


def _since(view: View, formats: tuple[str, str], piece: Piece, batch: Batch) -> View | None:
    """The part of a view that a piece's queries see; None unless each token is at the slot of its
    position."""
    if isinstance(view, SegmentedView):
        return _pages_since(view, piece, batch)
    if view.past_lens is not batch.past_lens:  # a window, where rows start at any position
        return None
    groups = [FORMATS[kind].group for kind in view.formats or formats]
    if any(piece.first % group for group in groups):
        return None
    of = dict(zip("kv", groups, strict=True))
    stored = {
        name: x[piece.rows, piece.first // (of[name[0]] if "_" in name else 1) :]
        for name, x in view.stored.items()
    }
    return replace(view, stored=stored, past_lens=piece.past_lens(batch), kv_len=piece.kv_len)


def _pages_since(view: SegmentedView, piece: Piece, batch: Batch) -> View | None:
    segment, *others = view.segments
    if others or segment.block_table is None:
        return None
    page = next(iter(segment.stored.values())).shape[1]
    if piece.first % page:
        return None
    since = replace(
        segment,
        start=segment.start[piece.rows],
        count=(segment.count[piece.rows] - piece.first).clamp_(max=piece.kv_len),
        kv_len=piece.kv_len,
        block_table=segment.block_table[piece.rows, piece.first // page :],
    )
    return SegmentedView(past_lens=piece.past_lens(batch), segments=(since,))

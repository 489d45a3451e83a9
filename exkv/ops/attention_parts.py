"""Attention over several parts of a sequence, each in its own storage, and their exact merge.

:func:`attention_part` attends to one part and returns the log-sum-exp of its scores beside the
output; :func:`merge_parts` weights the outputs of all parts by those. A part may be a shared
prompt, quantized old keys, or recent ones in full precision: the softmax over all of them is exact
(flash-decoding's split over the sequence; FlashInfer's merge of attention states).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import KEY_TILE, QUERY_BLOCK, OnlineSoftmax, group_heads, ungroup_heads
from .checks import check_layout, check_row_numbers, check_tensor_count
from .kv_formats import FORMATS
from .pages import Pages, check_page, check_table
from .registry import define_op


def _fake(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape, dtype=torch.float32)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@define_op(
    "attention_part(Tensor q, Tensor[] k, str k_format, Tensor[] v, str v_format, "
    "Tensor past_lens, Tensor key_start, Tensor key_count, int kv_len, float scale, "
    "int window=0, float softcap=0.0, Tensor? block_table=None) -> (Tensor, Tensor)",
    fake=_fake,
    kernels_fall_back=True,
    names=FORMATS,
)
def attention_part(
    q: Tensor,
    k: Sequence[Tensor],
    k_format: str,
    v: Sequence[Tensor],
    v_format: str,
    past_lens: Tensor,
    key_start: Tensor,
    key_count: Tensor,
    kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D) over one part -> out float32 (B, T, H, D), lse float32 (B, T, H).

    Query ``t`` of row ``b`` is at position ``past_lens[b] + t``, key ``j`` of the part at
    ``key_start[b] + j``. The key is visible if ``j < key_count[b]``, if it isn't after the query,
    and, with a window, if it is less than ``window`` before it. ``out`` is the softmax over this
    part alone and ``lse`` the log-sum-exp of its scores; for a query that sees nothing they are 0
    and -inf. A native kernel may compute in the precision of q's dtype; the reference computes in
    float32.

    Args:
        k, v: tensors of a store in the order of its format's ``names``, (B or 1, S, H_kv, ...)
            if the format has an entry a token. A batch of 1 is shared by all rows, and not copied.
        k_format, v_format: names in :data:`exkv.ops.kv_formats.FORMATS`.
        past_lens, key_start, key_count: int32 (B,).
        kv_len: the largest ``key_count``, or more; later keys are not read.
        scale, window, softcap: as in :class:`exkv.ops.attention.AttentionParams`.
        block_table: int32 (B, pages), if k and v are pools of pages (``exkv.ops.pages``), whose
            entries may cover 32 tokens. On the CPU the entries that are read are checked; on a GPU
            they are unknown before the kernel runs, and an invalid page is read unchecked.

    Raises:
        ValueError: an unknown format, tensors that don't match their format, or (on the CPU) an
            invalid page in the block table.
    """
    keys = _Keys(
        past_lens=past_lens, start=key_start, count=key_count, kv_len=kv_len, window=window
    )
    return _attend(q, (k_format, k), (v_format, v), keys, scale, softcap, block_table)


@define_op(
    "attention_part_since(Tensor q, Tensor[] k, str k_format, Tensor[] v, str v_format, "
    "Tensor past_lens, Tensor key_start, Tensor key_count, Tensor since, int kv_len, float scale, "
    "int window=0, float softcap=0.0, Tensor? block_table=None) -> (Tensor, Tensor)",
    fake=_fake,
)
def attention_part_since(
    q: Tensor,
    k: Sequence[Tensor],
    k_format: str,
    v: Sequence[Tensor],
    v_format: str,
    past_lens: Tensor,
    key_start: Tensor,
    key_count: Tensor,
    since: Tensor,
    kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention_part` for queries that see nothing before a given position each.

    Args:
        since: int32 (B, T), the first position that each query sees.
    """
    if since.shape != q.shape[:2] or since.dtype != torch.int32:
        raise ValueError(
            f"attention_part_since: since must be int32 {tuple(q.shape[:2])}, a position for each "
            f"query; it is {since.dtype} {tuple(since.shape)}"
        )
    keys = _Keys(
        past_lens=past_lens,
        start=key_start,
        count=key_count,
        kv_len=kv_len,
        window=window,
        since=since,
    )
    return _attend(q, (k_format, k), (v_format, v), keys, scale, softcap, block_table)


def chunk_starts(past_lens: Tensor, tokens: int, chunk: int) -> Tensor:
    """First position of each query's chunk: int32 (B, T), for ``tokens`` queries after
    ``past_lens``, int32 (B,), tokens of their rows."""
    steps = torch.arange(tokens, device=past_lens.device, dtype=torch.int32)
    positions = past_lens.unsqueeze(-1) + steps
    return positions - positions % chunk


def _attend(
    q: Tensor,
    k: tuple[str, Sequence[Tensor]],
    v: tuple[str, Sequence[Tensor]],
    keys: _Keys,
    scale: float,
    softcap: float,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The reference; k and v with their formats."""
    kv_heads = _check(q, k, v, keys, block_table)
    _check_params(scale, keys.window, softcap)
    pages = Pages.of(block_table, k[1][0], keys.lens, q.shape[1], keys.window, keys.kv_len)
    stores = [_Store(name, x, q.shape[-1], pages) for name, x in (k, v)]
    part = _Part(keys=keys, stores=stores, kv_heads=kv_heads, scale=scale, softcap=softcap)
    out, lse = _fake(q)
    length = q.shape[1] if len(q) else 0
    for first in range(0, length, QUERY_BLOCK):
        queries = slice(first, min(first + QUERY_BLOCK, length))
        out[:, queries], lse[:, queries] = part.attend(q[:, queries], queries)
    return out, lse


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """Merge the (out, lse) of :func:`attention_part` into the softmax over the keys of all parts.

    A query that sees nothing in any part gets 0.

    Returns:
        (B, T, H, D) in dtype.

    Raises:
        ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("merge_parts needs at least one part, and got none")
    if len(parts) == 1:
        return parts[0][0].to(dtype)
    # Finite, so that a query that sees nothing in any part gets weights of exp(-inf).
    peak = torch.stack([lse for _, lse in parts]).amax(0).clamp_(min=torch.finfo(torch.float32).min)
    total, merged = torch.zeros_like(peak), torch.zeros_like(parts[0][0])
    for out, lse in parts:
        weight = (lse - peak).exp_()
        total += weight
        merged.addcmul_(out, weight.unsqueeze(-1))
    return merged.div_(total.masked_fill_(total == 0, 1).unsqueeze(-1)).to(dtype)


@define_op("share_with_sinks_(Tensor(a!) out, Tensor lse, Tensor sinks) -> ()")
def share_with_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Take the share of sinks, scores (H,) without values, off an :func:`attention_part`'s output:
    out float32 (B, T, H, D), contiguous, overwritten, and lse float32 (B, T, H). The same as a
    :func:`sink_part` beside one other, for :func:`merge_parts`."""
    if lse.shape != out.shape[:-1] or sinks.shape != out.shape[2:3]:
        raise ValueError(
            f"share_with_sinks_: out {tuple(out.shape)} must be (B, T, H, D), lse "
            f"{tuple(lse.shape)} (B, T, H) and sinks {tuple(sinks.shape)} (H,)"
        )
    scores = sinks.float()
    peak = torch.maximum(lse, scores)
    own = (lse - peak).exp_()
    total = (scores - peak).exp_().add_(own)
    out.mul_(own.unsqueeze(-1)).div_(total.unsqueeze(-1))


def sink_part(q: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Sinks (H,) as a part for :func:`merge_parts` beside those of q (B, T, H, D): zero output, and
    the sinks as scores. Allocates nothing of q's size."""
    out = q.new_zeros((), dtype=torch.float32).expand(q.shape)
    return out, sinks.float().expand(q.shape[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Positions and visibility of a part's keys; arguments as of :func:`attention_part_since`."""

    past_lens: Tensor
    start: Tensor
    count: Tensor
    kv_len: int
    window: int
    since: Tensor | None = None

    @property
    def lens(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.past_lens, self.start, self.count

    def tiles(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield each tile of keys, and its mask: bool (B, T, S)."""
        steps = torch.arange(queries.start, queries.stop, device=self.past_lens.device)
        positions = (self.past_lens.unsqueeze(-1) + steps).unsqueeze(-1)  # (B, T, 1)
        for start in range(0, self.kv_len, KEY_TILE):
            tile = slice(start, min(start + KEY_TILE, self.kv_len))
            seen = self._seen(positions, tile)
            if self.since is not None:
                first = self.since[:, queries].unsqueeze(-1)
                seen &= self._at(tile) >= first
            yield tile, seen

    def _at(self, tile: slice) -> Tensor:
        """The positions of keys: (B, 1, S)."""
        index = torch.arange(tile.start, tile.stop, device=self.start.device)
        return (self.start.unsqueeze(-1) + index).unsqueeze(1)

    def _seen(self, positions: Tensor, tile: slice) -> Tensor:
        index, keys = torch.arange(tile.start, tile.stop, device=positions.device), self._at(tile)
        seen = keys <= positions
        seen &= (index < self.count.unsqueeze(-1)).unsqueeze(1)
        if self.window:
            seen &= keys > positions - self.window
        return seen


class _Store:
    """The stored keys or values of a part, dequantized tile by tile."""

    def __init__(
        self, name: str, tensors: Sequence[Tensor], head_dim: int, pages: Pages | None
    ) -> None:
        self.format = FORMATS[name]
        self.tensors = dict(zip(self.format.names, tensors, strict=True))
        self.head_dim = head_dim
        self.pages = pages

    @property
    def serves_all_rows(self) -> bool:
        """Whether all rows of queries share one row of keys."""
        return self.pages is None and len(self.tensors[self.format.names[0]]) == 1

    def widened(self, tile: slice) -> Tensor:
        """(B or 1, H_kv, S, D) float32; the tile must start at a group of tokens."""
        group = self.format.group
        groups = slice(tile.start // group, -(-tile.stop // group))
        stored = {
            name: tensor[:, entries] if self.pages is None else self.pages.taken(tensor, entries)
            for name, tensor in self.tensors.items()
            for entries in (groups if name else tile,)
        }
        wide = self.format.widen(stored, torch.float32, self.head_dim)
        return (self.pages.cleared(wide, tile) if self.pages else wide).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part as queries see it: its keys, and the stores of keys and of values."""

    keys: _Keys
    stores: Sequence[_Store]
    kv_heads: int
    scale: float
    softcap: float

    def attend(self, q: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
        """out (B, T, H, D) and lse (B, T, H) of a block of queries, q (B, T, H, D)."""
        k, v = self.stores
        shared = k.serves_all_rows
        rows = _one_row(q.float() * self.scale, shared)
        state = OnlineSoftmax(group_heads(rows, self.kv_heads), self.softcap)
        for tile, seen in self.keys.tiles(queries):
            mask = _one_row(seen, shared).unsqueeze(1)
            mask = mask.repeat(1, 1, q.shape[2] // self.kv_heads, 1)
            state.add(k.widened(tile), v.widened(tile), mask)
        out, lse = (ungroup_heads(x, rows.shape[1]) for x in state.part())
        return out.view(q.shape), lse.view(q.shape[:-1])


def _one_row(x: Tensor, shared: bool) -> Tensor:
    """(B, T, ...), or (1, B * T, ...) if all rows share one row of keys: a batched product would
    first repeat the keys for each row."""
    return x.flatten(0, 1).unsqueeze(0) if shared else x


# Checks -----------------------------------------------------------------------------------------


def _check(
    q: Tensor,
    k: tuple[str, Sequence[Tensor]],
    v: tuple[str, Sequence[Tensor]],
    keys: _Keys,
    block_table: Tensor | None,
) -> int:
    """Check that the tensors fit together, and return H_kv."""
    if q.dim() != 4:
        raise ValueError(f"attention_part: q must be (B, tokens, heads, D); it is {tuple(q.shape)}")
    if keys.kv_len < 0:
        raise ValueError(f"attention_part: kv_len {keys.kv_len} must be 0 or more")
    for name, tensor in zip(("past_lens", "key_start", "key_count"), keys.lens, strict=True):
        check_row_numbers("attention_part", name, tensor, len(q))
    paged = block_table is not None
    sizes = [
        _check_store(name, *store, q, keys.kv_len, paged) for name, store in (("k", k), ("v", v))
    ]
    (k_rows, page, k_heads), (v_rows, v_page, v_heads) = sizes
    if (k_rows, k_heads) != (v_rows, v_heads):
        raise ValueError(
            f"attention_part: k has {k_rows} {'pages' if paged else 'rows'} and {k_heads} heads, "
            f"and v has {v_rows} and {v_heads}: they must have the same"
        )
    if page != v_page:
        raise ValueError(
            f"attention_part: k has pages of {page} tokens, and v of {v_page}: they must be alike"
        )
    if block_table is not None:
        check_table("attention_part", block_table, q, keys.kv_len, page)
    return k_heads


def _check_store(
    name: str, kind: str, tensors: Sequence[Tensor], q: Tensor, kv_len: int, paged: bool
) -> tuple[int, int, int]:
    """Check a store, and return its rows (or pages), needed tokens of each, and heads."""
    if kind not in FORMATS:
        raise ValueError(
            f"attention_part: {name}_format is {kind!r}; it must be one of {', '.join(FORMATS)}"
        )
    check_tensor_count("attention_part", name, FORMATS[kind], tensors, "B or 1")
    rows, tokens, heads, _ = tensors[0].shape
    if paged:
        check_page("attention_part", name, FORMATS[kind], tokens)
    elif rows not in (1, len(q)):
        raise ValueError(
            f"attention_part: {name} has {rows} rows; it needs q's {len(q)}, or 1 that all share"
        )
    if heads < 1 or q.shape[2] % heads:
        raise ValueError(
            f"attention_part: q's {q.shape[2]} heads must be a multiple of {name}'s {heads}"
        )
    tokens = tokens if paged else kv_len
    dtype = tensors[0].dtype if tensors[0].is_floating_point() else torch.float32
    shape = rows, tokens, heads, q.shape[3]
    check_layout("attention_part", name, FORMATS[kind], tensors, shape, dtype, roomy=not paged)
    return rows, tokens, heads


def _check_params(scale: float, window: int, softcap: float) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"attention_part: scale {scale} must be finite")
    if window < 0:
        raise ValueError(f"attention_part: window {window} must be positive, or 0 for none")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"attention_part: softcap {softcap} must be positive, or 0 for none")

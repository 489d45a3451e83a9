"""Append a call's keys and values to a store: rotated, encoded and written in one op.

Each token is read once and written once. Bit-identical to ``rope``, ``hadamard`` and the formats'
encoding in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_layout, check_row_numbers, check_tensor_count
from .kv_formats import FORMATS
from .pages import check_entries, check_page, check_table
from .registry import define_op, is_readable


@define_op(
    "append_kv(Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!)[] k_stored, str k_format, "
    "Tensor(b!)[] v_stored, str v_format, Tensor past_lens, Tensor? new_lens=None, "
    "Tensor? block_table=None, int ring=0, bool hadamard=False) -> ()",
    names=FORMATS,
)
def append_kv(
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_stored: Sequence[Tensor],
    k_format: str,
    v_stored: Sequence[Tensor],
    v_format: str,
    past_lens: Tensor,
    new_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    ring: int = 0,
    hadamard: bool = False,
) -> None:
    """Write k and v (B, T, H_kv, D) after the ``past_lens`` tokens of their rows.

    Token ``t`` of row ``b`` is written at ``past_lens[b] + t``, modulo ``ring`` in a ring. On the
    CPU a place that doesn't exist is refused before anything is written; on a GPU the numbers are
    unknown before the kernel runs, and such a token is not stored.

    Args:
        cos, sin: (B or 1, T, R), to rotate k by first, as ``rope`` takes them; None for no
            rotation.
        k_stored, v_stored: tensors of a store in the order of its format's ``names``, (B or more,
            S, H_kv, ...), or a pool of pages if there is a block table. Floats are of k's dtype.
        k_format, v_format: names in :data:`exkv.ops.kv_formats.FORMATS`; formats must encode each
            token by itself.
        past_lens: int32 (B,).
        new_lens: int32 (B,): later tokens of a row are padding and not written; None for no
            padding.
        block_table: int32 (B, pages), the pages of each row; see ``exkv.ops.pages``.
        ring: size of the ring, to which only the last ``ring`` new tokens of a row are written; 0
            if rows are not rings.
        hadamard: whether heads are transformed by ``exkv::hadamard`` before they are encoded.

    Raises:
        ValueError: tensors that don't fit together, a format that encodes several tokens together,
            or (on the CPU) a token without a place.
    """
    stores = {"k": (k_format, k_stored), "v": (v_format, v_stored)}
    _check(k, v, cos, sin, past_lens, new_lens)
    room = _check_stores(stores, k, block_table, ring)
    places = _Places.of(k, past_lens, new_lens, ring)
    if is_readable(past_lens):
        places.check(past_lens, room, block_table, len(k_stored[0]))
    index = places.stored(block_table, k_stored[0].shape[1])
    if cos is not None:
        k = torch.ops.exkv.rope(k, k[:, :, :0], cos, sin)[0]
    for x, (kind, stored) in zip((k, v), stores.values(), strict=True):
        heads = torch.ops.exkv.hadamard(x) if hadamard else x
        for tensor, new in zip(stored, FORMATS[kind].encode(heads).values(), strict=True):
            tensor[index] = new[places.row, places.token]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The tokens to write: row, index in the call, and place in the row; all of one shape,
    int64."""

    row: Tensor
    token: Tensor
    place: Tensor

    @classmethod
    def of(cls, k: Tensor, past_lens: Tensor, new_lens: Tensor | None, ring: int) -> _Places:
        rows, length = k.shape[:2]
        first = max(length - ring, 0) if ring and new_lens is None else 0
        token = torch.arange(first, length, device=k.device).expand(rows, -1)
        row = torch.arange(rows, device=k.device).unsqueeze(-1).expand(token.shape)
        if new_lens is not None:
            ends = new_lens.long().clamp(max=length).unsqueeze(-1)
            real = token < ends
            if ring:
                real &= token >= ends - ring
            row, token = row[real], token[real]
        place = past_lens.long()[row] + token
        return cls(row=row, token=token, place=place % ring if ring else place)

    def stored(self, block_table: Tensor | None, page: int) -> tuple[Tensor, ...]:
        """Index in the store: row or page, and token within it."""
        if block_table is None:
            return self.row, self.place
        return block_table[self.row, self.place // page].long(), self.place % page

    def check(self, past_lens: Tensor, room: int, block_table: Tensor | None, pages: int) -> None:
        """Raise ValueError, with numbers, for a token without a place."""
        wrong = ((self.place < 0) | (self.place >= room)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            row = int(self.row[at])
            raise ValueError(
                f"append_kv: row {row} has {int(past_lens[row])} tokens and room for {room}; there "
                f"is no place {int(self.place[at])} for token {int(self.token[at])}"
            )
        if block_table is None:
            return
        written = torch.zeros_like(block_table, dtype=torch.bool)
        written[self.row, self.place // (room // block_table.shape[1])] = True
        check_entries("append_kv", block_table, written, pages)


# Checks -----------------------------------------------------------------------------------------


def _check(
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    past_lens: Tensor,
    new_lens: Tensor | None,
) -> None:
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"append_kv: k and v must both be (B, T, heads, D) of one dtype; k is {k.dtype} "
            f"{tuple(k.shape)} and v {v.dtype} {tuple(v.shape)}"
        )
    if (cos is None) != (sin is None):
        raise ValueError("append_kv: cos and sin go together; give both, or none")
    for name, factor in (("cos", cos), ("sin", sin)):
        if factor is not None:
            _check_factor(name, factor, k)
    check_row_numbers("append_kv", "past_lens", past_lens, len(k))
    if new_lens is not None:
        check_row_numbers("append_kv", "new_lens", new_lens, len(k))


def _check_factor(name: str, x: Tensor, k: Tensor) -> None:
    rows, length, _, head_dim = k.shape
    if x.dim() != 3 or x.shape[0] not in (1, rows) or x.shape[1] != length or x.dtype != k.dtype:
        raise ValueError(
            f"append_kv: {name} must be ({rows}, {length}, R), a factor for each token of k "
            f"{tuple(k.shape)}, and {k.dtype}; it is {x.dtype} {tuple(x.shape)}"
        )
    if x.shape[2] % 2 or x.shape[2] > head_dim:
        raise ValueError(
            f"append_kv: {name} {tuple(x.shape)} must rotate an even number of features, at "
            f"most the {head_dim} of a head; it rotates {x.shape[2]}"
        )


def _check_stores(
    stores: dict[str, tuple[str, Sequence[Tensor]]],
    k: Tensor,
    block_table: Tensor | None,
    ring: int,
) -> int:
    """Check both stores, and return the places of a row."""
    shapes = {name: _check_store(name, *store, k, block_table is not None)
              for name, store in stores.items()}  # fmt: skip
    if shapes["k"] != shapes["v"]:
        raise ValueError(
            f"append_kv: k_stored has {shapes['k'][0]} rows of {shapes['k'][1]} tokens, and "
            f"v_stored {shapes['v'][0]} of {shapes['v'][1]}: they must have the same"
        )
    room = shapes["k"][1]
    if block_table is not None:
        check_table("append_kv", block_table, k, 0, room)
        room *= block_table.shape[1]
    if not 0 <= ring <= room:
        raise ValueError(
            f"append_kv: ring {ring} must be at most the {room} tokens that a row has room for, "
            "or 0 for none"
        )
    return room


def _check_store(
    name: str, kind: str, stored: Sequence[Tensor], k: Tensor, paged: bool
) -> tuple[int, int]:
    """Check a store, and return its rows, or pages, and their tokens."""
    single = [known for known, form in FORMATS.items() if form.group == 1]
    if kind not in single:
        raise ValueError(
            f"append_kv: {name}_format is {kind!r}; it must be one of {', '.join(single)}, which "
            "encode every token by itself"
        )
    check_tensor_count("append_kv", f"{name}_stored", FORMATS[kind], stored, "B or more")
    rows, tokens = stored[0].shape[:2]
    if paged:
        check_page("append_kv", f"{name}_stored", FORMATS[kind], tokens)
    elif rows < len(k):
        raise ValueError(f"append_kv: {name}_stored has {rows} rows, and k has {len(k)}")
    shape = rows, tokens, *k.shape[2:]
    check_layout("append_kv", f"{name}_stored", FORMATS[kind], stored, shape, k.dtype)
    return rows, tokens

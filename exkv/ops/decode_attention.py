"""One layer's decode step in one op: append one token a row, and attend.

Bit-identical to ``append_kv``, ``hadamard`` and the attention ops; it saves their dispatch, which
at short contexts takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kv_formats import FORMATS
from .registry import define_op


@define_op(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor(a!)[] k_stored, str k_format, "
    "Tensor(b!)[] v_stored, str v_format, Tensor past_lens, int kv_len, float scale, "
    "int window=0, float softcap=0.0, int ring=0, bool hadamard=False) -> Tensor",
    names=FORMATS,
)
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_stored: Sequence[Tensor],
    k_format: str,
    v_stored: Sequence[Tensor],
    v_format: str,
    past_lens: Tensor,
    kv_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    ring: int = 0,
    hadamard: bool = False,
) -> Tensor:
    """Append k and v (B, 1, H_kv, D) to rows of ``past_lens`` tokens, and attend q (B, 1, H, D) to
    everything stored -> (B, 1, H, D) in q's dtype.

    Args:
        k_stored, v_stored: tensors of a store in the order of its format's ``names``, (B, S, H_kv,
            ...).
        k_format, v_format: names in :data:`exkv.ops.kv_formats.FORMATS`; formats must encode each
            token by itself.
        past_lens: int32 (B,), tokens of each row before this one.
        kv_len: keys of the longest row, this token's included; later ones are not read.
        scale, window, softcap: as in :class:`exkv.ops.attention.AttentionParams`.
        ring: size of the ring, all of which is visible once it is full; 0 if rows are not rings.
        hadamard: whether heads are transformed by ``exkv::hadamard`` before they are encoded;
            queries are then transformed too, and the output is transformed back.

    Raises:
        ValueError: tensors that don't fit together, more than one token a row, a format that
            encodes several tokens together, or (on the CPU) a token without a place. Nothing is
            written then.
    """
    if q.dim() != 4 or q.shape[1] != 1 or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            "decode_attention: q, k and v must bring one token a row, (B, 1, heads, D); q is "
            f"{tuple(q.shape)}, and k {tuple(k.shape)}"
        )
    start = torch.zeros_like(past_lens)
    seen = past_lens.clamp(max=ring - 1) if ring else past_lens

    def attend(queries: Tensor) -> Tensor:
        stored = k_stored, k_format, v_stored, v_format
        keys = seen, start, start + kv_len, kv_len
        return torch.ops.exkv.attention_part(queries, *stored, *keys, scale, window, softcap)[0]

    attend(q[:, :0])  # checks the arguments before anything is written
    torch.ops.exkv.append_kv(
        k, v, None, None, k_stored, k_format, v_stored, v_format, past_lens,
        ring=ring, hadamard=hadamard,
    )  # fmt: skip
    if not hadamard:
        return attend(q).to(q.dtype)
    return torch.ops.exkv.hadamard(attend(torch.ops.exkv.hadamard(q))).to(q.dtype)

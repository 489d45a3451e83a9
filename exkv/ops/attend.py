"""Storing a call's keys and values behind those of its rows, and attention over all of them, in one
op: what a cache of the plainest makes does at every layer and step.

Made of the other ops, with their results to the bit; see ``layer.py`` for why there are such ops.
"""

from __future__ import annotations

import torch

from .registry import define_op


def _fake(q: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@define_op(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_stored, Tensor(b!) v_stored, "
    "Tensor past_lens, int kv_len, float scale, int window, float softcap) -> Tensor",
    fake=_fake,
    in_parts=True,
)
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_stored: torch.Tensor,
    v_stored: torch.Tensor,
    past_lens: torch.Tensor,
    kv_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D): ``attention`` of rows that all have
    ``kv_len`` tokens, these T included.

    Args:
        k_stored, v_stored: (B or more, S, H_kv, D) in q's dtype; the first B rows are written to.
        past_lens: int32 (B,), ``kv_len - T`` each.
        scale, window, softcap: as in :class:`exkv.ops.attention.AttentionParams`.
    """
    stores = ([k_stored], "float", [v_stored], "float")
    torch.ops.exkv.append_kv(k, v, None, None, *stores, past_lens)
    k, v = k_stored[: len(q)], v_stored[: len(q)]
    return torch.ops.exkv.attention(q, k, v, past_lens, kv_len, False, scale, window, softcap)


@define_op(
    "attend_int8(Tensor q, Tensor k, Tensor v, Tensor(a!) k_stored, Tensor(b!) k_scale, "
    "Tensor(c!) v_stored, Tensor(d!) v_scale, Tensor past_lens, int kv_len, float scale, "
    "int window, float softcap) -> Tensor",
    fake=_fake,
    in_parts=True,
)
def attend_int8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_stored: torch.Tensor,
    k_scale: torch.Tensor,
    v_stored: torch.Tensor,
    v_scale: torch.Tensor,
    past_lens: torch.Tensor,
    kv_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """The same where keys and values are stored as ``quantize_kv`` makes them."""
    stores = ([k_stored, k_scale], "int8", [v_stored, v_scale], "int8")
    torch.ops.exkv.append_kv(k, v, None, None, *stores, past_lens)
    rows = (stored[: len(q)] for stored in (k_stored, k_scale, v_stored, v_scale))
    return torch.ops.exkv.attention_int8(q, *rows, past_lens, kv_len, scale, window, softcap)

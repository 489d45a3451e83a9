"""Attention without a cache: the chunk attends to itself, and nothing is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.ops.attention import AttentionParams
from exkv.ops.attention_parts import merge_parts, sink_part


class NoCacheLayer:
    """Replaces a cache layer when ``Model.forward`` is called without a cache."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        lengths = batch.lengths
        if params.sinks is not None:
            return _beside_sinks(q, k, v, batch, params)
        return torch.ops.exkv.attention(
            q,
            k,
            v,
            batch.past_lens,
            lengths.kv_len,
            lengths.ragged,
            params.scale,
            params.window,
            params.softcap,
        )


def _beside_sinks(q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams) -> Tensor:
    assert params.sinks is not None
    past, kv_len = batch.past_lens, batch.lengths.kv_len
    part = torch.ops.exkv.attention_part(
        q,
        [k],
        "float",
        [v],
        "float",
        past,
        torch.zeros_like(past),
        torch.full_like(past, kv_len),
        kv_len,
        params.scale,
        params.window,
        params.softcap,
    )
    return merge_parts([part, sink_part(q, params.sinks)], q.dtype)

"""Attention without a cache: the chunk attends to itself, and nothing is kept."""

from __future__ import annotations

import torch

from exkv.batch import Batch
from exkv.ops.attention import AttentionParams


class NoCacheLayer:
    """Stands in for a cache layer where ``Model.forward`` is called without a cache."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        lengths = batch.lengths
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

"""A call without a cache: the chunk attends to itself, states begin at zero, and nothing is
stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import StateTensor
from exkv.ops.attention import AttentionParams
from exkv.ops.attention_parts import chunk_starts, merge_parts, sink_part

from .state import States


class NoCacheLayer:
    """Replaces a cache layer when ``Model.forward`` is called without a cache."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        past, lengths, params = batch.past_lens, batch.lengths, params.within(batch.lengths)
        how = params.scale, params.window, params.softcap
        if params.sinks is None and not params.chunk:
            return torch.ops.exkv.attention(q, k, v, past, lengths.kv_len, lengths.ragged, *how)
        stored = q, [k], "float", [v], "float"
        keys = past, torch.zeros_like(past), torch.full_like(past, lengths.kv_len)
        if params.chunk:
            since = chunk_starts(past, q.shape[1], params.chunk)
            part = torch.ops.exkv.attention_part_since(*stored, *keys, since, lengths.kv_len, *how)
        else:
            part = torch.ops.exkv.attention_part(*stored, *keys, lengths.kv_len, *how)
        sinks = [] if params.sinks is None else [sink_part(q, params.sinks)]
        return merge_parts([part, *sinks], q.dtype)

    def states(self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype) -> States:
        rows, device = len(batch.lengths.past), batch.past_lens.device
        zeros = {
            each.name: torch.zeros((rows, *each.shape), dtype=each.dtype or dtype, device=device)
            for each in tensors
        }
        return States(zeros, batch)

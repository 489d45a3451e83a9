"""A forward call without a cache: its tokens attend to each other, states begin at zero, and
nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import StateTensor
from exkv.ops.attention import AttentionParams

from .chunks import over_chunks
from .state import States
from .views import ContiguousView, View

_FLOATS = ("float", "float")


class NoCacheLayer:
    """Replaces a cache layer when ``Model.forward`` is called without a cache."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        params, lengths = params.within(batch.lengths), batch.lengths
        view = ContiguousView(
            stored={"k": k, "v": v},
            past_lens=batch.past_lens,
            kv_len=lengths.kv_len,
            ragged=lengths.ragged,
            window=params.window,
        )
        if not params.chunk:
            return _attend(q, view, params)
        out = over_chunks(
            lambda q, shown: _attend(q, shown, params), q, view, _FLOATS, batch, params.chunk
        )
        assert out is not None  # floats of whole rows can be cut anywhere
        return out

    def states(self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype) -> States:
        rows, device = len(batch.lengths.past), batch.past_lens.device
        zeros = {
            each.name: torch.zeros((rows, *each.shape), dtype=each.dtype or dtype, device=device)
            for each in tensors
        }
        return States(zeros, batch)


def _attend(q: Tensor, view: View, params: AttentionParams) -> Tensor:
    """Attend q (B, T, H, D) over keys in order."""
    assert isinstance(view, ContiguousView)
    k, v, past = view.stored["k"], view.stored["v"], view.past_lens
    how = params.scale, params.window, params.softcap
    if params.sinks is None:
        return torch.ops.exkv.attention(q, k, v, past, view.kv_len, view.ragged, *how)
    keys = past, torch.zeros_like(past), torch.full_like(past, view.kv_len)
    part = torch.ops.exkv.attention_part(q, [k], "float", [v], "float", *keys, view.kv_len, *how)
    torch.ops.exkv.share_with_sinks_(*part, params.sinks)
    return part[0].to(q.dtype)

"""A layer's contents as plain keys and values, for inspection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .spans import token_spans
from .spec import LayerSpec
from .views import Tensors

if TYPE_CHECKING:
    from .layer import CacheLayer

_STEP = 1024


def contents(layer: CacheLayer, lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Decode keys and values (B, H_kv, N, D) on the host, in the cache's dtype: each row's stored
    tokens in order, zero-padded to the longest.

    Args:
        lens: tokens in each row.
    """
    rows = [_row(layer, row, length) for row, length in enumerate(lens)]
    k, v = (
        torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True).transpose(1, 2)
        for x in zip(*rows, strict=True)
    )
    return k, v


def _row(layer: CacheLayer, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one row, (N, H_kv, D) each."""
    spec, shared = layer.spec, layer.shared
    none = torch.zeros((0, spec.num_heads, spec.head_dim), dtype=spec.dtype)
    spans = [(none, none)]
    if shared is not None:
        stored = {name: x[shared.rows[row]].cpu() for name, x in shared.tensors.items()}
        spans += _spans(spec, stored, shared.lens[row])
        length -= shared.lens[row]
    spans += _spans(spec, layer.row(row, length), length)
    k, v = (torch.cat(x) for x in zip(*spans, strict=True))
    return k, v


def _spans(spec: LayerSpec, row: Tensors, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Decoded spans of a row of ``length`` tokens, on the host."""
    kept = spec.kept
    copied = {name: tensor.unsqueeze(0) for name, tensor in row.items()}
    for span in token_spans(sinks=kept.sinks, window=kept.size, lens=[length], step=_STEP):
        real = span.are_stored()[0]
        k, v = spec.kv.read(copied, span, spec.dtype, spec.head_dim)
        yield k[0, real], v[0, real]

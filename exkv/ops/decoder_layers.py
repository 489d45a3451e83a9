"""Decoder layers that follow each other, each with its part of a plain cache, in one op.

Made of the ops for a layer's parts, with their results to the bit; see ``layer.py`` for why there
are such ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .registry import define_op

#: A layer's linear maps, and its weights: the order in which :func:`decoder_layers` takes biases
#: and weights.
MAPS = ("q", "k", "v", "out", "gate", "up", "down")
WEIGHTS = ("norm", "second norm", *MAPS)


def _fake(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_op(
    "decoder_layers(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor(a!)[] stored, "
    "Tensor past_lens, int kv_len, Tensor cos, Tensor sin, int head_dim, float eps, float scale, "
    "int[] windows, float softcap, str act) -> Tensor",
    fake=_fake,
    in_parts=True,
)
def decoder_layers(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    stored: Sequence[torch.Tensor],
    past_lens: torch.Tensor,
    kv_len: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    eps: float,
    scale: float,
    windows: Sequence[int],
    softcap: float,
    act: str,
) -> torch.Tensor:
    """x (B, T, hidden) -> (B, T, hidden): for each layer ``attention_heads``, ``attend`` or
    ``attend_int8``, and ``add_network``.

    Args:
        weights: :data:`WEIGHTS` of each layer.
        biases: of each layer's :data:`MAPS`; None where there is none.
        stored: what each layer's ``attend`` writes to, two tensors, or ``attend_int8``, four.
        past_lens, kv_len, scale, softcap: as ``attend`` takes them; windows: one for each layer.
        cos, sin, head_dim, eps: as ``attention_heads`` takes them.
        act: as ``add_network`` takes it.
    """
    kept = len(stored) // len(windows)
    attend = torch.ops.exkv.attend if kept == 2 else torch.ops.exkv.attend_int8
    for layer, window in enumerate(windows):
        norm, second_norm, *maps = _of(weights, layer, len(WEIGHTS))
        added = _of(biases, layer, len(MAPS))
        heads = (maps[:3], _there(added[:3]), cos, sin, head_dim)
        q, k, v = torch.ops.exkv.attention_heads(x, norm, eps, *heads)
        rows = (past_lens, kv_len, scale, window, softcap)
        read = attend(q, k, v, *_of(stored, layer, kept), *rows).flatten(2)
        network = (second_norm, eps, maps[4:], _there(added[4:]), act)
        x = torch.ops.exkv.add_network(x, read, maps[3], added[3], *network)
    return x


def _of(tensors: Sequence, layer: int, count: int) -> Sequence:
    return tensors[layer * count : (layer + 1) * count]


def _there(biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """All of them or none, as the ops for a layer's parts take them."""
    return [bias for bias in biases if bias is not None]

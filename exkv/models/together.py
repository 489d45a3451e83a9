"""Decoder layers that follow each other on one device, in one native call.

A decode step of a small model spends a tenth of its time between the calls of its layers. Layers
of the plainest make, over a cache of the plainest make, need nothing of Python between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TypeAlias

import torch

from exkv.batch import Batch
from exkv.cache import KVCache
from exkv.layers import are_few
from exkv.ops import has_kernel

from .decoder import DecoderLayer
from .units import Unit

#: A layer, and what its part of the cache keeps.
Stored: TypeAlias = tuple[DecoderLayer, tuple[torch.Tensor, ...]]


def layers_together(
    units: Sequence[Unit], x: torch.Tensor, batch: Batch, kept: KVCache | None
) -> list[Stored]:
    """The first of these units, as many as one call may run for x (B, T, hidden)."""
    if kept is None or units[0].spec.layer is None or not are_few(x):
        return []
    if not _has_kernel(x.device.type):
        return []
    found: list[Stored] = []
    for unit in units:
        if unit.device != x.device or not _is_plain(unit):
            break
        stored = kept.layers[unit.spec.layer].at_hand(x.dtype, batch)
        if not stored or found and len(stored) != len(found[0][1]):
            break
        found.append((unit.module, stored))
    return found


@cache
def _has_kernel(device_type: str) -> bool:
    return has_kernel("decoder_layers", device_type)


def _is_plain(unit: Unit) -> bool:
    """Whether it is a layer that the op knows, and nobody is to be told of its call."""
    layer = unit.module
    if not isinstance(layer, DecoderLayer) or not layer.plain:
        return False
    wrapped = "forward" in vars(layer)  # as accelerate's hooks do it
    return not (wrapped or layer._forward_hooks or layer._forward_pre_hooks)


def run_together(layers: Sequence[Stored], x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """x (B, T, hidden) -> the same after these layers."""
    first = layers[0][0]
    attention, eps, act = first.self_attn, first.input_layernorm.eps, first.mlp.act
    weights, biases = zip(*(layer.parameters_in_order for layer, _ in layers), strict=True)
    return torch.ops.exkv.decoder_layers(
        x,
        list(chain.from_iterable(weights)),
        list(chain.from_iterable(biases)),
        list(chain.from_iterable(stored for _, stored in layers)),
        *(batch.past_lens, batch.lengths.kv_len),
        *(*batch.rotary[attention.params.rotary], attention.head_dim),
        *(eps, attention.params.scale),
        [layer.self_attn.params.window for layer, _ in layers],
        *(attention.params.softcap, act),
    )

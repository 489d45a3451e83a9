"""Snapshots of an :class:`HFCache`'s layers, for going back to an earlier length.

Keys and values in order need none: dropping the last ones is enough. Rings, and states of fixed
size (Mamba's), are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layer import HFLayer
from .versions import LinearAttentionCacheLayerMixin


def taken(layers: Sequence[Any]) -> list[Any]:
    """Take a snapshot of every layer, for :func:`put_back`."""
    return [
        (layer.overwritten() if isinstance(layer, HFLayer) else None, states(layer))
        for layer in layers
    ]


def put_back(layers: Sequence[Any], snapshot: Sequence[Any], length: int) -> None:
    """Restore every layer's contents at this length, which includes left padding."""
    for layer, (ring, kept) in zip(layers, snapshot, strict=True):
        if isinstance(layer, HFLayer):
            if ring is None:
                layer.cut(length)
            else:
                layer.go_back(ring)
        vars(layer).update({name: _copied(values) for name, values in kept.items()})


def states(layer: Any) -> dict[str, dict[int, Any]]:
    """Copies of a layer's states of fixed size, and their properties; by attribute."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    own = vars(layer).items()
    return {name: _copied(values) for name, values in own if isinstance(values, dict)}


def _copied(values: dict[int, Any]) -> dict[int, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }

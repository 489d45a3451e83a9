"""What a layer of an :class:`HFCache` was at some length, to go back there.

Keys and values in order need nothing: forgetting the last of them is enough. Rings, and states of
one size (Mamba's), are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .layer import HFLayer, Undo
from .versions import LinearAttentionCacheLayerMixin


def taken(layers: Sequence[Any]) -> list[Any]:
    """A snapshot of every layer, for :func:`put_back`."""
    return [(_ring(layer), states(layer)) for layer in layers]


def put_back(layers: Sequence[Any], snapshot: Sequence[Any], length: int) -> None:
    """Every layer as it was at this length, left padding counted."""
    for layer, (ring, kept) in zip(layers, snapshot, strict=True):
        if isinstance(layer, HFLayer):
            if ring is None:
                layer.cut(length)
            else:
                layer.go_back(ring)
        vars(layer).update({name: _copied(values) for name, values in kept.items()})


def _ring(layer: Any) -> Undo | None:
    return layer.overwritten() if isinstance(layer, HFLayer) else None


def states(layer: Any) -> dict[str, dict[int, Any]]:
    """Copies of a layer's states of one size, and what is known of each; by attribute."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return {}
    own = vars(layer).items()
    return {name: _copied(values) for name, values in own if isinstance(values, dict)}


def _copied(values: dict[int, Any]) -> dict[int, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }

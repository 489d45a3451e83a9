"""``torch.export`` with an :class:`HFCache` among a model's inputs.

An exported program's inputs are tensors, so it gets the keys and values that the cache returns, and
its graph is that of transformers' own layers. The caches that it returns consist of those layers,
too: exkv's storage is used by native ops, and can't be an input of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .cache import HFCache, HFQuantizedCache
from .lazy import LazyTensor

#: Each layer's window or None, and whether it has tokens; lists, as in saved programs.
_Layout = list[list[Any]]


def register_export_support() -> None:
    """Let ``torch.export`` flatten caches, except static kinds. Like transformers'
    ``register_dynamic_cache_export_support``, this can't be undone."""
    if HFCache in _pytree.SUPPORTED_NODES:
        return
    for one in (HFCache, HFQuantizedCache):
        _pytree.register_pytree_node(
            one,
            _flatten,
            partial(_unflatten, one),
            serialized_type_name=f"{one.__module__}.{one.__name__}",
            flatten_with_keys_fn=_flatten_with_keys,
        )


def _flatten(cache: HFCache) -> tuple[list[torch.Tensor], _Layout]:
    """Keys and values of the layers that have any, (B, H_kv, N, D), and a layout.

    Raises:
        ValueError: a layer has other states, or has evicted tokens.
    """
    tensors: list[torch.Tensor] = []
    layout: _Layout = []
    for index, layer in enumerate(cache.layers):
        _check(index, layer)
        pair = [x for x in cache[index] if x is not None]
        tensors += [x.made() if isinstance(x, LazyTensor) else x for x in pair]
        layout.append([getattr(layer, "sliding_window", None), bool(pair)])
    return tensors, layout


def _check(index: int, layer: Any) -> None:
    if not isinstance(layer, CacheLayerMixin) or hasattr(layer, "conv_states"):
        raise ValueError(
            f"layer {index} of this cache is a {type(layer).__name__}, whose states aren't keys "
            "and values: export this model with transformers' DynamicCache"
        )
    if isinstance(layer, DynamicLayer) and layer.keys is not None:
        total, stored = layer.get_seq_length(), layer.keys.shape[2]
        if total > stored:
            raise ValueError(
                f"layer {index} of this cache has {stored} of {total} tokens, and an exported "
                "program can't know how many were evicted: export with a cache that keeps all"
            )


def _flatten_with_keys(cache: HFCache) -> tuple[list[tuple[Any, torch.Tensor]], _Layout]:
    tensors, layout = _flatten(cache)
    return [(_pytree.SequenceKey(index), x) for index, x in enumerate(tensors)], layout


def _unflatten(one: type[HFCache], tensors: Iterable[torch.Tensor], layout: _Layout) -> HFCache:
    """A cache that consists of transformers' layers."""
    rest = iter(tensors)
    layers: list[Any] = []
    for window, has_tokens in layout:
        layer = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
        if has_tokens:
            layer.update(next(rest), next(rest))
        layers.append(layer)
    cache = one.__new__(one)
    Cache.__init__(cache, layers=layers)
    cache.kind, cache._snapshots = "dynamic", {}
    return cache

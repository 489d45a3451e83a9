"""What transformers 4.57 has otherwise than 5.x, here in the words of 5.x.

Since 5 a layer of a cache may hold states of one size (Mamba's and its like), and masks are asked
for by how many queries there are and where they begin. In 4.57 models with such states have caches
of their own, and masks are asked for by each query's position.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import CacheLayerMixin

#: Whether this is 5.x.
SINCE_5 = int(transformers.__version__.split(".")[0]) >= 5

if TYPE_CHECKING or SINCE_5:
    from transformers.cache_utils import (
        DYNAMIC_LAYER_TYPE_MAPPING,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
        get_layer_types_and_kwargs,
    )
    from transformers.masking_utils import sdpa_mask
else:
    DYNAMIC_LAYER_TYPE_MAPPING: dict[str, Any] = {}

    class LinearAttentionCacheLayerMixin:
        """No layer's."""

    class LinearAttentionLayer(LinearAttentionCacheLayerMixin):
        """No layer's."""

    class LinearAttentionAndFullAttentionLayer(LinearAttentionLayer, CacheLayerMixin):
        """No layer's."""

    def get_layer_types_and_kwargs(
        config: PretrainedConfig,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Each layer's type, and its window or chunk by the name ``sliding_window``.

        Raises:
            ValueError: a model with states of one size.
        """
        _check_no_states(config)
        window, chunk = (
            getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
        )
        types = getattr(config, "layer_types", None)
        if types is None:
            one = "sliding_attention" if window else "chunked_attention" if chunk else None
            types = [one or "full_attention"] * config.num_hidden_layers
        if shared := getattr(config, "num_kv_shared_layers", 0):
            types = types[:-shared]
        sizes = {"sliding_attention": window, "chunked_attention": chunk}
        return list(types), [
            {"sliding_window": sizes[name]} if name in sizes else {} for name in types
        ]

    def sdpa_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        device: Any = None,
        **pattern: Any,
    ) -> torch.Tensor | None:
        """A mask as 5.x asks for it."""
        positions = torch.arange(q_length, device=device) + q_offset
        return masking_utils.sdpa_mask(batch_size, positions, kv_length, kv_offset, **pattern)


def _check_no_states(config: PretrainedConfig) -> None:
    """ValueError for a model that brings a cache of its own."""
    model: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model is not None and not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{model.__name__} keeps states beside keys and values, and in transformers "
            f"{transformers.__version__} those have a cache of their own: use exkv's with "
            "transformers 5.20 or later"
        )


def query_count(queries: int | torch.Tensor) -> int:
    """Of a call as ``get_mask_sizes`` hears of it: a number, or in 4.57 each query's position."""
    return len(queries) if isinstance(queries, torch.Tensor) else queries


__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "SINCE_5",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "get_layer_types_and_kwargs",
    "query_count",
    "sdpa_mask",
]


def cache_argument(model: PreTrainedModel) -> str:
    """The name by which a model's ``forward``, and so ``generate``, takes a cache: ``cache`` since
    5.24, before it ``past_key_values``, or ``cache_params`` in Mamba."""
    names = inspect.signature(model.forward).parameters
    known = ("cache", "cache_params")
    return next((name for name in known if name in names), "past_key_values")


def given_cache(call: dict[str, Any]) -> Any:
    """The cache among a call's keyword arguments, by its new name or its old one."""
    return call.get("cache", call.get("past_key_values"))

"""The latest transformers' interface, for earlier versions.

Since 5, a cache layer may hold states of fixed size (Mamba's and others'), and masks are requested
by the number of queries and their offset. In 4.57, models with such states have caches of their
own, and masks are requested by each query's position. Since 5.24, a cache is passed as ``cache``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    cache_utils,
    masking_utils,
)
from transformers.cache_utils import DynamicLayer

_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
#: Whether this is 5.x.
SINCE_5 = _VERSION >= (5,)
#: Names of the cache argument in different versions.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")

if TYPE_CHECKING or SINCE_5:
    from transformers.cache_utils import (
        DYNAMIC_LAYER_TYPE_MAPPING,
        STATIC_LAYER_TYPE_MAPPING,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
        get_layer_types_and_kwargs,
    )
    from transformers.initialization import no_init_weights
    from transformers.masking_utils import sdpa_mask
else:
    from transformers.modeling_utils import no_init_weights

    DYNAMIC_LAYER_TYPE_MAPPING: dict[str, Any] = {}
    STATIC_LAYER_TYPE_MAPPING: dict[str, Any] = {}

    class LinearAttentionCacheLayerMixin:
        """The base of no layer."""

    class LinearAttentionLayer(LinearAttentionCacheLayerMixin):
        """The base of no layer."""

    def get_layer_types_and_kwargs(
        config: PretrainedConfig,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Each layer's type, and its window or chunk as ``sliding_window``.

        Raises:
            ValueError: the model has states of fixed size.
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
        """Make a mask with the arguments of 5.x."""
        positions = torch.arange(q_length, device=device) + q_offset
        return masking_utils.sdpa_mask(batch_size, positions, kv_length, kv_offset, **pattern)


def _check_no_states(config: PretrainedConfig) -> None:
    """Raise ValueError for a model with a cache of its own."""
    model: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model is not None and not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{model.__name__} has states besides keys and values, for which transformers "
            f"{transformers.__version__} has a cache of its own: exkv's needs transformers 5.20 or "
            "later"
        )


def query_count(queries: int | torch.Tensor) -> int:
    """Number of queries, from ``get_mask_sizes``' argument: that number, or in 4.57 each query's
    position."""
    return len(queries) if isinstance(queries, torch.Tensor) else queries


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument of ``generate``, and of ``forward`` in transformers' own models:
    ``cache`` since 5.24, ``past_key_values`` before, or ``cache_params`` in Mamba."""
    if _VERSION >= (5, 24):
        return "cache"
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


def with_cache_renamed(model: PreTrainedModel, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call's keyword arguments, with the cache under this version's name.

    Raises:
        ValueError: a cache is given under two names.
    """
    given = [name for name in _CACHE_ARGUMENTS if call.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are the same argument: give only one")
    rest = {name: value for name, value in call.items() if name not in _CACHE_ARGUMENTS}
    return {**rest, **{cache_argument(model): call[name] for name in given}}


#: Base of quantized caches' layers, a class since 5.24.
BaseQuantizedLayer: Any = getattr(cache_utils, "BaseQuantizedLayer", DynamicLayer)
#: (is static, has a window) -> class of layers with states besides keys and values; none in 4.57.
STOCK_HYBRIDS: dict[tuple[bool, bool], Any] = {
    (bool(static), slides): mapping.get("hybrid_sliding" if slides else "hybrid")
    for static, mapping in enumerate((DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING))
    for slides in (False, True)
}

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "SINCE_5",
    "STOCK_HYBRIDS",
    "BaseQuantizedLayer",
    "LinearAttentionCacheLayerMixin",
    "LinearAttentionLayer",
    "cache_argument",
    "get_layer_types_and_kwargs",
    "no_init_weights",
    "query_count",
    "sdpa_mask",
    "with_cache_renamed",
]

"""Mistral (Jiang et al., 2023): a Llama whose layers attend within a window of tokens.

Version 0.1 has a window of 4,096 tokens, later ones have none; the config states it for each layer,
and attention reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family

from .decoder import Decoder


def _as_stated(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every layer, or those that ``layer_types`` names (Ministral)."""
    window = windows.sliding_window(values)
    return windows.by_layer(values, window, lambda layer: window is not None)


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    units=Decoder(),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    windows=_as_stated,
)

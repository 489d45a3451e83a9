"""Gemma 3, text only (Gemma Team, 2025): Gemma 2's layers with norms over heads in place of soft
caps, five layers with a window to one without, and separate rotary positions for the five."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import beside_images
from exkv.checkpoint.value_checks import check_size

from . import gemma2


def _all_but_every_nth(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every ``sliding_window_pattern``-th layer attends to everything."""
    window, period = windows.sliding_window(values), values["sliding_window_pattern"]
    check_size("sliding_window_pattern", period)
    return windows.by_layer(values, window, lambda layer: (layer + 1) % period != 0)


FAMILY = replace(
    gemma2.FAMILY,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    units=replace(gemma2.DECODER, head_norm=gemma2.gemma_norm),
    defaults=gemma2.FAMILY.defaults
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    windows=_all_but_every_nth,
    refuses={"attn_logit_softcapping": None},
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    gguf=replace(
        gemma2.GGUF,
        architecture="gemma3",
        assumed={"attention.sliding_window_pattern": "every sixth layer attends to everything"},
        additions=lambda values: gemma2.gguf_scalar(values, 62),
    ),
)
#: The text model of a vision-language model.
WITH_IMAGES = beside_images(
    FAMILY,
    "Gemma3ForConditionalGeneration",
    "gemma3",
    refuses={"attn_logit_softcapping": None, "final_logit_softcapping": None},
)

"""Code World Model (Meta, 2025): a Llama 3 with a window in three of four layers; the first of the
four attends to everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family

from .decoder import Decoder


def _all_but_every_fourth(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    window = windows.sliding_window(values)
    return windows.by_layer(values, window, lambda layer: layer % 4 != 0)


FAMILY = Family(
    architecture="CwmForCausalLM",
    model_type="cwm",
    units=Decoder(),
    defaults={
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
    windows=_all_but_every_fourth,
    reads=("mlp_bias",),
    rope_theta=1e6,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)

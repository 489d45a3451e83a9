"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention

from .decoder import Decoder


def late_layers(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The layers from ``max_window_layers`` on, if windows are in use at all."""
    return windows.late_layers(values, windows.window_in_use(values))


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    units=Decoder(attention=partial(Attention, qkv_bias=True)),
    defaults={
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=late_layers,
    gguf=GGUFFamily(architecture="qwen2"),
)

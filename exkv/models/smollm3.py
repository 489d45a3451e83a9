"""SmolLM3 (Hugging Face, 2025): a Llama in which every fourth layer has no positions; the config
states it for each layer, and attention reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import check_layers, check_size

from .decoder import Decoder


def rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """``no_rope_layers`` has a one for each layer that *has* rotary positions; without it, all but
    every ``no_rope_layer_interval``-th have them."""
    check_layers(values["num_hidden_layers"])
    count, stated = values["num_hidden_layers"], values.get("no_rope_layers")
    period = values["no_rope_layer_interval"]
    if stated is None:
        check_size("no_rope_layer_interval", period)
        return tuple((layer + 1) % period != 0 for layer in range(count))
    if not isinstance(stated, list | tuple) or any(each not in (0, 1) for each in stated):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, not {stated!r}")
    if len(stated) != count:
        raise ValueError(
            f"no_rope_layers names {len(stated)} layers, and num_hidden_layers is {count}"
        )
    return tuple(map(bool, stated))


def _without_positions(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The layers without rotary positions, if windows are in use."""
    window, have = windows.window_in_use(values), rotated(values, ())
    return windows.by_layer(values, window, lambda layer: window is not None and not have[layer])


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    units=Decoder(),
    defaults={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "pad_token_id": 128004,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    windows=_without_positions,
    reads=("attention_bias", "mlp_bias"),
    rope_theta=2e6,
    rotated=rotated,
    gguf=GGUFFamily(
        architecture="smollm3",
        interleaved=True,
        assumed={"no_rope_layers": "every fourth layer has no positions"},
    ),
)

"""Granite Swash 2B (IBM, 2026): a Granite with windows on three of four layers, learned sinks, and
rotary positions whose base the config states layer by layer, zero for none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import is_number
from exkv.layers import SinkAttention

from . import granite
from .decoder import Decoder


def _layers(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """``layer_types``, or a window in all but every fourth layer, starting with the first."""
    return windows.by_layer(values, windows.sliding_window(values), lambda layer: layer % 4 != 0)


def _bases(values: Mapping[str, Any]) -> Sequence[float] | None:
    """Each layer's base of rotary frequencies, 0 for no positions; None if they aren't stated."""
    stated = values.get("layer_rope_theta")
    if stated is None:
        return None
    if not isinstance(stated, list | tuple) or not all(is_number(x) and x >= 0 for x in stated):
        raise ValueError(f"layer_rope_theta must be a list of numbers, 0 or more, not {stated!r}")
    if len(stated) != values["num_hidden_layers"]:
        raise ValueError(
            f"layer_rope_theta names {len(stated)} layers, and num_hidden_layers is "
            f"{values['num_hidden_layers']}"
        )
    return stated


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions by type of layer, as other architectures state them."""
    _, types = _layers(values)
    bases, keys = _bases(values), ("rope_parameters", "rope_scaling")
    block: Any = next((values[key] for key in keys if values.get(key) is not None), {})
    if not isinstance(block, dict):
        return {}  # the reader of both reports what is wrong
    if (theta := values.get("rope_theta")) is not None:
        block = {"rope_theta": theta, **block}
    each = {
        kind: {**block, **_stated_base(kind, types, bases)}
        for kind in (windows.FULL_ATTENTION, windows.SLIDING_ATTENTION)
    }
    return {"rope_parameters": each, "rope_scaling": None, "rope_theta": None}


def _stated_base(
    kind: str, types: Sequence[str], bases: Sequence[float] | None
) -> dict[str, float]:
    """The base of the layers of this type that have positions."""
    if bases is None:
        return {}
    types = types or [windows.FULL_ATTENTION] * len(bases)
    found = {base for base, each in zip(bases, types, strict=True) if base and each == kind}
    if len(found) > 1:
        raise ValueError(
            f"layer_rope_theta: layers of the type {kind} have the bases {sorted(found)}; exkv "
            "supports one for each type of layers, and 0"
        )
    return {"rope_theta": found.pop()} if found else {}


def _rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    bases = _bases(values)
    return () if bases is None or all(bases) else tuple(map(bool, bases))


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Positions with a single base, in the layers that have any."""
    stated, theta = values.get("rope_pattern"), values.get("rope_theta")
    if not isinstance(stated, list):
        return {"rope_pattern": None}
    return {"rope_pattern": None, "layer_rope_theta": [theta if each else 0 for each in stated]}


GGUF = GGUFFamily(
    architecture="granite_swa",
    names={"attn_sinks.weight": "self_attn.sinks"},
    interleaved=True,
    metadata={**granite.GGUF_FACTORS, "attention.rope_pattern": "rope_pattern"},
    marks={"expert_count": False},
    assumed={"attention.rope_pattern": "all layers have positions"},
    additions=_of_gguf,
)

FAMILY = replace(
    granite.FAMILY,
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    units=Decoder(attention=SinkAttention),
    defaults=granite.FAMILY.defaults
    | {
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    derived=_rotary,
    windows=_layers,
    rope_local_base_freq=1e4,
    rotated=_rotated,
    gguf=GGUF,
)

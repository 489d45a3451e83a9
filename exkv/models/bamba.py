"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2 in most layers, attention in the others, with
positions that rotate half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import Family, TensorNames
from exkv.checkpoint.gguf.names import most
from exkv.checkpoint.mamba import ExpandedMamba2Config
from exkv.checkpoint.value_checks import check_layers, is_int

from .decoder import Decoder
from .granitemoehybrid import (
    GGUF_MAMBA,
    MAMBA_NAMES,
    mamba_or_attention,
    mamba_states,
    of_expansion,
)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Attention in the layers ``attn_layer_indices``."""
    check_layers(values["num_hidden_layers"])
    attend, linear = values.get("attn_layer_indices") or [], windows.STATES[0]
    if not isinstance(attend, list) or not all(map(is_int, attend)):
        raise ValueError(f"attn_layer_indices must be a list of integers, not {attend!r}")
    layers = range(values["num_hidden_layers"])
    return None, tuple(windows.FULL_ATTENTION if i in attend else linear for i in layers)


#: Checkpoint names of the other parts of a layer.
NAMES = {"mlp.": "feed_forward.", "post_attention_layernorm": "pre_ff_layernorm"}

GGUF_NAMES = {
    **GGUF_MAMBA.names,
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
GGUF_ENDS = {"output_norm": "model.final_layernorm"}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Types of layers: those with key heads attend."""
    heads = values.get("num_key_value_heads")
    found = of_expansion(values)
    if not isinstance(heads, list):
        return found
    attend = [layer for layer, count in enumerate(heads) if count]
    return {**found, "num_key_value_heads": most(heads), "attn_layer_indices": attend}


FAMILY = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    units=Decoder(attention=mamba_or_attention, rename=MAMBA_NAMES | NAMES),
    defaults={
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    },
    windows=_windows,
    reads=("attention_bias", "mlp_bias"),
    partial_rotary_factor=0.5,
    specific=ExpandedMamba2Config,
    names=(TensorNames(norm="model.final_layernorm"),),
    states=mamba_states,
    gguf=replace(
        GGUF_MAMBA,
        architecture="granitehybrid",
        names=GGUF_NAMES,
        ends=GGUF_ENDS,
        interleaved=True,
        marks={"rope.scaling.finetuned": True},
        additions=_of_gguf,
    ),
)

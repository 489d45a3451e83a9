"""OLMo hybrid 7B (OLMo team, 2026): an OLMo 3 in which three of four layers have linear attention
by the gated delta rule, and norms before instead of after; the others have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import LinearAttentionConfig, ModelConfig, has_tensors, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.value_checks import check_layers, check_size
from exkv.layers import MLP, SeparateGatedDelta, WideNormAttention
from exkv.layers.separate_delta import separate_convolutions

from . import qwen3_next
from .decoder import Decoder, DecoderLayer, MakeNorm, PostNormLayer, ResidualLayer, rms_norm
from .units import UnitSpec

#: Epsilon of the norm after linear attention, whatever the config says about the others.
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(LinearAttentionConfig):
    """Whether beta goes up to two, so that a state may change its sign along a key."""

    linear_allow_neg_eigval: bool = True


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for linear attention: as many heads as attention has, keys of three quarters of a
    head, values twice as wide."""
    attending, hidden = values["num_attention_heads"], values["hidden_size"]
    for key, size in (("num_attention_heads", attending), ("hidden_size", hidden)):
        check_size(key, size)
    key_heads = _stated(values, "linear_num_key_heads", attending)
    key_dim = _stated(values, "linear_key_head_dim", int(0.75 * hidden / key_heads))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": _stated(values, "linear_num_value_heads", attending),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": _stated(values, "linear_value_head_dim", 2 * key_dim),
    }


def _stated(values: Mapping[str, Any], key: str, default: int) -> int:
    size = values.get(key)
    size = default if size is None else size
    check_size(key, size)
    return int(size)


def _layers(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """``layer_types``, or linear attention except in every fourth layer, and in the last if there
    is no fourth."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    linear, full = windows.STATES[0], windows.FULL_ATTENTION
    if types is None:
        types = [linear if (layer + 1) % 4 else full for layer in range(layers)]
        types[-1] = full if full not in types else types[-1]
    return None, windows.check_layer_types(types, layers, None, windows.STATES[:1])


def _rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """No positions if the base of their frequencies is null."""
    block = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = block.get("rope_theta", values.get("rope_theta", 1.0))
    return () if theta is not None else (False,) * len(types)


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int, **options: Any) -> nn.Module:
    if not config.state(layer):
        return WideNormAttention(config, dtype, layer=layer, **options)
    largest = 2.0 if config.settings(OlmoHybridConfig).linear_allow_neg_eigval else 1.0
    return SeparateGatedDelta(config, dtype, eps=_EPS, largest_beta=largest)


def _layer(
    config: ModelConfig, dtype: torch.dtype, attention: nn.Module, mlp: MLP, norm: MakeNorm
) -> ResidualLayer:
    kind = DecoderLayer if isinstance(attention, SeparateGatedDelta) else PostNormLayer
    return kind(config, dtype, attention, mlp, norm)


#: Checkpoint names of the parts of a layer with linear attention.
_LINEAR = {
    "self_attn.norm": "linear_attn.o_norm",
    "self_attn.out_proj": "linear_attn.o_proj",
    "self_attn.": "linear_attn.",
    "input_layernorm": "attention_layer_norm",
}
#: The norm before an MLP, which transformers' files also name so in the other layers.
_BEFORE_MLP = {"post_attention_layernorm": "feedforward_layer_norm"}


def _names(config: ModelConfig, layer: int, *, saved: bool) -> dict[str, str]:
    linear = _LINEAR if config.state(layer) else {}
    return {**linear, **(_BEFORE_MLP if linear or saved else {})}


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    attending = (i for i in range(config.num_hidden_layers) if not config.state(i))
    norms = (f"model.layers.{layer}.feedforward_layer_norm." for layer in attending)
    return Decoder(
        attention=_attention,
        layer=_layer,
        head_norm=rms_norm,
        rename_of_layer=partial(_names, saved=has_tensors(config, *norms)),
        made=partial(separate_convolutions, path="linear_attn"),
    )(config, dtype)


FAMILY = Family(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    units=_units,
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "bos_token_id": None,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
    },
    derived=_sizes,
    windows=_layers,
    reads=("attention_bias",),
    specific=OlmoHybridConfig,
    rotated=_rotated,
    states=qwen3_next.states,
)

"""LFM2 (Liquid AI, 2025): short convolutions between gates in most layers, and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, StateTensor, windows
from exkv.checkpoint.families import Family, Specific, TensorNames
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.value_checks import check_at_most, check_layers, check_size, is_int, set_floats
from exkv.layers import Attention, GatedMLP, ShortConv
from exkv.layers.recurrent import short_conv_state

from .decoder import Decoder, rms_norm

#: More tokens than any of its convolutions covers.
_LONGEST = 1 << 10


@dataclass(frozen=True, kw_only=True)  # no slots: LFM2 MoE inherits it together with another
class ShortConvConfig(Specific):
    """Convolutions over ``conv_L_cache`` tokens."""

    conv_L_cache: int = 3  # noqa: N815 # config.json's name
    conv_bias: bool = False

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        check_size("conv_L_cache", self.conv_L_cache)
        check_at_most("conv_L_cache", self.conv_L_cache, _LONGEST)
        if self.conv_L_cache < 2:
            raise ValueError("conv_L_cache 1: a convolution is over at least 2 tokens")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(ShortConvConfig):
    """MLPs have two thirds of the intermediate size, times ``block_ffn_dim_multiplier``, rounded up
    to a multiple of ``block_multiple_of``; or all of it without ``block_auto_adjust_ff_dim``."""

    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: int = 256

    def __post_init__(self) -> None:
        ShortConvConfig.__post_init__(self)
        set_floats(self, ("block_ffn_dim_multiplier",))
        check_size("block_multiple_of", self.block_multiple_of)

    def inner(self, size: int) -> int:
        """Inner size of an MLP, from the config's intermediate size."""
        if not self.block_auto_adjust_ff_dim:
            return size
        wanted = int(self.block_ffn_dim_multiplier * int(2 * size / 3))
        return -(-wanted // self.block_multiple_of) * self.block_multiple_of


def mixer(config: ModelConfig, dtype: torch.dtype, *, layer: int, **options: Any) -> nn.Module:
    """A layer's convolution, or its attention."""
    settings = config.settings(ShortConvConfig)
    if config.state(layer):
        return ShortConv(config, dtype, settings.conv_L_cache, bias=settings.conv_bias)
    return Attention(config, dtype, layer=layer, **options)


def _mlp(config: ModelConfig, dtype: torch.dtype) -> GatedMLP:
    return GatedMLP(config, dtype, config.settings(BlockConfig).inner(config.intermediate_size))


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """``layer_types``, or convolutions except in the layers ``full_attn_idxs``; with neither, all
    layers attend."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    attend = values.get("full_attn_idxs")
    if attend is not None and not (isinstance(attend, list) and all(map(is_int, attend))):
        raise ValueError(f"full_attn_idxs must be a list of integers, not {attend!r}")
    if types is None:
        indices = range(layers)
        chosen = indices if attend is None else attend
        types = [windows.FULL_ATTENTION if each in chosen else "conv" for each in indices]
    return None, windows.check_layer_types(types, layers, None, ("conv",))


def _states(config: ModelConfig) -> tuple[StateTensor, ...]:
    return short_conv_state(config, config.settings(ShortConvConfig).conv_L_cache)


#: Checkpoint names of the parts of a layer.
NAMES = {
    "self_attn.in_proj": "conv.in_proj",
    "self_attn.conv.": "conv.conv.",
    "self_attn.out_proj": "conv.out_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with convolutions are those without key heads; sizes of MLPs are used as stated."""
    heads = values.get("num_key_value_heads")
    known = {"block_auto_adjust_ff_dim": False}
    if not isinstance(heads, list) or not all(map(is_int, heads)) or not any(heads):
        return known
    types = [windows.FULL_ATTENTION if each else "conv" for each in heads]
    return {**known, "num_key_value_heads": max(heads), "layer_types": types}


GGUF = GGUFFamily(
    architecture="lfm2",
    names={
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    ends=dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
    dims={"shortconv.conv": 3},
    metadata={"shortconv.l_cache": "conv_L_cache"},
    additions=of_gguf,
)

FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    units=Decoder(attention=mixer, mlp=_mlp, head_norm=rms_norm, rename=NAMES),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    windows=_windows,
    rope_theta=1e6,
    specific=BlockConfig,
    aliases={
        "rms_norm_eps": "norm_eps",
        "intermediate_size": "block_ff_dim",
        "tie_word_embeddings": "tie_embedding",
    },
    names=(TensorNames(norm="model.embedding_norm"),),
    states=_states,
    gguf=GGUF,
)

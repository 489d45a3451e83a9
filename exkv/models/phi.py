"""Phi-1, 1.5 and 2 (Li et al., 2023): attention and MLP in parallel after one LayerNorm, biases
everywhere, and positions that rotate part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family, Specific, TensorNames
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention, PlainMLP

from .decoder import Decoder, Head, ParallelLayer, layer_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(Specific):
    """Whether heads of queries and keys are normed."""

    qk_layernorm: bool = False


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    normed = config.settings(PhiConfig).qk_layernorm
    norm = layer_norm(config, dtype) if normed else None
    return Attention(config, dtype, layer=layer, head_norm=norm)


_NAMES = {
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


FAMILY = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    units=Decoder(
        attention=_attention,
        mlp=PlainMLP,
        layer=ParallelLayer,
        norm=layer_norm,
        head=partial(Head, bias=True),
        rename=_NAMES,
    ),
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "attention_bias": True,
        "mlp_bias": True,
    },
    reads=("attention_bias", "mlp_bias"),
    specific=PhiConfig,
    partial_rotary_factor=0.5,
    aliases={"rms_norm_eps": "layer_norm_eps"},
    names=(TensorNames(norm="model.final_layernorm"),),
    gguf=GGUFFamily(
        architecture="phi2",
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        ends={"output_norm": "model.final_layernorm"},
    ),
)

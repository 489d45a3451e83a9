"""GLM 4 (Zhipu AI, 2025: GLM-4-0414): norms before and after attention and MLP, gate and up in one
matrix, and positions that rotate neighbours in half of each head."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, FusedGatedMLP

from .decoder import SandwichLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> SandwichLayer:
        attention = Attention(config, dtype, layer=index, out_bias=False)
        return SandwichLayer(config, dtype, attention, FusedGatedMLP(config, dtype))

    return decoder_units(config, dtype, layer, rename=_checkpoint_name)


#: What the norms are called, by what they are called here.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _checkpoint_name(parameter: str) -> str:
    module, dot, rest = parameter.partition(".")
    return f"{_NORMS.get(module, module)}{dot}{rest}"

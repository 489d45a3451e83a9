"""StarCoder 2 (BigCode, 2024): LayerNorms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, PlainMLP

from .decoder import DecoderLayer, Head, decoder_units, layer_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = layer_norm(config, dtype)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, PlainMLP(config, dtype), norm)

    return decoder_units(
        config,
        dtype,
        layer,
        head=lambda: Head(config, dtype, norm=norm),
        rename=_checkpoint_name,
    )


def _checkpoint_name(parameter: str) -> str:
    return parameter.replace("mlp.up_proj", "mlp.c_fc").replace("mlp.down_proj", "mlp.c_proj")

"""Nemotron 4 and Minitron (NVIDIA, 2024): LayerNorms whose factor is 1 + weight, an MLP of a
squared ReLU without a gate, and positions that rotate half of each head."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, PlainMLP

from .decoder import DecoderLayer, Head, decoder_units, layer_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = layer_norm(config, dtype, offset=True)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, PlainMLP(config, dtype), norm)

    return decoder_units(config, dtype, layer, head=lambda: Head(config, dtype, norm=norm))

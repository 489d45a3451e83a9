"""Qwen 2 and 2.5: a Llama with biases on queries, keys and values, and on nothing else."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, GatedMLP

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index, qkv_bias=True)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

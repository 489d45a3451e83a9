"""Seed-OSS (ByteDance, 2025): a Llama whose biases differ by projection."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig, OutputBiasConfig
from exkv.layers import Attention, GatedMLP

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    out_bias = config.settings(OutputBiasConfig).attention_out_bias

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index, out_bias=out_bias)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

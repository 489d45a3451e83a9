"""Arcee (Arcee AI, 2025: AFM): a Llama whose MLP is that of a squared ReLU, without a gate."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, PlainMLP

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, PlainMLP(config, dtype))

    return decoder_units(config, dtype, layer)

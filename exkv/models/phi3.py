"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B): a Llama with fused projections, in memory too.

The mini ones for long texts have longrope, whose frequencies depend on how long a text becomes;
see ``exkv/models/transformer.py`` for what that means for keys that were stored before.
"""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import FusedAttention, FusedGatedMLP

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = FusedAttention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, FusedGatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

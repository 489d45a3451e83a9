"""Gemma (Gemma Team, 2024): a Llama with norms whose factor is 1 + weight, and embeddings scaled by
the root of their size."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, GatedMLP

from .decoder import DecoderLayer, rms_norm
from .gemma2 import gemma_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = rms_norm(config, dtype, offset=True)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, dtype), norm)

    return gemma_units(config, dtype, layer)

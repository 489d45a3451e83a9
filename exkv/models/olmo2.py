"""OLMo 2 (OLMo team, 2024): norms after attention and MLP in place of those before, and norms over
all heads' queries and keys together."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import GatedMLP, WideNormAttention

from .decoder import PostNormLayer, decoder_units, rms_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = rms_norm(config, dtype)

    def layer(index: int) -> PostNormLayer:
        attention = WideNormAttention(config, dtype, layer=index, head_norm=norm)
        return PostNormLayer(config, dtype, attention, GatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

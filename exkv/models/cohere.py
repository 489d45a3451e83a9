"""Command R (Cohere, 2024): attention and MLP beside each other behind one norm without a bias,
positions that rotate neighbours, and logits times a factor."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, GatedMLP

from .decoder import Head, ParallelLayer, decoder_units, layer_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = layer_norm(config, dtype, bias=False)

    def layer(index: int) -> ParallelLayer:
        attention = Attention(config, dtype, layer=index)
        return ParallelLayer(config, dtype, attention, GatedMLP(config, dtype), norm)

    return decoder_units(config, dtype, layer, head=lambda: Head(config, dtype, norm=norm))

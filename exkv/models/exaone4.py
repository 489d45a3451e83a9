"""EXAONE 4 (LG AI Research, 2025): a Qwen 3 with its norms after attention and MLP; where some
layers have a window, the others have no positions."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, GatedMLP

from .decoder import PostNormLayer, decoder_units, rms_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    head_norm = rms_norm(config, dtype)

    def layer(index: int) -> PostNormLayer:
        attention = Attention(config, dtype, layer=index, head_norm=head_norm)
        return PostNormLayer(config, dtype, attention, GatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

"""Qwen3-MoE (Qwen, 2025): a Qwen 3 with a mixture of experts in place of the MLP."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, Experts, mixture_or_mlp

from .decoder import DecoderLayer, decoder_units, rms_norm
from .qwen2_moe import checkpoint_name
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    head_norm = rms_norm(config, dtype)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index, head_norm=head_norm)
        mlp = mixture_or_mlp(config, dtype, index, Experts)
        return DecoderLayer(config, dtype, attention, mlp)

    return decoder_units(config, dtype, layer, rename=checkpoint_name)

"""Qwen 3: a Llama with a norm over each head's queries and keys."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, GatedMLP, RMSNorm

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def head_norm(size: int) -> RMSNorm:
        return RMSNorm(size, config.rms_norm_eps, dtype=dtype)

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index, head_norm=head_norm)
        return DecoderLayer(config, dtype, attention, GatedMLP(config, dtype))

    return decoder_units(config, dtype, layer)

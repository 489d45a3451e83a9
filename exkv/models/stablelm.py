"""StableLM 2 and Stable LM 3B (Stability AI, 2024): a Llama with LayerNorms and positions that
rotate a quarter of each head; attention and MLP may be parallel."""

from __future__ import annotations

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, ResidualConfig
from exkv.layers import Attention, GatedMLP

from .decoder import DecoderLayer, Head, ParallelLayer, decoder_units, layer_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = layer_norm(config, dtype)
    settings = config.settings(ResidualConfig)
    if settings.qk_layernorm:
        raise ValueError(
            f"{config.path or 'the config'}: qk_layernorm true (a norm for each head) is not "
            "supported; take a model without it, e.g. StableLM 2 1.6B"
        )

    def layer(index: int) -> nn.Module:
        attention = Attention(config, dtype, layer=index, out_bias=False)
        kind = ParallelLayer if settings.use_parallel_residual else DecoderLayer
        return kind(config, dtype, attention, GatedMLP(config, dtype), norm)

    return decoder_units(config, dtype, layer, head=lambda: Head(config, dtype, norm=norm))

"""Mixtral (Jiang et al., 2024): a Mistral with a mixture of experts in place of the MLP."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, Experts

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index)
        return DecoderLayer(config, dtype, attention, Experts(config, dtype))

    return decoder_units(config, dtype, layer, rename=_checkpoint_name)


def _checkpoint_name(parameter: str) -> str:
    """``mlp.experts.0.w1.weight`` lies in checkpoints as ``block_sparse_moe.experts.0...``."""
    return parameter.replace("mlp.", "block_sparse_moe.", 1)

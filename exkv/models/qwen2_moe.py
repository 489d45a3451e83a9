"""Qwen1.5-MoE and Qwen2-57B-A14B (Qwen, 2024): a Qwen 2 with a mixture of experts in place of the
MLP, and beside it an expert that all tokens take."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import Attention, SharedExperts, mixture_or_mlp

from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""

    def layer(index: int) -> DecoderLayer:
        attention = Attention(config, dtype, layer=index, out_bias=False)
        mlp = mixture_or_mlp(config, dtype, index, SharedExperts)
        return DecoderLayer(config, dtype, attention, mlp)

    return decoder_units(config, dtype, layer, rename=checkpoint_name)


def checkpoint_name(parameter: str) -> str:
    """Qwen's checkpoints call an expert's matrices as those of an MLP."""
    for ours, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        parameter = parameter.replace(f".{ours}", f".{theirs}")
    return parameter

"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP beside each other behind a LayerNorm
each, biases everywhere, and positions that rotate a quarter of each head.

Checkpoints have queries, keys and values in one matrix, head by head; they are taken apart when
they are read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, ResidualConfig
from exkv.layers import Attention, PlainMLP
from exkv.layers.linear import linear_at
from exkv.weights import Slice, Source, sliced_source

from .decoder import DecoderLayer, Head, ParallelLayer, decoder_units, layer_norm
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    norm = layer_norm(config, dtype)
    parallel = config.settings(ResidualConfig).use_parallel_residual

    def layer(index: int) -> nn.Module:
        attention, mlp = Attention(config, dtype, layer=index), PlainMLP(config, dtype)
        if not parallel:
            return DecoderLayer(config, dtype, attention, mlp, norm)
        return ParallelLayer(config, dtype, attention, mlp, norm, own_norm=True)

    return decoder_units(
        config,
        dtype,
        layer,
        head=lambda: Head(config, dtype, norm=norm),
        rename=_checkpoint_name,
        made=partial(_projections, config, dtype),
    )


#: What parts are called, by what they are called here.
_NAMES = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _checkpoint_name(parameter: str) -> str:
    for ours, theirs in _NAMES.items():
        parameter = parameter.replace(ours, theirs)
    return parameter


def _projections(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
) -> list[Source]:
    """Queries, keys and values of the layer that the checkpoint calls ``name``."""
    heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    stored = f"{name}.attention.query_key_value"
    linears = [linear_at(layer, f"self_attn.{each}_proj") for each in "qkv"]

    def part(index: int, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(0, (heads, 3, dim))[:, index].flatten(0, 1)

    weights = [
        Slice(
            name=f"self_attn.{each}_proj",
            of=partial(part, index),
            format=linear.format,
            size=linear.size,
        )
        for index, (each, linear) in enumerate(zip("qkv", linears, strict=True))
    ]
    sources = [sliced_source(f"{stored}.weight", (3 * heads * dim, hidden), dtype, weights)]
    if config.attention_bias:
        biases = [
            Slice(name=f"self_attn.{each}_proj.bias", of=partial(part, index))
            for index, each in enumerate("qkv")
        ]
        sources.append(sliced_source(f"{stored}.bias", (3 * heads * dim,), dtype, biases))
    return sources

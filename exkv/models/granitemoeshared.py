"""Granite 3 MoE with a shared expert (IBM, 2025), whose gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig
from exkv.checkpoint.gguf.names import shared
from exkv.layers import routed_experts
from exkv.weights import Source, sliced_source

from . import granitemoe
from .decoder import Decoder, matrix_slice


def experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """A Granite 3 MoE's, and gate and up of the shared expert."""
    routed = granitemoe.experts(config, dtype, name, layer)
    return [*routed, *shared_expert(config, dtype, name, layer)]


def shared_expert(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
) -> list[Source]:
    """Gate and up of the shared expert of the layer that the checkpoint calls ``name``, if it has
    one."""
    if not config.settings(ExpertsConfig).shared_expert_intermediate_size:
        return []
    return [halves(config, dtype, name, layer, "mlp.shared_expert")]


def halves(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module, mlp: str
) -> Source:
    """Gate and up of the shared MLP, which the layer has at the path ``mlp``."""
    inner = config.settings(ExpertsConfig).shared_expert_intermediate_size
    assert inner is not None, "the family's default is a number"
    rows = {"gate_proj": slice(inner), "up_proj": slice(inner, None)}
    both = [matrix_slice(layer, f"{mlp}.{each}", itemgetter(half)) for each, half in rows.items()]
    size = (2 * inner, config.hidden_size)
    return sliced_source(f"{name}.shared_mlp.input_linear.weight", size, dtype, both)


SHARED = {"mlp.shared_expert.down_proj": "shared_mlp.output_linear"}
NAMES = {**granitemoe.NAMES, **SHARED}
GGUF = replace(
    granitemoe.GGUF,
    names={
        **granitemoe.GGUF.names,
        **shared("mlp.shared_expert"),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    marks={"expert_shared_feed_forward_length": True},
)
DECODER = Decoder(mlp=routed_experts, rename=NAMES, made=experts)
FAMILY = replace(
    granitemoe.FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    units=DECODER,
    defaults=granitemoe.FAMILY.defaults | {"shared_expert_intermediate_size": 0},
    aliases={"shared_expert_intermediate_size": "shared_intermediate_size"},
    gguf=GGUF,
)

"""Granite 3 MoE with a shared expert (IBM, 2025), whose gate and up lie in one tensor."""

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


def _experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """A Granite 3 MoE's, and gate and up of the shared one."""
    routed = granitemoe.experts(config, dtype, name, layer)
    return routed + shared_expert(config, dtype, name, layer)


def shared_expert(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
) -> list[Source]:
    """Gate and up of the shared expert of the layer that the checkpoint calls ``name``, if any."""
    inner = config.settings(ExpertsConfig).shared_expert_intermediate_size
    if not inner:
        return []
    halves = {"gate_proj": slice(inner), "up_proj": slice(inner, None)}
    both = [
        matrix_slice(layer, f"mlp.shared_expert.{matrix}", itemgetter(rows))
        for matrix, rows in halves.items()
    ]
    size = (2 * inner, config.hidden_size)
    return [sliced_source(f"{name}.shared_mlp.input_linear.weight", size, dtype, both)]


SHARED = {"mlp.shared_expert.down_proj": "shared_mlp.output_linear"}
DECODER = Decoder(
    mlp=routed_experts,
    rename={**granitemoe.NAMES, **SHARED},
    made=_experts,
)
FAMILY = replace(
    granitemoe.FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    units=DECODER,
    defaults=granitemoe.FAMILY.defaults | {"shared_expert_intermediate_size": 0},
    aliases={"shared_expert_intermediate_size": "shared_intermediate_size"},
    gguf=replace(
        granitemoe.GGUF,
        names={
            **granitemoe.GGUF.names,
            **shared("mlp.shared_expert"),
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        marks={"expert_shared_feed_forward_length": True},
    ),
)

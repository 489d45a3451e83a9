"""Granite 3 MoE with a shared expert (IBM, 2025), whose gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

from exkv.checkpoint import ExpertsConfig, ModelConfig
from exkv.checkpoint.gguf.names import shared
from exkv.layers import routed_experts
from exkv.weights import Fused

from . import granitemoe
from .decoder import Decoder


def shared_expert(config: ModelConfig) -> list[Fused]:
    """Gate and up of the shared expert, if there is one."""
    inner = config.settings(ExpertsConfig).shared_expert_intermediate_size
    return [gate_and_up(config, "mlp.shared_expert")] if inner else []


def gate_and_up(config: ModelConfig, mlp: str) -> Fused:
    """Gate and up of the shared MLP, which the layer has at the path ``mlp``."""
    inner = config.settings(ExpertsConfig).shared_expert_intermediate_size
    parts = {
        f"{mlp}.gate_proj": itemgetter(slice(inner)),
        f"{mlp}.up_proj": itemgetter(slice(inner, None)),
    }
    return Fused(name="shared_mlp.input_linear", parts=parts)


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
DECODER = Decoder(mlp=routed_experts, rename=NAMES, made=granitemoe.experts, fused=shared_expert)
FAMILY = replace(
    granitemoe.FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    units=DECODER,
    defaults=granitemoe.FAMILY.defaults | {"shared_expert_intermediate_size": 0},
    aliases={"shared_expert_intermediate_size": "shared_intermediate_size"},
    gguf=GGUF,
)

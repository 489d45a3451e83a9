"""Granite 4 (IBM, 2025): Mamba 2 in most layers of H-Tiny, H-Small and H-Micro, attention without
positions in the others; Micro has attention alone, with positions. An MLP that all tokens take,
beside experts in H-Tiny and H-Small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig, StateTensor, windows
from exkv.checkpoint.mamba import ExpandedMamba2Config, Mamba2Config
from exkv.layers import MLP, Attention, GatedMLP, Mamba2, SharedExperts
from exkv.weights import Source

from . import granitemoeshared
from .decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class MambaExpertsConfig(ExpertsConfig, ExpandedMamba2Config):
    """Layers of Mamba 2, and experts, or none where ``num_local_experts`` is 0. Attention has
    positions where ``position_embedding_type`` is "rope"."""

    position_embedding_type: str | None = None

    def __post_init__(self) -> None:
        ExpandedMamba2Config.__post_init__(self)
        if self.num_local_experts != 0:
            ExpertsConfig.__post_init__(self)


def mamba_or_attention(
    config: ModelConfig, dtype: torch.dtype, *, layer: int, **options: Any
) -> nn.Module:
    """Mamba 2, or attention in a layer that has keys and values."""
    if config.state(layer):
        return Mamba2(config, dtype)
    return Attention(config, dtype, layer=layer, **options)


def mamba_states(config: ModelConfig) -> tuple[StateTensor, ...]:
    """What a layer of Mamba 2 keeps."""
    return config.settings(Mamba2Config).state


def _mlp(config: ModelConfig, dtype: torch.dtype) -> MLP:
    settings = config.settings(MambaExpertsConfig)
    if settings.num_local_experts:
        return SharedExperts(config, dtype)
    return GatedMLP(config, dtype, settings.shared_expert_intermediate_size)


def _sources(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    if config.settings(MambaExpertsConfig).num_local_experts:
        return granitemoeshared.experts(config, dtype, name, layer)
    return [granitemoeshared.halves(config, dtype, name, layer, "mlp")]


def _rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    rotated = values.get("position_embedding_type") == "rope"
    return () if rotated else (False,) * values["num_hidden_layers"]


#: What checkpoints call the parts of Mamba.
MAMBA_NAMES = {
    f"self_attn.{name}": f"mamba.{name}"
    for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
}
_MLP_NAMES = {
    "mlp.gate_proj": "shared_mlp.input_linear",
    "mlp.up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
}

FAMILY = replace(
    granitemoeshared.FAMILY,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    units=Decoder(
        attention=mamba_or_attention,
        mlp=_mlp,
        rename=MAMBA_NAMES | _MLP_NAMES | granitemoeshared.NAMES,
        made=_sources,
    ),
    defaults=granitemoeshared.FAMILY.defaults | {"shared_expert_intermediate_size": 1024},
    windows=windows.linear_unless_stated,
    rotated=_rotated,
    specific=MambaExpertsConfig,
    states=mamba_states,
    gguf=None,
)

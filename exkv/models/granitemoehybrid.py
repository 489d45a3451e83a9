"""Granite 4 (IBM, 2025): Mamba 2 in most layers of H-Tiny, H-Small and H-Micro, and attention
without positions in the others; Micro has only attention, with positions. An MLP takes all tokens,
beside experts in H-Tiny and H-Small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig, StateTensor, windows
from exkv.checkpoint.gguf.names import GGUFFamily, most
from exkv.checkpoint.mamba import ExpandedMamba2Config, Mamba2Config
from exkv.checkpoint.value_checks import is_int
from exkv.layers import MLP, Attention, GatedMLP, Mamba2, SharedExperts
from exkv.weights import Fused, Source

from . import granitemoe, granitemoeshared
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
    """The state of a Mamba 2 layer."""
    return config.settings(Mamba2Config).state


def _mlp(config: ModelConfig, dtype: torch.dtype) -> MLP:
    settings = config.settings(MambaExpertsConfig)
    if settings.num_local_experts:
        return SharedExperts(config, dtype)
    return GatedMLP(config, dtype, settings.shared_expert_intermediate_size)


def _sources(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    if config.settings(MambaExpertsConfig).num_local_experts:
        return granitemoe.experts(config, dtype, name, layer)
    return []


def _fused(config: ModelConfig) -> list[Fused]:
    if config.settings(MambaExpertsConfig).num_local_experts:
        return granitemoeshared.shared_expert(config)
    return [granitemoeshared.gate_and_up(config, "mlp")]


def _rotated(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    rotated = values.get("position_embedding_type") == "rope"
    return () if rotated else (False,) * values["num_hidden_layers"]


#: Checkpoint names of the parts of Mamba.
MAMBA_NAMES = {
    f"self_attn.{name}": f"mamba.{name}"
    for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
}
_MLP_NAMES = {
    "mlp.gate_proj": "shared_mlp.input_linear.gate",
    "mlp.up_proj": "shared_mlp.input_linear.up",
    "mlp.down_proj": "shared_mlp.output_linear",
}


def of_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Key heads, and which layers have none, but a state."""
    heads = values.get("num_key_value_heads")
    if not isinstance(heads, list) or not all(map(is_int, heads)) or not any(heads):
        return {}
    linear, *_ = windows.STATES
    types = [windows.FULL_ATTENTION if each else linear for each in heads]
    return {"num_key_value_heads": most(heads), "layer_types": types}


def of_inner(values: Mapping[str, Any]) -> dict[str, Any]:
    """Features of a Mamba 2 head, from the total."""
    inner, heads = values.get("mamba_inner"), values.get("mamba_n_heads")
    size = inner // heads if is_int(inner) and is_int(heads) and heads else None
    return {"mamba_d_head": size, "mamba_inner": None}


def of_expansion(values: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise, and the ratio of the total to the hidden size."""
    inner, hidden = values.get("mamba_inner"), values.get("hidden_size")
    if not is_int(inner) or not is_int(hidden) or not hidden:
        return of_inner(values)
    return {**of_inner(values), "mamba_expand": inner // hidden}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = values.get("num_local_experts", 0)
    return {**of_heads(values), **of_expansion(values), "num_local_experts": experts}


#: GGUF names and metadata of Mamba 2.
GGUF_MAMBA = GGUFFamily(
    architecture="mamba2",
    names={
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_a": "mamba.A_log",
        "ssm_d": "mamba.D",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    dims={"ssm_conv1d": 3, **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm"), 1)},
    restore={".A_log": lambda x: x.neg().log()},
    metadata={
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
        "ssm.inner_size": "mamba_inner",
    },
)
_GGUF_SHARED = granitemoeshared.GGUF

FAMILY = replace(
    granitemoeshared.FAMILY,
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    units=Decoder(
        attention=mamba_or_attention,
        mlp=_mlp,
        rename=MAMBA_NAMES | _MLP_NAMES | granitemoeshared.NAMES,
        made=_sources,
        fused=_fused,
    ),
    defaults=granitemoeshared.FAMILY.defaults | {"shared_expert_intermediate_size": 1024},
    windows=windows.linear_unless_stated,
    rotated=_rotated,
    specific=MambaExpertsConfig,
    states=mamba_states,
    gguf=replace(
        GGUF_MAMBA,
        architecture="granitehybrid",
        names={
            **GGUF_MAMBA.names,
            **_GGUF_SHARED.names,
            "ffn_gate": "shared_mlp.input_linear.gate",
            "ffn_up": "shared_mlp.input_linear.up",
            "ffn_down": "shared_mlp.output_linear",
        },
        interleaved=True,
        metadata={**GGUF_MAMBA.metadata, **_GGUF_SHARED.metadata},
        marks={"rope.scaling.finetuned": False},
        additions=_of_gguf,
    ),
)

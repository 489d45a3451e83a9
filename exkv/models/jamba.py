"""Jamba (AI21, 2024 and 2025): Mamba in most layers, attention without positions in the others,
and experts in place of every other MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig, StateTensor, windows
from exkv.checkpoint.families import Family, TensorNames
from exkv.checkpoint.gguf.names import GGUFFamily, most
from exkv.checkpoint.mamba import MambaConfig
from exkv.checkpoint.value_checks import check_layers, check_size, is_int
from exkv.layers import Attention, Experts, Mamba, mixture_or_mlp

from . import bamba, qwen2_moe
from .decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class PeriodicExpertsConfig(ExpertsConfig, MambaConfig):
    """Mamba layers, and experts in one of ``expert_layer_period`` layers, from
    ``expert_layer_offset`` on; in none if there is a single expert."""

    num_local_experts: int = 16
    norm_topk_prob: bool = False
    expert_layer_period: int = 2
    expert_layer_offset: int = 1

    def __post_init__(self) -> None:
        MambaConfig.__post_init__(self)
        if self.num_local_experts != 1:
            ExpertsConfig.__post_init__(self)
        _check_period("expert_layer", self.expert_layer_period, self.expert_layer_offset)

    def is_dense(self, layer: int) -> bool:
        of_experts = layer % self.expert_layer_period == self.expert_layer_offset
        return self.num_local_experts == 1 or not of_experts


def _check_period(name: str, period: Any, offset: Any) -> None:
    check_size(f"{name}_period", period)
    if not is_int(offset) or not 0 <= offset < period:
        raise ValueError(f"{name}_offset must be below {name}_period {period}, not {offset!r}")


def _mamba_or_attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> nn.Module:
    if config.state(layer):
        return Mamba(config, dtype)
    return Attention(config, dtype, layer=layer)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Attention in one of ``attn_layer_period`` layers, from ``attn_layer_offset`` on."""
    check_layers(values["num_hidden_layers"])
    period, offset = values["attn_layer_period"], values["attn_layer_offset"]
    _check_period("attn_layer", period, offset)
    kinds = {True: windows.FULL_ATTENTION, False: windows.STATES[0]}
    return None, tuple(kinds[i % period == offset] for i in range(values["num_hidden_layers"]))


def _states(config: ModelConfig) -> tuple[StateTensor, ...]:
    return config.settings(MambaConfig).state


#: Checkpoint names of the parts of Mamba, and of the router.
_NAMES = {
    **{
        f"self_attn.{name}": f"mamba.{name}"
        for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
    },
    **{f"self_attn.{name}_layernorm": f"mamba.{name}_layernorm" for name in ("dt", "b", "c")},
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.gate": "feed_forward.router",
}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    inner, hidden = values.get("mamba_inner"), values.get("hidden_size")
    sizes: dict[str, Any] = {
        "num_key_value_heads": most(values.get("num_key_value_heads")),
        "mamba_inner": None,
    }
    if is_int(inner) and is_int(hidden) and hidden:
        sizes["mamba_expand"] = inner // hidden
    return sizes


FAMILY = Family(
    architecture="JambaForCausalLM",
    model_type="jamba",
    units=Decoder(
        attention=_mamba_or_attention,
        mlp_of_layer=partial(mixture_or_mlp, experts=Experts),
        rename=_NAMES | bamba.NAMES | qwen2_moe.NAMES,
    ),
    defaults={
        "vocab_size": 65536,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "pad_token_id": 0,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
    windows=_windows,
    rotated=lambda values, types: (False,) * len(types),
    specific=PeriodicExpertsConfig,
    ignores=frozenset(("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")),
    aliases={"num_local_experts": "num_experts"},
    names=(TensorNames(norm="model.final_layernorm"),),
    states=_states,
    gguf=GGUFFamily(
        architecture="jamba",
        names={
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_x": "mamba.x_proj",
            "ssm_dt": "mamba.dt_proj",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
            "ssm_out": "mamba.out_proj",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{
                f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj"
                for part in ("gate", "up", "down")
            },
        },
        ends=bamba.GGUF_ENDS,
        dims={"ssm_conv1d": 3},
        restore={".A_log": lambda x: x.neg().log()},
        metadata={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "ssm.inner_size": "mamba_inner",
        },
        periods={"attn_layer": "attn_output.weight", "expert_layer": "ffn_gate_inp.weight"},
        additions=_of_gguf,
    ),
)

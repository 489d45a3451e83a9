"""Qwen1.5-MoE and Qwen2-57B-A14B (Qwen, 2024): a Qwen 2 with a mixture of experts in place of the
MLP, and beside it an expert that all tokens take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.layers import Attention, SharedExperts, mixture_or_mlp

from . import qwen2
from .decoder import DecoderLayer, decoder_units
from .units import UnitSpec


def _every_second_of_the_first(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every other layer of the first ``max_window_layers``, if windows are in use."""
    window, end = windows.window_in_use(values), windows.first_layers(values)
    slides = lambda layer: window is not None and layer % 2 == 0 and layer < end  # noqa: E731
    return windows.by_layer(values, window, slides)


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


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    units=units,
    defaults=qwen2.FAMILY.defaults
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
        "attention_bias": True,
    },
    windows=_every_second_of_the_first,
    reads=("attention_bias",),
    specific=ExpertsConfig,
    aliases={"num_local_experts": "num_experts", "attention_bias": "qkv_bias"},
)

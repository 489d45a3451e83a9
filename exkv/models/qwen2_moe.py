"""Qwen1.5-MoE and Qwen2-57B-A14B (Qwen, 2024): a Qwen 2 with a mixture of experts in place of the
MLP, and a shared expert beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.layers import Attention, SharedExperts, mixture_or_mlp

from . import qwen2
from .decoder import Decoder


def _every_second_of_the_first(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every other layer of the first ``max_window_layers``, if windows are in use."""
    window, end = windows.window_in_use(values), windows.first_layers(values)
    slides = lambda layer: window is not None and layer % 2 == 0 and layer < end  # noqa: E731
    return windows.by_layer(values, window, slides)


#: Qwen's checkpoints name an expert's matrices like those of an MLP.
NAMES = {".w1": ".gate_proj", ".w2": ".down_proj", ".w3": ".up_proj"}

FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    units=Decoder(
        attention=partial(Attention, out_bias=False),
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(SharedExperts, gated=True)),
        rename=NAMES,
    ),
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
    gguf=GGUFFamily(
        architecture="qwen2moe",
        names={
            **EXPERTS,
            **shared("mlp.shared_expert"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        dims={"ffn_gate_inp_shexp": 2},
    ),
)

"""Mellum 2 (JetBrains): a Qwen3-MoE with windows in the layers that the config names, which have
their own rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exkv.checkpoint import windows
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily

from . import qwen3_moe
from .exaone_moe import LayerTypeExpertsConfig


def _as_stated(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The layers that ``layer_types`` names."""
    return windows.by_layer(values, windows.sliding_window(values), lambda layer: False)


FAMILY = replace(
    qwen3_moe.FAMILY,
    architecture="MellumForCausalLM",
    model_type="mellum",
    defaults={
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=_as_stated,
    specific=LayerTypeExpertsConfig,
    ignores=frozenset(
        (
            *("shared_expert_intermediate_size", "n_group", "topk_group", "moe_norm_min"),
            *("routed_scaling_factor", "first_k_dense_replace", "decoder_sparse_step"),
            "mlp_only_layers",
        )
    ),
    rope_theta=5e5,
    rope_local_base_freq=1e4,
    gguf=GGUFFamily(
        architecture="mellum",
        names=EXPERTS,
        metadata={"rope.freq_base_swa": "rope_local_base_freq"},
    ),
)

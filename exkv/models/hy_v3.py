"""Hy3 (Tencent): norms of heads before the rotary positions, routing by sigmoid scores
with a correction bias, a shared expert, and dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import is_int

from . import glm4_moe, qwen2_moe
from .decoder import Decoder, rms_norm
from .exaone_moe import LayerTypeExpertsConfig


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The number of shared experts, from their total size."""
    count: Any = values.get("shared_size")
    each: Any = values.get("moe_intermediate_size")
    if is_int(count) and is_int(each) and each:
        count //= each
    return {"n_shared_experts": count, "shared_size": None}


FAMILY = Family(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    units=Decoder(
        head_norm=rms_norm,
        mlp_of_layer=glm4_moe.MLP_OF_LAYER,
        rename={
            **qwen2_moe.NAMES,
            "mlp.correction": "mlp.expert_bias",
            "mlp.shared_expert.": "mlp.shared_mlp.",
            # The router; and dense layers, which have a different gate.
            "mlp.gate": "mlp.router.gate",
            "mlp.router.gate_proj": "mlp.gate_proj",
        },
    ),
    defaults={
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "num_local_experts": 192,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.826,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    reads=("attention_bias", "mlp_bias"),
    specific=LayerTypeExpertsConfig,
    ignores=frozenset(("norm_topk_prob", "n_group", "topk_group", "mlp_only_layers")),
    rope_theta=11158840.0,
    aliases={
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
    gguf=GGUFFamily(
        architecture="hy_v3",
        names={
            **EXPERTS,
            **shared("mlp.shared_mlp"),
            "ffn_gate_inp": "mlp.router.gate",
            **dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.expert_bias"),
        },
        metadata={"expert_shared_feed_forward_length": "shared_size"},
        additions=_of_gguf,
    ),
)

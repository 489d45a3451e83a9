"""GLM-4.7-Flash (Zhipu AI, 2026): a small DeepSeek-V3, whose config names the dense layers."""

from __future__ import annotations

from dataclasses import replace

from . import deepseek_v3
from .exaone_moe import LayerTypeExpertsConfig

FAMILY = replace(
    deepseek_v3.FAMILY,
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    defaults={
        **deepseek_v3.FAMILY.defaults,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_local_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    specific=LayerTypeExpertsConfig,
    gguf=None,  # its files are a DeepSeek-V3's
)

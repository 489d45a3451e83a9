"""DeepSeek-V3, V3.1 and R1 (DeepSeek, 2024 and 2025), and Kimi K2 (Moonshot AI, 2025): a
DeepSeek-V2 with routing by sigmoid scores with a correction bias."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from exkv.checkpoint import RoutedExpertsConfig
from exkv.checkpoint.families import Family, MTPNames, beside_images

from . import deepseek_v2, glm4_moe

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    units=partial(
        deepseek_v2.latent_units, mlp_of_layer=glm4_moe.MLP_OF_LAYER, rename=glm4_moe.NAMES
    ),
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_interleaved": True,
    },
    reads=("attention_bias", "rope_interleaved"),
    refuses={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    specific=RoutedExpertsConfig,
    latent=True,
    aliases={"num_local_experts": "n_routed_experts", "rope_interleaved": "rope_interleave"},
    gguf=replace(
        deepseek_v2.GGUF,
        names={**deepseek_v2.GGUF.names, "exp_probs_b.bias": glm4_moe.NAMES["mlp.correction"]},
        marks={"expert_gating_func": (2,)},  # sigmoid
        additions=deepseek_v2.of_gguf,
    ),
    mtp=MTPNames(),
)
#: Kimi K2.5 and 2.6: the text model of a vision-language model.
KIMI_K25 = beside_images(
    FAMILY,
    "Kimi_K25ForConditionalGeneration",
    "kimi_k25",
    defaults={**FAMILY.defaults, "tie_word_embeddings": True},
    mtp=None,
)

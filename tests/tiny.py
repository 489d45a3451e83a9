"""Tiny random checkpoints, written by transformers: real files in the real layout."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import sentencepiece
import torch
import transformers
from on_cpu import on_cpu
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from exkv import Model
from exkv.checkpoint.families import FAMILIES

ROPE = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}

#: 4 layers, 8 query heads, 2 key heads: a few hundred kilobytes.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
#: Wider than hidden_size / num_attention_heads, for the architectures that know the key.
HEAD = {"head_dim": 32}
#: Shorter than the tests' prompts, so that every window is crossed.
WINDOW = 24

#: A config.json in the sizes of Llama 2 70B, with a longer context: to plan, never to load.
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def llama(rope: str = "default", **changes: Any) -> LlamaConfig:
    scaling = {} if ROPE[rope] is None else {"rope_scaling": dict(ROPE[rope])}
    return LlamaConfig(**{**SIZES, **HEAD, "tie_word_embeddings": False, **scaling, **changes})


def mistral(**changes: Any) -> MistralConfig:
    return MistralConfig(**{**SIZES, **HEAD, "sliding_window": WINDOW, **changes})


def mixtral(**changes: Any) -> MixtralConfig:
    small = {"num_local_experts": 4, "intermediate_size": 96}
    return MixtralConfig(**{**SIZES, **HEAD, **small, **changes})


def qwen2(**changes: Any) -> Qwen2Config:
    return Qwen2Config(**{**SIZES, **changes})


def qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, **HEAD, **changes})


def phi3(**changes: Any) -> Phi3Config:
    return Phi3Config(**{**SIZES, **changes})


def longrope(width: int = 8, trained: int = 64, **changes: Any) -> dict[str, Any]:
    """Fields for ``phi3``: factors for ``width`` pairs, other ones beyond ``trained`` tokens."""
    return {
        "original_max_position_embeddings": trained,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.05 * i for i in range(width)],
            "long_factor": [2 + 0.5 * i for i in range(width)],
            **changes,
        },
    }


def gemma2(**changes: Any) -> Gemma2Config:
    """Soft-caps so low that they bend the tiny model's scores and logits."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    other = {"sliding_window": WINDOW, "query_pre_attn_scalar": 48}
    return Gemma2Config(**{**SIZES, **HEAD, **caps, **other, "pad_token_id": 0, **changes})


def gemma3(**changes: Any) -> Gemma3TextConfig:
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    other = {"sliding_window": WINDOW, "query_pre_attn_scalar": 48, "pad_token_id": 0}
    fields = {**SIZES, **HEAD, **other, "layer_types": layers, "rope_parameters": rope}
    return Gemma3TextConfig(**{**fields, **changes})


#: 2 layers, a few dozen kilobytes: for architectures that consist of the others' parts.
SMALL = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: The last layer of two attends, the first has a state.
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
#: Heads of Mamba 2 in two groups, which share what they write to their states.
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}
MIXTURE_OF_STATES = {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 40}
#: Hunyuan's positions: a base that is stretched by a fixed factor.
ALPHA = {
    "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
}
#: Tokens take experts of one of two groups, and one that is shared.
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 1.7,
}
LAYERS = ["sliding_attention", "full_attention"]
WINDOWS = {"sliding_window": WINDOW, "layer_types": LAYERS}


#: Keys of others that a class takes for its own.
RENAMED = defaultdict(set) | {
    "NemotronH": {"mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_conv_bias"}
    | {"mamba_chunk_size", "hybrid_override_pattern"}
}


def small(kind: str, **fields: Any) -> Callable[..., PretrainedConfig]:
    """A function like those above for transformers' class ``kind``, with these fields."""

    def make(**changes: Any) -> PretrainedConfig:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **fields, **changes})
        config.eos_token_id = {**SMALL, **changes}[
            "eos_token_id"
        ]  # GLM has others if there is none
        for key in {**fields, **changes}.keys() - {"rope_theta", "rope_scaling", *RENAMED[kind]}:
            assert hasattr(config, key), key  # else transformers took no notice
        return config

    return make


def gemma3_with_images(**changes: Any) -> PretrainedConfig:
    """The text model of a checkpoint that has one of images beside it."""
    text = small("Gemma3Text", head_dim=16, query_pre_attn_scalar=48, pad_token_id=0, **WINDOWS)
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(
        text_config=text(**changes).to_dict(), vision_config=images, mm_tokens_per_image=4
    )


#: Heads of other sizes in layers that see everything, whose values are what keys are made of.
GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0},
    **{"pad_token_id": 0, **WINDOWS},
}


def gemma4(**changes: Any) -> PretrainedConfig:
    """Not by ``small``, since transformers keeps the sizes of heads by layer."""
    return transformers.Gemma4TextConfig(**{**SMALL, **GEMMA4, **changes})


#: As the 26B-A4B: experts beside every MLP.
GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "moe_intermediate_size": 32,
}
#: As the E2B: the last three of seven layers take keys and values of layers 2 and 3, and each layer
#: has an embedding of its own.
GEMMA4_SHARED = {
    "num_hidden_layers": 7,
    "layer_types": [LAYERS[kind == "F"] for kind in "SSFSFSF"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
}


def gemma4_with_images(**changes: Any) -> PretrainedConfig:
    """The text model of a checkpoint that has one of images beside it."""
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Gemma4Config(
        text_config=gemma4(**changes).to_dict(), vision_config=images, audio_config=None
    )
    config.eos_token_id = config.text_config.eos_token_id
    return config


def gemma4_unified(**changes: Any) -> PretrainedConfig:
    """The same layers, without experts and embeddings of layers."""
    own = {key: GEMMA4[key] for key in GEMMA4.keys() - {"hidden_size_per_layer_input"}}
    return transformers.Gemma4UnifiedTextConfig(**{**SMALL, **own, **changes})


def gemma4_unified_with_images(**changes: Any) -> PretrainedConfig:
    """Beside what reads images and sounds, which is left out."""
    config = transformers.Gemma4UnifiedConfig(
        text_config=gemma4_unified(**changes).to_dict(), vision_config=None, audio_config=None
    )
    config.eos_token_id = config.text_config.eos_token_id
    return config


#: Layers as above; tokens have three hidden states, of which layers compute the second.
GEMMA3N = small(
    "Gemma3nText",
    head_dim=16,
    num_hidden_layers=7,
    layer_types=GEMMA4_SHARED["layer_types"],
    num_kv_shared_layers=3,
    intermediate_size=[64, 48, *[64] * 5],
    activation_sparsity_pattern=[0.7, 0.7, *[0.0] * 5],
    altup_num_inputs=3,
    altup_active_idx=1,
    laurel_rank=8,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=300,
    sliding_window=WINDOW,
    pad_token_id=0,
)


def gemma3n_with_images(**changes: Any) -> PretrainedConfig:
    """The text model of a checkpoint that has one of images beside it."""
    config = transformers.Gemma3nConfig(text_config=GEMMA3N(**changes).to_dict())
    config.eos_token_id = config.text_config.eos_token_id
    return config


#: The smallest models of images, under the names of their settings.
IMAGES = {
    "Exaone4_5": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16},
        **{"num_heads": 2, "num_key_value_heads": 2, "fullatt_block_indexes": [0]},
    },
    "Glm4v": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16},
        **{"num_heads": 2, "image_size": 28},
    },
    "Kimi_K25": {
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
    },
    "Llama4": {
        **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28},
        **{"num_attention_heads": 2, "vision_output_dim": 16, "projector_input_dim": 16},
        **{"projector_output_dim": 16},
    },
    "Pixtral": {
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
    "Qwen2VL": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1},
    "Qwen2_5_VL": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16},
        **{"num_heads": 2, "fullatt_block_indexes": [0]},
    },
    "Qwen3VL": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16},
        **{"num_heads": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "Qwen3_5": {
        **{"depth": 1, "hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 16},
        **{"num_heads": 2, "num_position_embeddings": 16},
    },
    "Step3p7": {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "mlp_ratio": 2.0, "max_position_embeddings": 4},
    },
}


def beside_images(
    kind: str, text: Callable[..., PretrainedConfig], images: str
) -> Callable[..., PretrainedConfig]:
    """A text model like those above beside a small one of images, in transformers' class ``kind``.
    Settings are the text model's; embedding and head aren't tied."""

    def make(**changes: Any) -> PretrainedConfig:
        config = getattr(transformers, f"{kind}Config")(
            text_config=text(**changes).to_dict(),
            vision_config=IMAGES[images],
            tie_word_embeddings=changes.get("tie_word_embeddings", False),
        )
        config.eos_token_id = config.text_config.eos_token_id
        return config

    return make


#: Latent attention, of fewer features than the experts' hidden ones.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
}
#: The same beside experts in groups, under Kimi Linear's names, and without a query vector.
KIMI = {
    **LATENT,
    "q_lora_rank": None,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}

#: YaRN whose temperature is in the scale of the scores.
LATENT_YARN = {
    "rope_parameters": {**ROPE["yarn"], "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0}
}
#: Rotary positions for texts and images, which are those of a text in a text.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4},
        **{"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
    }
}
#: Chunks that the tests' prompts cross, a layer without positions, and one without experts; of
#: rotary positions, bands with nothing between them.
LLAMA4 = small(
    "Llama4Text",
    head_dim=16,
    intermediate_size=32,
    intermediate_size_mlp=48,
    num_local_experts=4,
    moe_layers=[0],
    no_rope_layers=[1, 0],
    attention_chunk_size=WINDOW,
    floor_scale=16,
    attn_scale=0.5,
    rope_parameters={**ROPE["llama3"], "high_freq_factor": 1.0, "rope_theta": 5e5},
)
#: Queries grow within the tests' prompts.
MINISTRAL3 = small(
    "Ministral3",
    head_dim=16,
    rope_parameters={**ROPE["yarn"], "original_max_position_embeddings": 16}
    | {"rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
)
DEEPSEEK3 = small("DeepseekV3", first_k_dense_replace=1, **ROUTED, **LATENT, **LATENT_YARN)
MISTRAL4 = small(
    "Mistral4",
    rope_parameters={
        **LATENT_YARN["rope_parameters"],
        **{"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
    },
    **ROUTED,
    **LATENT,
)
#: Architecture -> a tiny config of it.
TINY = {
    "ApertusForCausalLM": small("Apertus"),
    "ArceeForCausalLM": small("Arcee", mlp_bias=True),
    "BambaForCausalLM": small("Bamba", attn_layer_indices=[1], mlp_bias=True, **MAMBA2),
    "Cohere2ForCausalLM": small("Cohere2", logit_scale=0.25, pad_token_id=0, **WINDOWS),
    "CohereForCausalLM": small("Cohere", logit_scale=0.25, pad_token_id=0),
    "CwmForCausalLM": small("Cwm", head_dim=16, **WINDOWS),
    "DeepseekV2ForCausalLM": small(
        "DeepseekV2",
        topk_method="group_limited_greedy",
        first_k_dense_replace=1,
        n_shared_experts=2,
        **{**ROUTED, "norm_topk_prob": False},
        **LATENT,
        **LATENT_YARN,
    ),
    "DeepseekV3ForCausalLM": DEEPSEEK3,
    "Kimi_K25ForConditionalGeneration": beside_images("Kimi_K25", DEEPSEEK3, "Kimi_K25"),
    "Dots1ForCausalLM": small("Dots1", **ROUTED, n_shared_experts=2),
    "FalconH1ForCausalLM": small(
        "FalconH1",
        mamba_d_ssm=96,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.6,
        key_multiplier=1.7,
        attention_in_multiplier=0.8,
        attention_out_multiplier=0.7,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.9,
        mlp_multipliers=[0.8, 0.6],
        ssm_multipliers=[0.5, 0.9, 1.1, 0.8, 1.3],
        **{**MAMBA2, "mamba_d_head": 24},
    ),
    "FlexOlmoForCausalLM": small("FlexOlmo", num_experts=4, num_experts_per_tok=2),
    "Glm4vForConditionalGeneration": beside_images(
        "Glm4v", small("Glm4vText", **HALF_MROPE), "Glm4v"
    ),
    "Glm4vMoeForConditionalGeneration": beside_images(
        "Glm4vMoe", small("Glm4vMoeText", **ROUTED, **HALF_MROPE), "Glm4v"
    ),
    "GlmForCausalLM": small("Glm", head_dim=16),
    "GraniteMoeHybridForCausalLM": small(
        "GraniteMoeHybrid",
        num_local_experts=4,
        shared_intermediate_size=40,
        layer_types=["linear_attention", "full_attention"],
        **MAMBA2,
        **FACTORS,
    ),
    "GraniteMoeSharedForCausalLM": small(
        "GraniteMoeShared", num_local_experts=4, shared_intermediate_size=40, **FACTORS
    ),
    "HYV3ForCausalLM": small(
        "HYV3",
        head_dim=16,
        mlp_bias=True,
        num_shared_experts=2,
        router_scaling_factor=1.5,
        **MIXTURE,
    ),
    "HeliumForCausalLM": small("Helium", head_dim=16),
    "HyperCLOVAXForCausalLM": small("HyperCLOVAX", **FACTORS),
    "HunYuanDenseV1ForCausalLM": small("HunYuanDenseV1", head_dim=16, **ALPHA),
    "HunYuanMoEV1ForCausalLM": small(
        "HunYuanMoEV1", head_dim=16, num_experts=4, moe_topk=[2, 2], **ALPHA
    ),
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": beside_images("Mistral3", MINISTRAL3, "Pixtral"),
    "MinistralForCausalLM": small("Ministral", head_dim=16, **WINDOWS),
    "AfmoeForCausalLM": small(
        "Afmoe",
        head_dim=16,
        num_shared_experts=2,
        num_dense_layers=1,
        num_hidden_layers=3,
        route_scale=1.5,
        mup_enabled=True,
        sliding_window=WINDOW,
        global_attn_every_n_layers=2,
        **MIXTURE,
    ),
    "Ernie4_5_MoeForCausalLM": small(
        "Ernie4_5_Moe",
        use_bias=True,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_norm_min=0.7,
        moe_layer_start_index=1,
        pad_token_id=0,
    ),
    "Ernie4_5ForCausalLM": small("Ernie4_5", head_dim=16, use_bias=True, pad_token_id=0),
    "Exaone4ForCausalLM": small("Exaone4", **WINDOWS),
    "Exaone4_5_ForConditionalGeneration": beside_images(
        "Exaone4_5_", small("Exaone4", **WINDOWS), "Exaone4_5"
    ),
    "ExaoneMoeForCausalLM": small(
        "ExaoneMoe", num_shared_experts=2, n_group=2, **MIXTURE, **WINDOWS
    ),
    "GPTNeoXForCausalLM": small("GPTNeoX", num_key_value_heads=4),
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_with_images,
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": gemma3n_with_images,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4_with_images,
    "Gemma4UnifiedForCausalLM": gemma4_unified,
    "Gemma4UnifiedForConditionalGeneration": gemma4_unified_with_images,
    "GemmaForCausalLM": small("Gemma", head_dim=16, pad_token_id=0),
    "Glm4ForCausalLM": small("Glm4", head_dim=16),
    "Glm4MoeForCausalLM": small("Glm4Moe", use_qk_norm=True, attention_bias=True, **ROUTED),
    "Glm4MoeLiteForCausalLM": small("Glm4MoeLite", **ROUTED, **LATENT),
    "GptOssForCausalLM": small(
        "GptOss",
        head_dim=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.4,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": False}
        | {"rope_theta": 150000.0, "original_max_position_embeddings": 64},
        **WINDOWS,
    ),
    "GraniteSWAForCausalLM": small("GraniteSWA", layer_rope_theta=[2e4, 0], **FACTORS, **WINDOWS),
    "GraniteMoeSWAForCausalLM": small(
        "GraniteMoeSWA",
        num_local_experts=4,
        shared_intermediate_size=40,
        layer_rope_theta=[2e4, 5e5],
        **FACTORS,
        **WINDOWS,
    ),
    "GraniteForCausalLM": small("Granite", **FACTORS),
    "GraniteMoeForCausalLM": small("GraniteMoe", num_local_experts=4, **FACTORS),
    "JambaForCausalLM": small(
        "Jamba",
        num_hidden_layers=4,
        mamba_d_state=8,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_offset=0,
        num_experts=4,
    ),
    "Jais2ForCausalLM": small("Jais2"),
    "KimiLinearForCausalLM": small(
        "KimiLinear",
        linear_head_dim=8,
        linear_num_heads=3,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        **KIMI,
    ),
    "LagunaForCausalLM": small(
        "Laguna",
        head_dim=16,
        num_attention_heads_per_layer=[6, 4],
        mlp_layer_types=["sparse", "dense"],
        shared_expert_intermediate_size=40,
        moe_routed_scaling_factor=1.5,
        moe_router_logit_softcapping=0.3,
        rope_parameters={
            "full_attention": {**ROPE["yarn"], "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        **MIXTURE,
        **WINDOWS,
    ),
    "Lfm2ForCausalLM": small("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "Lfm2MoeForCausalLM": small(
        "Lfm2Moe", num_dense_layers=1, layer_types=["full_attention", "conv"], **MIXTURE
    ),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": beside_images("Llama4", LLAMA4, "Llama4"),
    "LlamaForCausalLM": llama,
    # One layer of two halves; four experts, and two that return what they are given.
    "LongcatFlashForCausalLM": small(
        "LongcatFlash",
        num_layers=1,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=4,
        expert_ffn_hidden_size=32,
        routed_scaling_factor=1.5,
        head_dim=8,
        **LATENT,
    ),
    "MellumForCausalLM": small(
        "Mellum",
        head_dim=16,
        mlp_layer_types=["dense", "sparse"],
        num_mtp_layers=0,
        rope_parameters={
            "full_attention": {**ROPE["yarn"], "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        **MIXTURE,
        **WINDOWS,
    ),
    "MiMoV2FlashForCausalLM": small(
        "MiMoV2Flash",
        head_dim=24,
        v_head_dim=16,
        mlp_layer_types=["dense", "sparse"],
        **ROUTED,
        **WINDOWS,
    ),
    "MiniMaxForCausalLM": small(
        "MiniMax",
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        block_size=16,
        full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.25,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=1.1,
        mlp_beta_factor=0.7,
    ),
    "MiniMaxM2ForCausalLM": small(
        "MiniMaxM2",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    ),
    "MistralForCausalLM": mistral,
    "Mistral4ForCausalLM": MISTRAL4,
    "Mistral3ForConditionalGeneration:mistral4": beside_images("Mistral3", MISTRAL4, "Pixtral"),
    "MixtralForCausalLM": mixtral,
    "NemotronHForCausalLM": small(
        "NemotronH",
        head_dim=16,
        layers_block_type=["moe", "linear_attention", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=24,
        n_groups=2,
        ssm_state_size=16,
        moe_shared_expert_intermediate_size=40,
        **ROUTED,
    ),
    "NemotronForCausalLM": small("Nemotron", head_dim=16),
    "Olmo2ForCausalLM": small("Olmo2"),
    "Olmo3ForCausalLM": small(
        "Olmo3",
        rope_parameters={
            "full_attention": {**ROPE["yarn"], "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
        **WINDOWS,
    ),
    "OlmoHybridForCausalLM": small(
        "OlmoHybrid",
        rope_parameters={"rope_type": "default", "rope_theta": None},
        **{key: value for key, value in LINEAR.items() if key != "head_dim"},
    ),
    "Phi3ForCausalLM": phi3,
    "OlmoeForCausalLM": small("Olmoe", num_experts=4, num_experts_per_tok=2),
    # Prompts are shorter than the trained length, beyond which transformers keeps short factors.
    "PhimoeForCausalLM": small(
        "Phimoe",
        num_local_experts=4,
        lm_head_bias=True,
        router_jitter_noise=0.3,
        attention_bias=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + 0.05 * i for i in range(8)],
            "long_factor": [2 + 0.5 * i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 200,
        },
    ),
    "PhiForCausalLM": small("Phi"),
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": small("Qwen2Moe", shared_expert_intermediate_size=40, **MIXTURE),
    "Qwen2VLForConditionalGeneration": beside_images(
        "Qwen2VL", small("Qwen2VLText", **MROPE), "Qwen2VL"
    ),
    "Qwen2_5_VLForConditionalGeneration": beside_images(
        "Qwen2_5_VL", small("Qwen2_5_VLText", **MROPE), "Qwen2_5_VL"
    ),
    "Qwen3ForCausalLM": qwen3,
    "Qwen3VLForConditionalGeneration": beside_images(
        "Qwen3VL", small("Qwen3VLText", head_dim=16, **MROPE), "Qwen3VL"
    ),
    "Qwen3MoeForCausalLM": small("Qwen3Moe", head_dim=16, decoder_sparse_step=2, **MIXTURE),
    "Qwen3NextForCausalLM": small("Qwen3Next", **MIXTURE_OF_STATES),
    "Qwen3_5ForCausalLM": small("Qwen3_5Text", **LINEAR, **HALF_MROPE),
    "Qwen3_5ForConditionalGeneration": beside_images(
        "Qwen3_5", small("Qwen3_5Text", **LINEAR, **HALF_MROPE), "Qwen3_5"
    ),
    "Qwen3_5MoeForCausalLM": small(
        "Qwen3_5MoeText", intermediate_size=32, **MIXTURE_OF_STATES, **HALF_MROPE
    ),
    "Qwen3_5MoeForConditionalGeneration": beside_images(
        "Qwen3_5Moe",
        small("Qwen3_5MoeText", intermediate_size=32, **MIXTURE_OF_STATES, **HALF_MROPE),
        "Qwen3_5",
    ),
    "Qwen3VLMoeForConditionalGeneration": beside_images(
        "Qwen3VLMoe",
        small("Qwen3VLMoeText", head_dim=16, decoder_sparse_step=2, **MIXTURE, **MROPE),
        "Qwen3VL",
    ),
    "SeedOssForCausalLM": small("SeedOss", head_dim=16),
    "SmolLM3ForCausalLM": small("SmolLM3", no_rope_layers=[1, 0], pad_token_id=0),
    "SolarOpenForCausalLM": small("SolarOpen", head_dim=16, intermediate_size=32, **ROUTED),
    "StableLmForCausalLM": small("StableLm", use_qkv_bias=True),
    "Starcoder2ForCausalLM": small("Starcoder2"),
    "Step3p7ForConditionalGeneration": beside_images(
        "Step3p7",
        small(
            "Step3p7Text",
            head_dim=16,
            num_hidden_layers=3,
            layer_types=[*LAYERS, "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            sliding_window=WINDOW,
            num_sliding_attention_heads=6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            share_expert_dim=40,
            moe_router_scaling_factor=1.5,
            query_pre_attn_scalar=12,
            swiglu_limits=[0, 0, 0.03],
            swiglu_limits_shared=[0, 0.03, 0.02],
            pad_token_id=0,
            rope_parameters={
                "full_attention": {
                    **{**ROPE["llama3"], "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        ),
        "Step3p7",
    ),
    "VaultGemmaForCausalLM": small(
        "VaultGemma", head_dim=16, query_pre_attn_scalar=48, pad_token_id=0, **WINDOWS
    ),
}
#: Those that consist of the others' parts, but for a few new ones: the tests that go over all
#: architectures go over these in fewer ways.
RELATIVES = {
    name
    for name, make in TINY.items()
    if make.__qualname__.startswith(("small.", "beside_images."))
}
RELATIVES |= {
    *("Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration"),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
}
#: Those of them that have the new parts between them.
WITH_NEW_PARTS = {
    *("Cohere2ForCausalLM", "GPTNeoXForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM"),
    *("HyperCLOVAXForCausalLM", "Olmo3ForCausalLM", "Qwen2MoeForCausalLM"),
}
#: The others, and these.
IN_ALL_WAYS = [name for name in FAMILIES if name not in RELATIVES - WITH_NEW_PARTS]
if MISSING := sorted(set(FAMILIES) - set(TINY)):
    raise LookupError(
        f"{', '.join(MISSING)} of exkv/models: add to TINY in {__file__} a "
        "function that makes a tiny config with transformers' class: see CONTRIBUTING.md, Add an "
        "architecture"
    )


def is_mixture(name: str) -> bool:
    """Whether an architecture has experts."""
    return getattr(TINY[name](), "num_experts_per_tok", None) is not None


def reference(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """transformers' model with random weights that are large enough to make answers differ, and
    random norms and biases, so that none of them can be forgotten unnoticed."""
    torch.manual_seed(seed)
    of_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = AutoModelForCausalLM if of_text else transformers.AutoModelForImageTextToText
    with without_towers(config):
        model = kind.from_config(config, dtype=torch.float32).eval()
    if hasattr(config, "rescale_prenorm_residual"):  # by which its own numbers are more or fewer
        torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name or name.endswith("scale"):
                # Gemma's factor is 1 + weight, up to the third.
                offset = "gemma" in config.model_type and not _is_plain_gemma(config)
                low = -0.5 if offset else 0.5
                parameter.uniform_(low, low + 1)
            else:
                parameter.normal_(0, 0.06)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return cast(model, dtype)


def without_towers(config: PretrainedConfig) -> contextlib.AbstractContextManager[object]:
    """Makes a Gemma 3n without its models of images and sounds, the first of which is another
    library's (timm)."""
    if config.model_type != "gemma3n":
        return contextlib.nullcontext()
    auto = transformers.models.gemma3n.modeling_gemma3n.AutoModel
    made = auto.from_config

    def make(config: PretrainedConfig) -> torch.nn.Module:
        return made(config) if config.model_type == "gemma3n_text" else torch.nn.Identity()

    return mock.patch.object(auto, "from_config", make)


def _is_plain_gemma(config: PretrainedConfig) -> bool:
    return config.model_type.startswith(("gemma3n", "gemma4"))


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights of this dtype. (``model.to(dtype)`` would round the rotary
    frequencies too, which loading a checkpoint does not.)"""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # tables that a checkpoint has in its dtype
            rate = module.get_slope_rate()
            factors = dict(
                zip(("query", "key", "diagonal"), module.decay_factors(rate), strict=True)
            )
            tables = {"slope_rate": rate, **{f"{kind}_decay": x for kind, x in factors.items()}}
            for name, table in tables.items():
                getattr(module, name).data = table.to(dtype)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Write the checkpoint as users get it."""
    model.save_pretrained(folder, **options)
    if model.config.model_type == "kimi_k25":
        _rename(Path(folder), "language_model.model.blocks.", "language_model.model.layers.")
    return folder


def _rename(folder: Path, saved: str, released: str) -> None:
    """Give tensors the names that they were released by, where transformers saves others."""
    for file in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        renamed = {name.replace(saved, released): each for name, each in tensors.items()}
        safetensors.torch.save_file(renamed, file, {"format": "pt"})


def loaded(config: PretrainedConfig, folder: Path, **options: Any) -> Model:
    """exkv's model of such a checkpoint, on the CPU."""
    return on_cpu(save(reference(config), folder), **options)


def save_tokenizer(folder: Path, vocab_size: int = 320, **options: Any) -> Path:
    """A sentencepiece model beside the weights: bytes, a few pieces, <s> 1 and </s> 2."""
    text = ["the key is in the kitchen", "anna put the red ball in the garden", "where is it"]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text * 20),
            model_writer=file,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    return folder

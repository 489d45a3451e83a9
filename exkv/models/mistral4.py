"""Mistral Small 4 (Mistral AI, 2026): latent attention, whose queries grow by steps beyond the
trained length, and experts by softmax scores of the best groups, whose matrices lie together in the
checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, RoutedExpertsConfig
from exkv.layers import LatentAttention, mixture_or_mlp, routed_experts
from exkv.weights import Source

from . import deepseek_v2, deepseek_v3, ministral3
from .decoder import Decoder
from .qwen3_vl_moe import stacked_experts

#: Of a config.json that says nothing of rotary positions.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _made(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """What the layer that the checkpoint calls ``name`` has in larger tensors."""
    return [
        *deepseek_v2.key_and_value_ups(config, dtype, name, layer),
        *stacked_experts(config, dtype, name, layer, inputs_first=False),
    ]


FAMILY = replace(
    deepseek_v3.FAMILY,
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    units=Decoder(
        attention=LatentAttention,
        mlp_of_layer=partial(mixture_or_mlp, experts=routed_experts),
        rename=deepseek_v2.NAMES,
        made=_made,
    ),
    defaults={
        **deepseek_v3.FAMILY.defaults,
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 11,
    },
    refuses={},
    specific=RoutedExpertsConfig,
    rope_parameters=_ROPE,
    stacked_experts=True,
    partial_rotary_factor=1.0,
    gguf=None,
    query_scaling=partial(ministral3.query_scaling, unstated=_ROPE),
)

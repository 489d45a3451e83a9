"""Mistral Small 4 (Mistral AI, 2026): latent attention, whose queries grow by steps beyond the
trained length, and experts by softmax scores of the best groups, whose matrices are stored together
in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from exkv.checkpoint import RoutedExpertsConfig
from exkv.checkpoint.families import BESIDE_IMAGES
from exkv.layers import mixture_or_mlp, routed_experts

from . import deepseek_v2, deepseek_v3, ministral3
from .qwen3_vl_moe import stacked_experts

_GROWTH = "llama_4_scaling_beta"
#: Defaults for a config.json without rotary settings.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _GROWTH: 0.1,
}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Only files of the Mistral format state the queries' growth, which belongs to the scaling."""
    found = deepseek_v2.of_gguf(values)
    growth = values.get(_GROWTH)
    if growth is not None and found["rope_scaling"]:
        found["rope_scaling"] = {**found["rope_scaling"], _GROWTH: growth}
    return {**found, "norm_topk_prob": values.get("norm_topk_prob", False), _GROWTH: None}


FAMILY = replace(
    deepseek_v3.FAMILY,
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    units=partial(
        deepseek_v2.latent_units,
        mlp_of_layer=partial(mixture_or_mlp, experts=routed_experts),
        rename=deepseek_v2.NAMES,
        beside=partial(stacked_experts, inputs_first=False),
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
    mtp=None,
    refuses={},
    specific=RoutedExpertsConfig,
    rope_parameters=_ROPE,
    stacked_experts=True,
    partial_rotary_factor=1.0,
    gguf=replace(
        deepseek_v2.GGUF,
        architecture="mistral4",
        metadata={**deepseek_v2.GGUF.metadata, "attention.temperature_scale": _GROWTH},
        marks={},
        assumed={"attention.temperature_scale": "queries don't grow beyond the trained length"},
        additions=_of_gguf,
    ),
    query_scaling=partial(ministral3.query_scaling, unstated=_ROPE),
)
#: As released: the text model of a vision-language model.
WITH_IMAGES = replace(
    FAMILY,
    architecture=f"{ministral3.WITH_IMAGES.architecture}:{FAMILY.model_type}",
    model_type=ministral3.WITH_IMAGES.model_type,
    text_config=ministral3.WITH_IMAGES.text_config,
    defaults={**FAMILY.defaults, "tie_word_embeddings": True},
    names=BESIDE_IMAGES,
    gguf=None,
)

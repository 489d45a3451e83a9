"""Qwen 3.5 35B-A3B and larger (Qwen, 2026), text only: a Qwen 3.5 with experts and a shared one in
place of the MLP. Some checkpoints store the experts' matrices together, gates before ups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import SharedExperts, mixture_or_mlp

from . import qwen2_moe, qwen3_5, qwen3_next
from .qwen3_vl_moe import experts_as_stored
from .units import UnitSpec


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    return replace(
        qwen3_5.decoder(config),
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(SharedExperts, gated=True)),
        rename=qwen3_5.NAMES | qwen2_moe.NAMES,
        made=experts_as_stored(config),
    )(config, dtype)


TEXT = replace(
    qwen3_5.TEXT,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    units=_units,
    defaults=qwen3_next.FAMILY.defaults
    | {
        "vocab_size": 248320,
        "intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    specific=qwen3_next.LinearExpertsConfig,
    ignores=frozenset(("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")),
    aliases={
        "num_local_experts": "num_experts",
        "intermediate_size": "moe_intermediate_size",
    },
    stacked_experts=True,
    gguf=replace(qwen3_5.GGUF, architecture="qwen35moe"),
)
FAMILY = replace(
    TEXT,
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    text_config="text_config",
    gguf=None,
)

"""ERNIE 4.5 21B-A3B and 300B-A47B (Baidu, 2025): an ERNIE 4.5 with routing by
softmax scores with a correction bias, and shared experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from torch import nn

from exkv.checkpoint import ModelConfig, RoutedExpertsConfig
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import is_int
from exkv.layers import mixture_or_mlp, routed_experts
from exkv.weights import Slice, Source, sliced_source

from . import ernie4_5, qwen2_moe
from .decoder import Decoder, Head, MakeNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingExpertsConfig(RoutedExpertsConfig):
    """Layers after ``moe_layer_end_index`` have an MLP instead; -1 is the last."""

    moe_layer_end_index: int = -1

    def __post_init__(self) -> None:
        RoutedExpertsConfig.__post_init__(self)
        if not is_int(self.moe_layer_end_index):
            raise ValueError(
                f"moe_layer_end_index must be an integer, not {self.moe_layer_end_index!r}"
            )

    def is_dense(self, layer: int) -> bool:
        behind = self.moe_layer_end_index != -1 and layer > self.moe_layer_end_index
        return behind or RoutedExpertsConfig.is_dense(self, layer)


def _correction(
    config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module
) -> list[Source]:
    """The correction, stored as a single row of a matrix."""
    settings = config.settings(EndingExpertsConfig)
    if settings.is_dense(int(name.rpartition(".")[-1])):
        return []
    stored, size = f"{name}.mlp.moe_statics.e_score_correction_bias", settings.num_local_experts
    row = Slice(name="mlp.correction", of=itemgetter(0))
    return [sliced_source(stored, (1, size), torch.float32, [row])]


def _head(config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> Head:
    return Head(config, dtype, norm=norm, bias=config.mlp_bias)


FAMILY = replace(
    ernie4_5.FAMILY,
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    units=Decoder(
        mlp_of_layer=partial(
            mixture_or_mlp, experts=partial(routed_experts, corrected=True, exact=True)
        ),
        head=_head,
        rename={**qwen2_moe.NAMES, "mlp.shared_expert.": "mlp.shared_experts."},
        made=_correction,
    ),
    defaults=ernie4_5.FAMILY.defaults
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 1536,
        "moe_norm_min": 1e-12,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    specific=EndingExpertsConfig,
    ignores=frozenset(
        ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "mlp_only_layers")
    ),
    aliases={
        **ernie4_5.FAMILY.aliases,
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
        "decoder_sparse_step": "moe_layer_interval",
    },
    gguf=GGUFFamily(
        architecture="ernie4_5-moe",
        names={**EXPERTS, **shared("mlp.shared_experts"), "exp_probs_b.bias": "mlp.correction"},
        dims={"exp_probs_b.bias": 1},
    ),
)

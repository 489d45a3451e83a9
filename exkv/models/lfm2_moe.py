"""LFM2 with experts (Liquid AI, 2025: LFM2-8B-A1B): routing by sigmoid scores with a correction
bias, and MLPs in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from exkv.checkpoint import ModelConfig, RoutedExpertsConfig, windows
from exkv.checkpoint.value_checks import check_layers
from exkv.layers import MLP, Experts, mixture_or_mlp

from . import lfm2
from .decoder import Decoder, rms_norm


@dataclass(frozen=True, kw_only=True)
class ConvExpertsConfig(RoutedExpertsConfig, lfm2.ShortConvConfig):
    """Convolutions, and experts; whether these have a correction bias."""

    use_expert_bias: bool = True

    def __post_init__(self) -> None:
        lfm2.ShortConvConfig.__post_init__(self)
        RoutedExpertsConfig.__post_init__(self)


def _experts(config: ModelConfig, dtype: torch.dtype) -> MLP:
    corrected = config.settings(ConvExpertsConfig).use_expert_bias
    return Experts(config, dtype, sigmoid=True, corrected=corrected)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The stated ``layer_types``."""
    check_layers(values["num_hidden_layers"])
    types = values.get("layer_types")
    if types is None:
        types = [windows.FULL_ATTENTION] * values["num_hidden_layers"]
    return None, windows.check_layer_types(types, values["num_hidden_layers"], None, ("conv",))


FAMILY = replace(
    lfm2.FAMILY,
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    units=Decoder(
        attention=lfm2.mixer,
        mlp_of_layer=partial(mixture_or_mlp, experts=_experts),
        head_norm=rms_norm,
        rename=lfm2.NAMES | {"mlp.correction": "feed_forward.expert_bias", "mlp.": "feed_forward."},
    ),
    defaults=lfm2.FAMILY.defaults
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 0,
        "first_k_dense_replace": 2,
        "moe_norm_min": 1e-6,
    },
    windows=_windows,
    specific=ConvExpertsConfig,
    ignores=frozenset(("n_group", "topk_group", "mlp_only_layers", "decoder_sparse_step")),
    aliases={
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tie_embedding",
        "num_local_experts": "num_experts",
        "first_k_dense_replace": "num_dense_layers",
    },
    gguf=replace(
        lfm2.GGUF,
        architecture="lfm2moe",
        names={
            **lfm2.GGUF.names,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
        },
    ),
)

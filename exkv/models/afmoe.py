"""Trinity (Arcee, 2025): gated attention, norms before and after attention and MLP, rotary
positions in layers with a window only, and routing by sigmoid scores with a correction bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, RoutedExpertsConfig, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, shared
from exkv.checkpoint.value_checks import check_size
from exkv.layers import Attention, Linear, mixture_or_mlp, routed_experts
from exkv.layers.attention import Attend, describe_separate
from exkv.layers.descriptions import AttentionBlock, describe, describes

from . import qwen2_moe
from .decoder import Decoder, SandwichLayer, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledExpertsConfig(RoutedExpertsConfig):
    """Whether embeddings are multiplied by the square root of their size."""

    mup_enabled: bool = False


class GatedAttention(Attention):
    """Attention whose outputs are multiplied by the sigmoids of a projection of its input."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(config, dtype, **options)
        self.gate_proj = Linear(config.hidden_size, self.q_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        q, k, v = self.heads(x, batch)
        attended, gates = self.attend(q, k, v, batch, cache).flatten(2), self.gate_proj(x)
        torch.ops.exkv.sigmoid_(gates)
        return self.o_proj(attended * gates)


@describes(GatedAttention)
def _gated(attention: GatedAttention) -> AttentionBlock:
    return replace(describe_separate(attention), gates=describe(attention.gate_proj))


def _all_but_every_nth(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every ``global_attn_every_n_layers``-th layer attends to everything."""
    window, period = windows.sliding_window(values), values["global_attn_every_n_layers"]
    check_size("global_attn_every_n_layers", period)
    return windows.by_layer(values, window, lambda layer: (layer + 1) % period != 0)


def _scale(config: ModelConfig, dtype: torch.dtype) -> float:
    return config.hidden_size**0.5 if config.settings(ScaledExpertsConfig).mup_enabled else 1.0


FAMILY = Family(
    architecture="AfmoeForCausalLM",
    model_type="afmoe",
    units=Decoder(
        attention=GatedAttention,
        mlp_of_layer=partial(
            mixture_or_mlp, experts=partial(routed_experts, sigmoid=True, corrected=True)
        ),
        layer=SandwichLayer,
        head_norm=rms_norm,
        scale=_scale,
        rename={
            **qwen2_moe.NAMES,
            "mlp.correction": "mlp.expert_bias",
            "mlp.shared_expert.": "mlp.shared_experts.",
            "_feedforward_layernorm": "_mlp_layernorm",
            # The router; and dense layers, which have a different gate.
            "mlp.gate": "mlp.router.gate",
            "mlp.router.gate_proj": "mlp.gate_proj",
        },
    ),
    defaults={
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=_all_but_every_nth,
    rotated=lambda values, types: tuple(
        kind == windows.SLIDING_ATTENTION for kind in types or (None,) * values["num_hidden_layers"]
    ),
    reads=("attention_bias",),
    specific=ScaledExpertsConfig,
    ignores=frozenset(("norm_topk_prob", "n_group", "topk_group", "mlp_only_layers")),
    aliases={
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
    },
    gguf=GGUFFamily(
        architecture="afmoe",
        names={
            **EXPERTS,
            **shared("mlp.shared_experts"),
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        assumed={"attention.sliding_window_pattern": "every fourth layer attends to everything"},
        # As llama.cpp, which scales all embeddings of the architecture.
        additions=lambda values: {"mup_enabled": True},
    ),
)

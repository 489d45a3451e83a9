"""Qwen3-Next (Qwen, 2025): three of four layers have linear attention by the gated delta rule, the
others attention with a gate; experts beside a shared one in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ExpertsConfig, LinearAttentionConfig, ModelConfig, StateTensor, windows
from exkv.checkpoint.families import Family, MTPNames
from exkv.layers import Attention, FusedGatedDelta, Linear, SharedExperts, mixture_or_mlp
from exkv.layers.attention import Attend

from . import qwen2_moe
from .decoder import Decoder, rms_norm


@dataclass(frozen=True, kw_only=True)
class LinearExpertsConfig(ExpertsConfig, LinearAttentionConfig):
    """Layers of linear attention, and experts."""

    def __post_init__(self) -> None:
        LinearAttentionConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)


class QueryGatedAttention(Attention):
    """Attention whose outputs are multiplied by the sigmoids of gates, which one matrix makes
    together with the queries: behind those of each head."""

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        super().make_projections(hidden, bias, dtype)
        self.q_proj = Linear(hidden, 2 * self.q_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        projected = list(self.project(x))
        q, gate = projected[0].unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        projected[0] = q.flatten(2)
        q, k, v = self.rotated(projected, batch)
        attended = self.attend(q, k, v, batch, cache)
        return self.o_proj((attended * gate.sigmoid()).flatten(2))


def linear_or_attention(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    layer: int,
    linear: Callable[..., nn.Module],
    **options: Any,
) -> nn.Module:
    """``linear`` attention, or the other kind in a layer that has keys and values."""
    if config.state(layer):
        return linear(config, dtype)
    return QueryGatedAttention(config, dtype, layer=layer, **options)


def states(config: ModelConfig) -> tuple[StateTensor, ...]:
    """What a layer of linear attention keeps."""
    return config.settings(LinearAttentionConfig).state


#: What checkpoints call the parts of linear attention.
NAMES = {
    f"self_attn.{name}": f"linear_attn.{name}"
    for name in ("in_proj", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
}
norm = partial(rms_norm, offset=True)

FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    units=Decoder(
        attention=partial(linear_or_attention, linear=FusedGatedDelta),
        mlp_of_layer=partial(mixture_or_mlp, experts=partial(SharedExperts, gated=True)),
        norm=norm,
        head_norm=norm,
        rename=NAMES | qwen2_moe.NAMES,
    ),
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_local_experts": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    windows=windows.with_states,
    reads=("attention_bias",),
    refuses={"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    partial_rotary_factor=0.25,
    specific=LinearExpertsConfig,
    aliases={"num_local_experts": "num_experts"},
    states=states,
    mtp=MTPNames(
        layer="mtp.layers.0",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
    ),
)

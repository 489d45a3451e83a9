"""OLMoE (Muennighoff et al., 2024): norms over all heads' queries and keys together, and experts in
place of the MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import ExpertsConfig, Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily
from exkv.checkpoint.value_checks import set_floats
from exkv.layers import Attention, Experts, RMSNorm, WideNormAttention

from .decoder import Decoder, rms_norm
from .qwen2_moe import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """``clip_qkv`` bounds the magnitude of queries, keys and values; None for no bound."""

    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        set_floats(self, ("clip_qkv",), null=True)


class ClippedNorm(RMSNorm):
    """RMSNorm, then a bound."""

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype, limit: float) -> None:
        super().__init__(size, config.rms_norm_eps, dtype=dtype)
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp_(-self.limit, self.limit)


class ClippedAttention(WideNormAttention):
    """Attention whose queries and keys are clipped after their norms, and values directly."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, layer: int, limit: float
    ) -> None:
        norm = lambda size: ClippedNorm(size, config, dtype, limit)  # noqa: E731
        super().__init__(config, dtype, layer=layer, head_norm=norm)
        self.limit = limit

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        q, k, v = super().project(x)
        return q, k, v.clamp(-self.limit, self.limit)


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    limit = config.settings(OlmoeConfig).clip_qkv
    if limit is not None:
        return ClippedAttention(config, dtype, layer=layer, limit=limit)
    return WideNormAttention(config, dtype, layer=layer, head_norm=rms_norm(config, dtype))


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    units=Decoder(attention=_attention, mlp=Experts, rename=NAMES),
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    reads=("attention_bias",),
    specific=OlmoeConfig,
    aliases={"num_local_experts": "num_experts"},
    gguf=GGUFFamily(architecture="olmoe", names=EXPERTS),
)

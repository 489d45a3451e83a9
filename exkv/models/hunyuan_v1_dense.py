"""Hunyuan 0.5B to 7B (Tencent, 2025): a Llama that norms heads of queries and keys after their
rotary positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention, RMSNorm
from exkv.layers.attention import Attend, describe_separate
from exkv.layers.descriptions import AttentionBlock, describe, describes

from .decoder import Decoder


class RotatedNormAttention(Attention):
    """Attention with norms of heads after the rotary positions."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Attend) -> Tensor:
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        return super().attend(q, k, v, batch, cache)


@describes(RotatedNormAttention)
def _rotated_norm(attention: RotatedNormAttention) -> AttentionBlock:
    return replace(
        describe_separate(attention),
        query_norm=describe(attention.query_layernorm),
        key_norm=describe(attention.key_layernorm),
        normed_rotated=True,
    )


GGUF_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}

FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    units=Decoder(attention=RotatedNormAttention),
    defaults={
        "vocab_size": 290943,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    },
    reads=("attention_bias",),
    rope_aliases={"dynamic": "ntk_alpha"},
    gguf=GGUFFamily(architecture="hunyuan-dense", names=GGUF_NORMS),
)

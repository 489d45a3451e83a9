"""Command R (Cohere, 2024): attention and MLP in parallel after one norm without a bias, positions
that rotate adjacent pairs, and scaled logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family, Specific
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention, PlainModule
from exkv.layers.linear import weight

from .decoder import Decoder, ParallelLayer, layer_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(Specific):
    """Whether heads of queries and keys are normed (Command R+)."""

    use_qk_norm: bool = False


class HeadNorm(PlainModule):
    """LayerNorm over a head's features with a weight for each head, and no bias."""

    def __init__(self, heads: int, head_dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(heads, head_dim, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, H, D) -> the same shape; in float32 up to the last rounding."""
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide.mul_(wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_())
        return wide.mul_(self.weight).to(x.dtype)


class HeadNormAttention(Attention):
    """Attention with a :class:`HeadNorm` of queries and of keys."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer)
        size, eps = config.head_dim, config.rms_norm_eps
        self.q_norm = HeadNorm(config.num_attention_heads, size, eps, dtype)
        self.k_norm = HeadNorm(config.num_key_value_heads, size, eps, dtype)


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    normed = config.settings(CohereConfig).use_qk_norm
    return (HeadNormAttention if normed else Attention)(config, dtype, layer=layer)


DECODER = Decoder(layer=ParallelLayer, norm=partial(layer_norm, bias=False))

FAMILY = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    units=replace(DECODER, attention=_attention),
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    reads=("attention_bias",),
    specific=CohereConfig,
    rope_theta=5e5,
    rope_interleaved=True,
    aliases={"rms_norm_eps": "layer_norm_eps"},
    multipliers={"logits": "logit_scale"},
    gguf=GGUFFamily(architecture="command-r", metadata={"logit_scale": "logit_scale"}),
)

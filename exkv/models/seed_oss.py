"""Seed-OSS (ByteDance, 2025): a Llama whose biases differ by projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family, Specific
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention

from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBiasConfig(Specific):
    """A bias of attention's output projection, independent of the other projections'."""

    attention_out_bias: bool = False


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> Attention:
    out_bias = config.settings(OutputBiasConfig).attention_out_bias
    return Attention(config, dtype, layer=layer, out_bias=out_bias)


FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    units=Decoder(attention=_attention),
    defaults={
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "pad_token_id": 1,
        "bos_token_id": 0,
    },
    reads=("attention_bias", "mlp_bias"),
    specific=OutputBiasConfig,
    gguf=GGUFFamily(
        architecture="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}
    ),
)

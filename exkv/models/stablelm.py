"""StableLM 2 and Stable LM 3B (Stability AI, 2024): a Llama with LayerNorms and positions that
rotate a quarter of each head; attention and MLP may be parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import Attention

from .decoder import Decoder, DecoderLayer, ParallelLayer, layer_norm
from .gpt_neox import ResidualConfig


def _layer(config: ModelConfig, *parts: Any) -> nn.Module:
    parallel = config.settings(ResidualConfig).use_parallel_residual
    return (ParallelLayer if parallel else DecoderLayer)(config, *parts)


FAMILY = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    units=Decoder(attention=partial(Attention, out_bias=False), layer=_layer, norm=layer_norm),
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "use_parallel_residual": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    reads=("attention_bias",),
    refuses={"qk_layernorm": False},
    specific=ResidualConfig,
    partial_rotary_factor=0.25,
    aliases={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    gguf=GGUFFamily(
        architecture="stablelm", metadata={"use_parallel_residual": "use_parallel_residual"}
    ),
)

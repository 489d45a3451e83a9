"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP in parallel, each after its own
LayerNorm, biases everywhere, and positions that rotate a quarter of each head.

Checkpoints have queries, keys and values in one matrix, head by head; they are separated when they
are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family, Specific, TensorNames
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import PlainMLP
from exkv.weights import Fused

from .decoder import Decoder, DecoderLayer, ParallelNormsLayer, layer_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualConfig(Specific):
    """Whether the MLP gets the layer's input, or the result of attention."""

    use_parallel_residual: bool = True


def _layer(config: ModelConfig, *parts: Any) -> nn.Module:
    parallel = config.settings(ResidualConfig).use_parallel_residual
    return (ParallelNormsLayer if parallel else DecoderLayer)(config, *parts)


_NAMES = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _projections(config: ModelConfig) -> list[Fused]:
    """Queries, keys and values, head by head."""
    heads, dim = config.num_attention_heads, config.head_dim

    def part(index: int, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(0, (heads, 3, dim))[:, index].flatten(0, 1)

    parts = {f"self_attn.{each}_proj": partial(part, index) for index, each in enumerate("qkv")}
    return [Fused(name="attention.query_key_value", parts=parts)]


FAMILY = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    units=Decoder(mlp=PlainMLP, layer=_layer, norm=layer_norm, rename=_NAMES, fused=_projections),
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
    },
    reads=("attention_bias", "mlp_bias"),
    specific=ResidualConfig,
    partial_rotary_factor=0.25,
    aliases={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    names=(
        TensorNames(
            layers="gpt_neox.layers",
            table="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
        ),
        TensorNames(),  # of GGUF files
    ),
    gguf=GGUFFamily(
        architecture="gptneox",
        names={
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        metadata={"use_parallel_residual": "use_parallel_residual"},
    ),
)

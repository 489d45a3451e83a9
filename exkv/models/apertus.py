"""Apertus (Swiss AI Initiative, 2025): norms of heads, and an MLP without a gate whose activation,
xIELU, has its own parameters in each layer."""

from __future__ import annotations

import torch
from torch import Tensor

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.layers import MLP, PlainMLP, PlainModule
from exkv.layers.linear import weight
from exkv.ops.activations import xielu

from .decoder import Decoder, rms_norm


class XIELU(PlainModule):
    """The activation, with parameters named as in its checkpoints."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = weight(1, dtype=dtype), weight(1, dtype=dtype)
        self.beta, self.eps = weight(dtype=dtype), weight(dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., N) -> the same shape."""
        return xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class XIELUMLP(PlainMLP):
    """down(xielu(up(x)))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.act_fn = XIELU(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


def _mlp(config: ModelConfig, dtype: torch.dtype) -> MLP:
    return (XIELUMLP if config.hidden_act == "xielu" else PlainMLP)(config, dtype)


FAMILY = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    units=Decoder(
        mlp=_mlp,
        head_norm=rms_norm,
        rename={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
    defaults={
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "pad_token_id": 3,
    },
    reads=("attention_bias",),
    learned_acts=("xielu",),
    rope_theta=12e6,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    gguf=GGUFFamily(
        architecture="apertus",
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        scalars={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
)

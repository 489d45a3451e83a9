"""The gated feed-forward network (Shazeer, 2020: SwiGLU and kin)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from exkv.config import ModelConfig

from .linear import Linear

_ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); x (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = _ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.act(self.gate_proj(x)).mul_(self.up_proj(x))
        return self.down_proj(gated)

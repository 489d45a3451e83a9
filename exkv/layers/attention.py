"""Self-attention with grouped queries (Ainslie et al., 2023) and rotary positions.

The layer projects and rotates; keys and values go to the cache layer, which alone knows how it
stores them and answers with the attention's output.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from exkv.batch import Batch
from exkv.config import ModelConfig
from exkv.ops.attention import AttentionParams

from .linear import Linear


class Attend(Protocol):
    """What attention asks of a cache layer: store k, v, and attend over all that is stored."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D)."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, bias, self.head_dim = config.hidden_size, config.attention_bias, config.head_dim
        self.params = AttentionParams(scale=self.head_dim**-0.5)
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(hidden, q_size, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.o_proj = Linear(q_size, hidden, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k = torch.ops.exkv.rope(
            self.q_proj(x).view(heads), self.k_proj(x).view(heads), batch.cos, batch.sin
        )
        out = cache.attend(q, k, self.v_proj(x).view(heads), batch, self.params)
        return self.o_proj(out.flatten(2))

"""Self-attention with grouped queries (Ainslie et al., 2023) and rotary positions.

The layer projects and rotates; keys and values go to the cache layer, which alone knows how it
stores them and answers with the attention's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.ops.attention import AttentionParams

from .descriptions import AttentionBlock, Projection, describe, describes
from .linear import Linear, PlainModule, side_by_side
from .rope import rotary_name


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


class Attention(PlainModule):
    """Projections, rotary positions, and the cache's answer projected back.

    Args:
        layer: the decoder layer's index, by which the config tells windows and positions.
        qkv_bias: biases on the three input projections; None for what the config says. The
            output projection's is always the config's.
        head_norm: makes a norm over a head's features, for queries and for keys (Qwen 3).
        scale: of the scores; None for 1 / sqrt(head_dim).
        softcap: of the scores; 0 for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        layer: int,
        qkv_bias: bool | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.num_attention_heads * self.head_dim
        self.kv_size = config.num_key_value_heads * self.head_dim
        self.params = AttentionParams(
            scale=self.head_dim**-0.5 if scale is None else scale,
            window=config.window(layer),
            softcap=softcap,
            rotary=rotary_name(config, layer),
        )
        bias = config.attention_bias if qkv_bias is None else qkv_bias
        self.make_projections(config.hidden_size, bias, dtype)
        self.o_proj = Linear(
            self.q_size, config.hidden_size, bias=config.attention_bias, dtype=dtype
        )
        self.q_norm = None if head_norm is None else head_norm(self.head_dim)
        self.k_norm = None if head_norm is None else head_norm(self.head_dim)

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        """The parameters that :meth:`project` uses."""
        self.q_proj = Linear(hidden, self.q_size, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, self.kv_size, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, self.kv_size, bias=bias, dtype=dtype)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x (B, T, hidden) -> q (B, T, H * D), k and v (B, T, H_kv * D)."""
        return side_by_side(x, (self.q_proj, self.k_proj, self.v_proj))

    def forward(self, x: torch.Tensor, batch: Batch, cache: Attend) -> torch.Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        q, k, v = self._heads(x, batch)
        return self.o_proj(cache.attend(q, k, v, batch, self.params).flatten(2))

    def _heads(
        self, x: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.project(x)
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = torch.ops.exkv.rope(q, k, *batch.rotary[self.params.rotary])
        return q, k, v


class FusedAttention(Attention):
    """The same with one matrix for the three input projections, as Phi-3's checkpoints have it."""

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        self.qkv_proj = Linear(hidden, self.q_size + 2 * self.kv_size, bias=bias, dtype=dtype)

    def project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.qkv_proj(x).split((self.q_size, self.kv_size, self.kv_size), dim=-1)


@describes(Attention)
def _separate(attention: Attention) -> AttentionBlock:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _block(attention, *map(describe, projections))


@describes(FusedAttention)
def _fused(attention: FusedAttention) -> AttentionBlock:
    sizes = (attention.q_size, attention.kv_size, attention.kv_size)
    return _block(attention, *describe(attention.qkv_proj).split(*sizes))


def _block(
    attention: Attention, query: Projection, key: Projection, value: Projection
) -> AttentionBlock:
    query_norm, key_norm = (
        None if norm is None else describe(norm) for norm in (attention.q_norm, attention.k_norm)
    )
    return AttentionBlock(
        query=query,
        key=key,
        value=value,
        output=describe(attention.o_proj),
        query_norm=query_norm,
        key_norm=key_norm,
        head_dim=attention.head_dim,
        params=attention.params,
    )

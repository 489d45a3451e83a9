"""Self-attention with grouped queries (Ainslie et al., 2023) and rotary positions.

The layer projects and rotates; the cache layer stores keys and values, in a way only it knows, and
returns the attention output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.ops.attention import AttentionParams

from .descriptions import AttentionBlock, Projection, describe, describes, parameter
from .linear import Linear, PlainModule, weight
from .low_rank import side_by_side
from .rope import QUERIES, rotary_name


class Attend(Protocol):
    """What attention needs of a cache layer: store k and v, and attend to everything stored."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, params: AttentionParams
    ) -> Tensor:
        """q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D)."""


class Attention(PlainModule):
    """Projections, rotary positions, attention by the cache, and the output projection.

    Args:
        layer: index of the decoder layer, which selects windows and positions in the config.
        qkv_bias: biases on the three input projections; None for the config's.
        out_bias: bias on the output projection; likewise.
        head_norm: makes a norm over a head's features, for queries and for keys (Qwen 3).
        scale: of the scores; None for the config's multiplier, or else 1 / sqrt(head_dim).
        softcap: of the scores; 0 for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        layer: int,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads, self.head_dim = config.heads(layer)
        self.q_size = config.query_heads(layer) * self.head_dim
        self.kv_size = kv_heads * self.head_dim
        stated = config.multipliers.attention if scale is None else scale
        self.params = AttentionParams(
            scale=self.head_dim**-0.5 if stated is None else stated,
            window=config.window(layer),
            softcap=softcap,
            rotary=rotary_name(config, layer),
        )
        interleaved = config.rope_interleaved and config.rotates(layer)
        self.interleaved = config.rotary_dim if interleaved else 0
        bias = config.attention_bias if qkv_bias is None else qkv_bias
        self.make_projections(config.hidden_size, bias, dtype)
        bias = config.attention_bias if out_bias is None else out_bias
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=bias, dtype=dtype)
        q_width, k_width = self.norm_widths
        self.q_norm = None if head_norm is None else head_norm(q_width)
        self.k_norm = None if head_norm is None else head_norm(k_width)

    @property
    def norm_widths(self) -> tuple[int, int]:
        """Number of values that are normed together, for queries and for keys."""
        return self.head_dim, self.head_dim

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        """Create the parameters that :meth:`project` uses."""
        self.q_proj = Linear(hidden, self.q_size, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, self.kv_size, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, self.kv_size, bias=bias, dtype=dtype)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """x (B, T, hidden) -> q (B, T, H * D), k and v (B, T, H_kv * D)."""
        return side_by_side(x, (self.q_proj, self.k_proj, self.v_proj))

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        q, k, v = self.heads(x, batch)
        return self.o_proj(self.attend(q, k, v, batch, cache).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Attend) -> Tensor:
        """Attend to the cache -> (B, T, H, D)."""
        return cache.attend(q, k, v, batch, self.params)

    def heads(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, hidden) -> q (B, T, H, D) and k (B, T, H_kv, D), normed and rotated; and v."""
        return self.rotated(list(self.project(x)), batch)

    def rotated(self, projected: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Like :meth:`heads`, from :meth:`project`'s results; the list is emptied, so that each
        tensor is freed as soon as another takes its place."""
        q, k, v = projected
        projected.clear()
        heads = (*q.shape[:2], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            each = [(*q.shape[:2], -1, width) for width in self.norm_widths]
            q, k = self.q_norm(q.view(each[0])), self.k_norm(k.view(each[1]))
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if self.interleaved:
            q, k = in_halves(q, self.interleaved), in_halves(k, self.interleaved)
        q, k = torch.ops.exkv.rope(q, k, *batch.rotary[self.params.rotary])
        return q, k, v


def in_halves(x: Tensor, width: int) -> Tensor:
    """Reorder heads (B, T, H, D) from interleaved to half-split layout: among the first ``width``
    features, even ones come first, then odd ones. Scores don't change, since queries and keys are
    reordered alike."""
    halves = x[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if width == x.shape[-1] else torch.cat((halves, x[..., width:]), dim=-1)


class WideNormAttention(Attention):
    """Attention with norms over all heads of a token together (OLMo 2)."""

    @property
    def norm_widths(self) -> tuple[int, int]:
        return self.q_size, self.kv_size


class SinkAttention(Attention):
    """Attention with a learned sink score for each head, which takes its share of the softmax and
    contributes no value (gpt-oss)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer)
        self.sinks = weight(config.query_heads(layer), dtype=dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Attend) -> Tensor:
        params = replace(self.params, sinks=self._parameters["sinks"])
        return cache.attend(q, k, v, batch, params)


class ScaledQueryAttention(Attention):
    """Attention whose queries are scaled by a function of their position (Llama 4)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Attend) -> Tensor:
        factors, _ = batch.rotary[QUERIES]  # (B, T, 1)
        return super().attend(q * factors.unsqueeze(-1), k, v, batch, cache)


class FusedAttention(Attention):
    """Attention with one matrix for the three input projections, as in Phi-3's checkpoints."""

    def make_projections(self, hidden: int, bias: bool, dtype: torch.dtype) -> None:
        self.qkv_proj = Linear(hidden, self.q_size + 2 * self.kv_size, bias=bias, dtype=dtype)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        return self.qkv_proj(x).split((self.q_size, self.kv_size, self.kv_size), dim=-1)


@describes(SinkAttention)
def _with_sinks(attention: SinkAttention) -> AttentionBlock:
    params = replace(attention.params, sinks=parameter(attention, "sinks"))
    return replace(describe_separate(attention), params=params)


@describes(ScaledQueryAttention)
def _scaled(attention: ScaledQueryAttention) -> AttentionBlock:
    return replace(describe_separate(attention), query_factors=QUERIES)


@describes(WideNormAttention)
@describes(Attention)
def describe_separate(attention: Attention) -> AttentionBlock:
    """Attention with three input projections."""
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
        interleaved=attention.interleaved,
        params=attention.params,
    )

"""Attention for models whose last layers attend to earlier layers' keys and values (Gemma 3n,
4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from exkv.batch import Batch, Factors
from exkv.checkpoint import ModelConfig
from exkv.ops.attention import AttentionParams

from .attention import Attend
from .linear import Linear, PlainModule
from .rope import rotary_name

#: Keys and values of a call's tokens, (B, T, H_kv, D) each.
KeysAndValues: TypeAlias = tuple[Tensor, Tensor]


class SharedKeysAttention(PlainModule):
    """Attention with norms over heads of queries, keys and values, which uses an earlier layer's
    keys and values where the config says so. Scores are not scaled.

    Args:
        head_norm: makes a norm over a head's features; that of values has no weights.
        keys_are_values: whether values are made from the same projection as keys.

    Attributes:
        layer: index of the decoder layer.
        source: the layer whose keys and values it attends to; None for its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        layer: int,
        head_norm: Callable[[int], nn.Module],
        keys_are_values: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.source = layer, config.kv_source(layer)
        count, self.head_dim = config.heads(layer)
        self.params = AttentionParams(
            scale=1.0, window=config.window(layer), rotary=rotary_name(config, layer)
        )
        hidden, bias = config.hidden_size, config.attention_bias
        width = config.num_attention_heads * self.head_dim
        self.q_proj = Linear(hidden, width, bias=bias, dtype=dtype)
        self.q_norm = head_norm(self.head_dim)
        self.k_proj = self.v_proj = self.k_norm = None
        if self.source is None:
            self.k_proj = Linear(hidden, count * self.head_dim, bias=bias, dtype=dtype)
            if not keys_are_values:
                self.v_proj = Linear(hidden, count * self.head_dim, bias=bias, dtype=dtype)
            self.k_norm = head_norm(self.head_dim)
        self.eps = config.rms_norm_eps
        self.o_proj = Linear(width, hidden, bias=bias, dtype=dtype)

    def forward(
        self, x: Tensor, batch: Batch, cache: Attend, given: KeysAndValues | None
    ) -> tuple[Tensor, KeysAndValues]:
        """x (B, T, hidden), normed, and the keys and values of ``source`` -> (B, T, hidden), and
        the keys and values used."""
        factors = batch.rotary[self.params.rotary]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        if given is None:
            q, k, v = self._with_own(q, x, factors)
        else:
            q, _ = torch.ops.exkv.rope(q, q[:, :, :1], *factors)
            k, v = given
        out = cache.attend(q, k, v, batch, self.params)
        return self.o_proj(out.flatten(2)), (k, v)

    def _with_own(self, q: Tensor, x: Tensor, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
        """q, rotated, and keys and values (B, T, H_kv, D) made from x."""
        assert self.k_proj is not None and self.k_norm is not None
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = k if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        v, k = rms(v, self.eps), self.k_norm(k)
        return (*torch.ops.exkv.rope(q, k, *factors), v)


def rms(x: Tensor, eps: float) -> Tensor:
    """x (..., N), divided by its root mean square: a norm without weights."""
    return torch.ops.exkv.rms_norm(x, x.new_zeros(x.shape[-1]), eps, True)

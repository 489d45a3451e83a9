"""Multi-head latent attention (DeepSeek, 2024: DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads of a token are products of one latent vector. Queries are multiplied by
the keys' half of that matrix, and attention's output by the values' half, so that attention runs
over the latent vectors themselves, together with the rotated features that all heads share: one key
head, which also provides the values. No token's keys or values are ever computed or stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.ops.attention import AttentionParams
from exkv.weights import WeightFormat

from .attention import Attend, in_halves
from .descriptions import LatentBlock, Weight, describe, describes, weight_of
from .linear import Linear, Matrix, PlainModule, parameters_of
from .low_rank import side_by_side
from .norm import RMSNorm
from .rope import QUERIES, rotary_name

#: Epsilon of both of its norms, whatever the config says about the others.
_EPS = 1e-6


class EachHead(Matrix):
    """One matrix (out, in) per head, stacked: x (B, T, H, in) -> (B, T, H, out). They are floats,
    or in a format that can be split between heads."""

    heads = 1

    def __init__(self, heads: int, inputs: int, outputs: int, *, dtype: torch.dtype) -> None:
        super().__init__((heads * outputs, inputs), dtype)
        self.heads, self._floats = heads, self.format

    @property
    def rows(self) -> int:
        """Rows of one head's matrix."""
        return self.size[0] // self.heads

    def use_format(self, format: WeightFormat) -> None:
        super().use_format(format if format.splits_at(self.rows) else self._floats)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).transpose(0, 1).contiguous()  # (H, B * T, in)
        out = self.format.heads(tokens, parameters_of(self))
        return out.transpose(0, 1).unflatten(0, x.shape[:2])


class LatentAttention(PlainModule):
    """Projections, rotary positions, attention over latent vectors by the cache, and the output
    projection.

    Attributes:
        key_up: each head's matrix (rank, nope) from latent vectors to unrotated keys, indexed by
            the latent dimension first: queries are multiplied by it.
        value_up: each head's matrix (v, rank) from latent vectors to values.

    Args:
        layer: index of the decoder layer, which selects windows and positions in the config.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__()
        assert config.latent is not None, "checked when the config was made"
        self.sizes = sizes = config.latent
        self.count = heads = config.num_attention_heads
        self.params = AttentionParams(
            scale=score_scale(config),
            window=config.window(layer),
            rotary=rotary_name(config, layer),
        )
        self.interleaved = sizes.qk_rope_head_dim if config.rope_interleaved else 0
        self.scaled, self.latent_scale = config.query_scaling is not None, 1.0
        hidden, bias, rank = config.hidden_size, config.attention_bias, sizes.kv_lora_rank
        width, low = heads * sizes.qk_head_dim, sizes.q_lora_rank
        if low is None:
            self.q_proj = Linear(hidden, width, bias=False, dtype=dtype)
        else:
            self.q_a_proj = Linear(hidden, low, bias=bias, dtype=dtype)
            self.q_a_layernorm = RMSNorm(low, _EPS, dtype=dtype)
            self.q_b_proj = Linear(low, width, bias=False, dtype=dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, sizes.stored, bias=bias, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(rank, _EPS, dtype=dtype)
        self.key_up = EachHead(heads, sizes.qk_nope_head_dim, rank, dtype=dtype)
        self.value_up = EachHead(heads, rank, sizes.v_head_dim, dtype=dtype)
        self.o_proj = Linear(heads * sizes.v_head_dim, hidden, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        q, k = self.heads(x, batch)
        out = cache.attend(q, k, k, batch, self.params)
        del q, k  # they are larger than the values
        return self.o_proj(self.values(out))

    def heads(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x (B, T, hidden) -> q (B, T, H, D) and k (B, T, 1, D), with rotated features first, then
        those that multiply latent vectors."""
        sizes = self.sizes
        q, latent = self.project(x)
        q = q.view(*x.shape[:2], self.count, sizes.qk_head_dim)
        if self.scaled:
            q = q * batch.rotary[QUERIES][0].unsqueeze(-1)
        plain, q_rotated = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
        latent, k_rotated = latent.split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), dim=-1)
        k_rotated = k_rotated.unsqueeze(2)
        if self.interleaved:
            q_rotated = in_halves(q_rotated, self.interleaved)
            k_rotated = in_halves(k_rotated, self.interleaved)
        rotary = batch.rotary[self.params.rotary]
        q_rotated, k_rotated = torch.ops.exkv.rope(q_rotated, k_rotated, *rotary)
        latent = self.kv_a_layernorm(latent)
        if self.latent_scale != 1:
            latent.mul_(self.latent_scale)
        k = torch.cat((k_rotated, latent.unsqueeze(2)), dim=-1)
        plain = self.key_up(plain)
        return torch.cat((q_rotated, plain), dim=-1), k

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, hidden) -> q (B, T, H * qk_head_dim), and the latent vector with the shared key
        (B, T, rank + rope)."""
        if self.sizes.q_lora_rank is None:
            q, latent = side_by_side(x, (self.q_proj, self.kv_a_proj_with_mqa))
            return q, latent
        low, latent = side_by_side(x, (self.q_a_proj, self.kv_a_proj_with_mqa))
        return self.q_b_proj(self.q_a_layernorm(low)), latent

    def values(self, out: Tensor) -> Tensor:
        """Attention's output (B, T, H, D) -> all heads' values (B, T, H * v)."""
        latent = out[..., self.sizes.qk_rope_head_dim :]
        return self.value_up(latent).flatten(2)


@describes(LatentAttention)
def _latent(attention: LatentAttention) -> LatentBlock:
    low = attention.sizes.q_lora_rank is not None
    return LatentBlock(
        query=describe(attention.q_b_proj if low else attention.q_proj),
        latent=describe(attention.kv_a_proj_with_mqa),
        output=describe(attention.o_proj),
        query_down=describe(attention.q_a_proj) if low else None,
        query_norm=describe(attention.q_a_layernorm) if low else None,
        latent_norm=describe(attention.kv_a_layernorm),
        key_up=describe(attention.key_up),
        value_up=describe(attention.value_up),
        rotated=attention.sizes.qk_rope_head_dim,
        interleaved=attention.interleaved,
        params=attention.params,
        query_factors=QUERIES if attention.scaled else None,
    )


@describes(EachHead)
def _head_weights(matrices: EachHead) -> tuple[Weight, ...]:
    whole, rows = weight_of(matrices), matrices.rows
    return tuple(whole.rows(i * rows, (i + 1) * rows) for i in range(matrices.heads))


def score_scale(config: ModelConfig) -> float:
    """1 / sqrt(qk_head_dim), times the square of YaRN's temperature if ``mscale_all_dim`` is given:
    then it isn't part of the rotary factors, which affect only part of a head."""
    assert config.latent is not None
    scale = float(config.latent.qk_head_dim**-0.5)
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return scale
    return scale * scaling.temperature(scaling.mscale_all_dim) ** 2

"""Mamba layers, which have a state in place of keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig
from exkv.checkpoint.mamba import Mamba2Config, MambaConfig
from exkv.ops.activations import ACTIVATIONS

from .descriptions import (
    Norm,
    NotDescribed,
    Outputs,
    Recurrence,
    Selection,
    StateBlock,
    describe,
    describes,
    parameter,
)
from .linear import Linear, PlainModule, weight
from .norm import RMSNorm
from .recurrent import CausalConv, KeepsState


class GatedNorm(PlainModule):
    """An RMS norm over each of several groups of features, after a gate."""

    def __init__(self, size: int, groups: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype)
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate (B, T, size) -> the same shape."""
        return self.normed(F.silu(gate.float()).mul_(x)).to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """x float32 (B, T, size), changed in place."""
        grouped = x.unflatten(-1, (self.groups, -1))
        grouped.mul_(torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps))
        return x.mul_(self.weight)


class Mamba2(PlainModule):
    """A convolution, and heads with one state each (see :func:`exkv.ops.ssd.ssd`), followed by a
    gate and a norm (Dao and Gu, 2024, arXiv 2405.21060).

    Args:
        act: the activation after the convolution; None for the config's.
        out_bias: bias on the output projection; None for the input projection's setting.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        act: str | None = None,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.settings = sizes = config.settings(Mamba2Config)
        self.act = config.hidden_act if act is None else act
        hidden, inner, heads, bias = (
            *(config.hidden_size, sizes.inner, sizes.mamba_n_heads, sizes.mamba_proj_bias),
        )
        channels = inner + 2 * sizes.shared
        self.in_proj = Linear(hidden, inner + channels + heads, bias=bias, dtype=dtype)
        self.conv1d = CausalConv(
            channels, sizes.mamba_d_conv, bias=sizes.mamba_conv_bias, dtype=dtype
        )
        self.A_log = weight(heads, dtype=torch.float32)
        self.D = weight(heads, dtype=torch.float32)
        self.dt_bias = weight(heads, dtype=torch.float32)
        self.norm: nn.Module = self.make_norm(config, dtype)
        bias = bias if out_bias is None else out_bias
        self.out_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def make_norm(self, config: ModelConfig, dtype: torch.dtype) -> nn.Module:
        """The norm applied to the heads' outputs and the gate."""
        sizes = self.settings
        return GatedNorm(sizes.inner, sizes.mamba_n_groups, config.rms_norm_eps, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        sizes = self.settings
        states = cache.states(batch, sizes.state, x.dtype)
        groups = (sizes.mamba_n_groups, sizes.mamba_d_state)
        gate, mixed, steps = self.project(x)
        mixed = ACTIVATIONS[self.act].apply(self.conv1d(mixed, states))
        values, b, c = mixed.split((sizes.inner, sizes.shared, sizes.shared), dim=-1)
        out = states.advance(
            *("recurrent", self._recurred),
            *(values.unflatten(-1, (sizes.mamba_n_heads, sizes.mamba_d_head)), self.steps(steps)),
            *(b.unflatten(-1, groups), c.unflatten(-1, groups)),
        )
        del mixed, values, b, c  # free them before the gate
        return self.out_proj(self.norm(out.flatten(2), gate))

    def _recurred(
        self, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, state: Tensor, new_lens: Tensor | None
    ) -> Tensor:
        return torch.ops.exkv.ssd(x, steps, -self.A_log.exp(), b, c, self.D, state, new_lens)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (B, T, hidden) -> the gate (B, T, inner), the convolution's input (B, T, inner + 2 *
        shared), and the steps before their activation (B, T, heads)."""
        inner, heads = self.settings.inner, self.settings.mamba_n_heads
        both = inner + 2 * self.settings.shared
        return self.in_proj(x).split((inner, both, heads), dim=-1)

    def steps(self, x: Tensor) -> Tensor:
        """Step sizes, float32 (B, T, heads)."""
        low, high = self.settings.step_limits
        return F.softplus(x.float() + self.dt_bias).clamp_(low, high)


class Mamba(PlainModule):
    """A convolution, and channels with one state each (see
    :func:`exkv.ops.selective_scan.selective_scan`), followed by a gate (Gu and Dao, 2023, arXiv
    2312.00752); with norms of the steps and of what is written to states and read from them (AI21,
    2024: Jamba)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.settings = sizes = config.settings(MambaConfig)
        self.act = config.hidden_act
        hidden, inner, bias = config.hidden_size, sizes.inner, sizes.mamba_proj_bias
        rank, size, eps = sizes.mamba_dt_rank, sizes.mamba_d_state, config.rms_norm_eps
        self.in_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.conv1d = CausalConv(inner, sizes.mamba_d_conv, bias=sizes.mamba_conv_bias, dtype=dtype)
        self.x_proj = Linear(inner, rank + 2 * size, bias=False, dtype=dtype)
        self.dt_proj = Linear(rank, inner, bias=True, dtype=dtype)
        self.A_log = weight(inner, size, dtype=torch.float32)
        self.D = weight(inner, dtype=torch.float32)
        self.dt_layernorm = RMSNorm(rank, eps, dtype=dtype)
        self.b_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.c_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.out_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        sizes = self.settings
        states = cache.states(batch, sizes.state, x.dtype)
        values, gate = self.in_proj(x).chunk(2, dim=-1)
        values = ACTIVATIONS[self.act].apply(self.conv1d(values, states))
        rank, size = sizes.mamba_dt_rank, sizes.mamba_d_state
        steps, b, c = self.x_proj(values).split((rank, size, size), dim=-1)
        out = states.advance(
            *("recurrent", self._recurred),
            *(values, F.softplus(self.dt_proj(self.dt_layernorm(steps)).float())),
            *(self.b_layernorm(b), self.c_layernorm(c)),
        )
        del values
        return self.out_proj(out.mul_(F.silu(gate)))

    def _recurred(
        self, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, state: Tensor, new_lens: Tensor | None
    ) -> Tensor:
        rates = -self.A_log.exp().t()
        return torch.ops.exkv.selective_scan(x, steps, rates, b, c, self.D, state, new_lens)


@describes(GatedNorm)
def _gated_norm(norm: GatedNorm) -> Norm:
    return Norm(weight=parameter(norm, "weight"), eps=norm.eps, offset=False)


@describes(Mamba2)
def _mamba2(layer: Mamba2) -> StateBlock:
    if type(layer.norm) is not GatedNorm:
        raise NotDescribed(f"Mamba2 with {type(layer.norm).__name__}")
    return ssd_block(layer, describe(layer.norm), "gate_then_norm")


def ssd_block(layer: Mamba2, norm: Norm | None, gating: str) -> StateBlock:
    """Describe Mamba 2 with this norm, see :class:`Recurrence`."""
    if layer.act != "silu":
        raise NotDescribed(f"Mamba2 with {layer.act}")
    sizes = layer.settings
    inner, both, heads = sizes.inner, sizes.inner + 2 * sizes.shared, sizes.mamba_n_heads
    return StateBlock(
        inputs=(describe(layer.in_proj),),
        sources=(-1,),
        mixed=(Outputs(projection=0, size=both, offset=inner),),
        gate=Outputs(projection=0, size=inner),
        convolution=describe(layer.conv1d),
        output=describe(layer.out_proj),
        recurrence=Recurrence(
            rule="ssd",
            groups=sizes.mamba_n_groups,
            step=Outputs(projection=0, size=heads, offset=inner + both),
            beta=None,
            step_bias=parameter(layer, "dt_bias"),
            rates=parameter(layer, "A_log"),
            skip=parameter(layer, "D"),
            norm=norm,
            gating=gating,
            limits=sizes.step_limits,
        ),
    )


@describes(Mamba)
def _mamba(layer: Mamba) -> StateBlock:
    if layer.act != "silu":
        raise NotDescribed(f"Mamba with {layer.act}")
    inner = layer.settings.inner
    return StateBlock(
        inputs=(describe(layer.in_proj),),
        sources=(-1,),
        mixed=(Outputs(projection=0, size=inner),),
        gate=Outputs(projection=0, size=inner, offset=inner),
        convolution=describe(layer.conv1d),
        output=describe(layer.out_proj),
        recurrence=Recurrence(
            rule="scan",
            rates=parameter(layer, "A_log"),
            skip=parameter(layer, "D"),
            norm=None,
            gating="gate",
            selection=Selection(
                low=describe(layer.x_proj),
                norms=(
                    describe(layer.dt_layernorm),
                    describe(layer.b_layernorm),
                    describe(layer.c_layernorm),
                ),
                steps=describe(layer.dt_proj),
            ),
        ),
    )

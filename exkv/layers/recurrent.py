"""Layers with a state in place of keys and values: linear attention by the gated delta rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import LinearAttentionConfig, ModelConfig, StateTensor
from exkv.ops.activations import ACTIVATIONS

from .descriptions import (
    Convolution,
    NotDescribed,
    Outputs,
    Projection,
    Recurrence,
    StateBlock,
    describe,
    describes,
    parameter,
    weight_of,
)
from .linear import Linear, PlainModule, TransposedLinear, weight
from .norm import RMSNorm


class Advances(Protocol):
    """The states of a call's rows: see :class:`exkv.cache.state.States`."""

    def advance(self, name: str, op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run an op of (inputs, state, new_lens) over new tokens (B, T, ...)."""


class KeepsState(Protocol):
    """What a layer with a state needs of a cache layer."""

    def states(self, batch: Batch, tensors: Sequence[StateTensor], dtype: torch.dtype) -> Advances:
        """The states of the call's rows; zeros for rows without tokens."""


class CausalConv(PlainModule):
    """A convolution of each channel over its last tokens; x (B, T, channels) -> the same shape."""

    def __init__(self, channels: int, size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(channels, 1, size, dtype=dtype)
        self.register_parameter("bias", weight(channels, dtype=dtype) if bias else None)

    def forward(self, x: Tensor, states: Advances) -> Tensor:
        """Convolve, updating the state "conv" (B, size - 1, channels) to the last inputs."""
        return states.advance("conv", self._convolved, x)

    def _convolved(self, x: Tensor, state: Tensor, new_lens: Tensor | None) -> Tensor:
        own = self._parameters
        return torch.ops.exkv.causal_conv(x, own["weight"], own["bias"], state, new_lens)


class GatedDelta(PlainModule, ABC):
    """Linear attention by the gated delta rule (see :func:`exkv.ops.recurrent.gated_delta`),
    followed by a norm and a gate. Subclasses have projections as checkpoints do.

    Args:
        eps: of the norm; None for the config's.
        largest_beta: beta is this times a sigmoid.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        eps: float | None = None,
        largest_beta: float = 1.0,
    ) -> None:
        super().__init__()
        settings = config.settings(LinearAttentionConfig)
        self.settings, self.act = settings, config.hidden_act
        self.largest_beta = largest_beta
        channels = 2 * settings.key_size + settings.value_size
        self.make_projections(config.hidden_size, dtype)
        self.make_decay(dtype)
        self.conv1d = CausalConv(channels, settings.linear_conv_kernel_dim, bias=False, dtype=dtype)
        eps = config.rms_norm_eps if eps is None else eps
        self.norm = RMSNorm(settings.linear_value_head_dim, eps, dtype=dtype)
        self.out_proj = Linear(settings.value_size, config.hidden_size, bias=False, dtype=dtype)

    @abstractmethod
    def make_projections(self, hidden: int, dtype: torch.dtype) -> None:
        """Create the parameters that :meth:`project` uses."""

    def make_decay(self, dtype: torch.dtype) -> None:
        """Create the parameters that :meth:`decay` uses."""
        self.A_log = weight(self.settings.linear_num_value_heads, dtype=dtype)
        self.dt_bias = weight(self.settings.linear_num_value_heads, dtype=dtype)

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, T, hidden) -> queries, keys and values side by side (B, T, 2 * H_k * D_k + H_v *
        D_v), the gate (B, T, H_v * D_v), beta before its sigmoid (B, T, H_v), and the inputs of
        :meth:`decay`."""

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        settings = self.settings
        states = cache.states(batch, settings.state, x.dtype)
        mixed, gate, beta, step = self.project(x)
        mixed = ACTIVATIONS[self.act].apply(self.conv1d(mixed, states))
        q, k, v = mixed.split((settings.key_size, settings.key_size, settings.value_size), dim=-1)
        keys = (settings.linear_num_key_heads, settings.linear_key_head_dim)
        values = (settings.linear_num_value_heads, settings.linear_value_head_dim)
        out = states.advance(
            *("recurrent", torch.ops.exkv.gated_delta),
            *(q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)),
            *(self.decay(step), beta.sigmoid().float().mul_(self.largest_beta)),
        )
        del mixed, q, k, v  # free them before the gate
        normed = self.norm(out).float().mul_(self.gated(gate.unflatten(-1, values).float()))
        return self.out_proj(normed.to(x.dtype).flatten(2))

    def gated(self, gate: Tensor) -> Tensor:
        """The factor of the outputs, from the gate in float32."""
        return F.silu(gate)

    def decay(self, step: Tensor) -> Tensor:
        """The logarithm of the share of the state kept at each token, float32 (B, T, H_v, 1 or
        D_k)."""
        steps = F.softplus(step.float() + self.dt_bias)
        return steps.mul_(-self.A_log.float().exp()).unsqueeze(-1)


class FusedGatedDelta(GatedDelta):
    """With queries, keys, values and gates in one matrix, and beta and the decay in another,
    interleaved by head (Qwen3-Next)."""

    def make_projections(self, hidden: int, dtype: torch.dtype) -> None:
        both = 2 * self.settings.key_size + 2 * self.settings.value_size
        self.in_proj_qkvz = Linear(hidden, both, bias=False, dtype=dtype)
        heads = 2 * self.settings.linear_num_value_heads
        self.in_proj_ba = Linear(hidden, heads, bias=False, dtype=dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, size = self.settings.linear_num_key_heads, self.settings.linear_key_head_dim
        values = self.settings.value_size // heads
        fused = self.in_proj_qkvz(x).unflatten(-1, (heads, -1))
        q, k, v, gate = (
            part.flatten(2) for part in fused.split((size, size, values, values), dim=-1)
        )
        beta, step = (
            part.flatten(2) for part in self.in_proj_ba(x).unflatten(-1, (heads, -1)).chunk(2, -1)
        )
        return torch.cat((q, k, v), dim=-1), gate, beta, step


class SplitGatedDelta(GatedDelta):
    """With one matrix for queries, keys and values, and one each for the rest (Qwen 3.5).

    Args:
        transposed: whether the output matrix's columns are ordered by value head within a key head
            first, and by key head second, as in llama.cpp's files.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, transposed: bool = False
    ) -> None:
        super().__init__(config, dtype)
        if transposed:
            groups = self.settings.linear_num_key_heads
            self.out_proj = TransposedLinear(
                self.settings.value_size,
                config.hidden_size,
                groups=groups,
                heads=self.settings.linear_num_value_heads // groups,
                dtype=dtype,
            )

    def make_projections(self, hidden: int, dtype: torch.dtype) -> None:
        sizes = self.settings
        self.in_proj_qkv = Linear(
            hidden, 2 * sizes.key_size + sizes.value_size, bias=False, dtype=dtype
        )
        self.in_proj_z = Linear(hidden, sizes.value_size, bias=False, dtype=dtype)
        self.in_proj_b = Linear(hidden, sizes.linear_num_value_heads, bias=False, dtype=dtype)
        self.in_proj_a = Linear(hidden, sizes.linear_num_value_heads, bias=False, dtype=dtype)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class ShortConv(PlainModule):
    """A convolution over the last few tokens, between a gate on its input and one on its output
    (Liquid AI, 2025: LFM2)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, size: int, *, bias: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.kept = short_conv_state(config, size)
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias, dtype=dtype)
        self.conv = CausalConv(hidden, size, bias=bias, dtype=dtype)
        self.out_proj = Linear(hidden, hidden, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        states = cache.states(batch, self.kept, x.dtype)
        before, behind, inputs = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(self.conv(before * inputs, states).mul_(behind))


def short_conv_state(config: ModelConfig, size: int) -> tuple[StateTensor, ...]:
    """What a :class:`ShortConv` over ``size`` tokens keeps: its last inputs."""
    return (StateTensor("conv", (size - 1, config.hidden_size)),)


# Descriptions ---------------------------------------------------------------------------------


@describes(CausalConv)
def _convolution(conv: CausalConv) -> Convolution:
    bias = None if conv._parameters["bias"] is None else parameter(conv, "bias")
    return Convolution(weight=parameter(conv, "weight"), bias=bias)


@describes(TransposedLinear)
def _transposed(linear: TransposedLinear) -> Projection:
    """The projection for inputs in the order of the matrix's columns."""
    return Projection(weight=weight_of(linear), bias=None)


@describes(ShortConv)
def _short_conv(layer: ShortConv) -> StateBlock:
    hidden = layer.out_proj.size[0]
    before, behind, inputs = (
        Outputs(projection=0, size=hidden, offset=at * hidden) for at in range(3)
    )
    return StateBlock(
        inputs=(describe(layer.in_proj),),
        sources=(-1,),
        mixed=(inputs,),
        times=before,
        gate=behind,
        convolution=describe(layer.conv),
        output=describe(layer.out_proj),
    )


def delta_block(
    delta: GatedDelta,
    inputs: Sequence[nn.Module],
    mixed: Sequence[Outputs],
    gate: Outputs,
    beta: Outputs,
    step: Outputs,
    *,
    sources: Mapping[int, int] | None = None,
    sigmoid: bool = False,
) -> StateBlock:
    """Describe linear attention from its projections and the meaning of their outputs; ``sources``:
    projections of another one's outputs -> that one."""
    if delta.act != "silu":
        raise NotDescribed(f"{type(delta).__name__} with {delta.act}")
    order = delta.out_proj.order[1] if isinstance(delta.out_proj, TransposedLinear) else 1
    return StateBlock(
        inputs=tuple(map(describe, inputs)),
        sources=tuple((sources or {}).get(index, -1) for index in range(len(inputs))),
        mixed=tuple(mixed),
        gate=gate,
        convolution=describe(delta.conv1d),
        output=describe(delta.out_proj),
        recurrence=Recurrence(
            rule="delta",
            groups=delta.settings.linear_num_key_heads,
            step=step,
            beta=beta,
            step_bias=parameter(delta, "dt_bias"),
            rates=parameter(delta, "A_log"),
            skip=None,
            norm=describe(delta.norm),
            gating="norm_then_gate",
            sigmoid=sigmoid,
            order=order,
            largest_beta=delta.largest_beta,
        ),
    )


@describes(SplitGatedDelta)
def _split(delta: SplitGatedDelta) -> StateBlock:
    inputs = (delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a)
    mixed, *others = (Outputs(projection=i, size=each.size[0]) for i, each in enumerate(inputs))
    return delta_block(delta, inputs, (mixed,), *others)


@describes(FusedGatedDelta)
def _fused(delta: FusedGatedDelta) -> StateBlock:
    sizes, heads = delta.settings, delta.settings.linear_num_key_heads
    key, values = sizes.linear_key_head_dim, sizes.value_size // heads
    each = sizes.linear_num_value_heads // heads
    both, pairs = 2 * (key + values), 2 * each

    def part(offset: int, size: int) -> Outputs:
        return Outputs(projection=0, size=size, offset=offset, step=both, count=heads)

    mixed = part(0, key), part(key, key), part(2 * key, values)
    beta, step = (
        Outputs(projection=1, size=each, offset=at * each, step=pairs, count=heads)
        for at in range(2)
    )
    gate = part(2 * key + values, values)
    return delta_block(delta, (delta.in_proj_qkvz, delta.in_proj_ba), mixed, gate, beta, step)

"""MLPs: gated (Shazeer, 2020: SwiGLU and kin), plain, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from exkv.checkpoint import ClampedExpertsConfig, ExpertsConfig, ModelConfig
from exkv.ops.activations import ACTIVATIONS, clamped_swiglu
from exkv.ops.experts import Routing, are_chosen_on_device, sum_of_experts
from exkv.weights.format import mixed_experts

from .descriptions import (
    ExpertsBlock,
    GatedBlock,
    NotDescribed,
    PlainBlock,
    Projection,
    describe,
    describes,
    parameter,
    try_describe,
)
from .linear import ExactLinear, Linear, PlainModule, parameters_of, weight
from .low_rank import side_by_side
from .routing import Router


class MLP(PlainModule):
    """``forward(x)``, x (B, T, hidden) -> (B, T, hidden)."""


class GatedMLP(MLP):
    """down(act(gate(x)) * up(x)); x (..., hidden) -> (..., hidden).

    Args:
        inner: intermediate size; None for the config's.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
        ACTIVATIONS[self.act].gate(gate, up)
        del up  # free it before the next projection
        return self.down_proj(gate)


class FusedGatedMLP(MLP):
    """A gated MLP with gate and up as the two halves of one matrix, as in Phi-3's checkpoints."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = gate.contiguous()
        ACTIVATIONS[self.act].gate(gate, up)
        return self.down_proj(gate)


class PlainMLP(MLP):
    """down(act(up(x))); x (B, T, hidden) -> (B, T, hidden).

    Args:
        inner: intermediate size; None for the config's.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        hidden, bias = config.hidden_size, config.mlp_bias
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.act].apply(self.up_proj(x)))


class Expert(nn.Module):
    """One expert's weights, under Mixtral's names: w1 is the gate, w3 up, w2 down. ``Experts`` runs
    them."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.w1 = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.w2 = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.w3 = Linear(hidden, inner, bias=bias, dtype=dtype)


class Experts(MLP):
    """A mixture of experts: each token is routed to a few of them, and their outputs are summed,
    weighted by the router; x (B, T, hidden) -> (B, T, hidden).

    Args:
        bias: whether router and experts have biases.
        sigmoid: see :class:`Router`.
        corrected: whether there is a correction of the scores, by which experts are chosen.
        exact: whether the router computes in float32, whatever the model's dtype is.
        tolerance: see :class:`Router`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        sigmoid: bool = False,
        corrected: bool = False,
        exact: bool = False,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        settings, hidden = config.settings(ExpertsConfig), config.hidden_size
        count, self.act = settings.num_local_experts, config.hidden_act
        self.router = Router.of(settings, sigmoid=sigmoid, tolerance=tolerance)
        inner = settings.moe_intermediate_size or config.intermediate_size
        made = ExactLinear if exact else Linear
        self.gate = made(hidden, count, bias=bias, dtype=dtype)
        self.correction = weight(count, dtype=torch.float32) if corrected else None
        self.experts = nn.ModuleList(Expert(hidden, inner, dtype, bias=bias) for _ in range(count))

    @property
    def chooses_on_device(self) -> bool:
        """Whether experts of up to ``MOST_CHOOSING`` tokens are selected without the host."""
        linears = [part for expert in self.experts for part in expert.children()]
        if not (self.bare and self.gate.bare and all(linear.bare for linear in linears)):
            return False
        weights = [linear._parameters.get("weight") for linear in linears]
        plain = [each for each in weights if type(each) is nn.Parameter]
        return len(plain) == len(linears) and are_chosen_on_device(plain[0][:1], plain)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (B * T, hidden)
        return self.run(tokens, self.route(tokens)).view_as(x)

    def route(self, x: Tensor) -> Routing:
        """Choose the experts of each token of x (N, hidden)."""
        return self.router.route(self.gate(x), self.correction)

    def run(self, x: Tensor, routing: Routing) -> Tensor:
        """x (N, hidden) -> (N, hidden)."""
        return run_experts(x, routing, self.matrices(), self.act)

    def matrices(self) -> list[tuple[Linear, Linear, Linear]]:
        """Gate, up and down of each expert."""
        experts = cast(Iterable[Expert], self.experts)
        return [(expert.w1, expert.w3, expert.w2) for expert in experts]


class SharedExperts(Experts):
    """Experts plus one shared by all tokens.

    Args:
        gated: whether its output is multiplied by the sigmoid of a gate of its own (Qwen, 2024:
            Qwen1.5-MoE).
        options: see :class:`Experts`.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, gated: bool = False, **options: bool
    ) -> None:
        super().__init__(config, dtype, **options)
        inner = config.settings(ExpertsConfig).shared_inner
        self.shared_expert = GatedMLP(config, dtype, inner)
        self.shared_expert_gate = (
            Linear(config.hidden_size, 1, bias=False, dtype=dtype) if gated else None
        )

    @property
    def chooses_on_device(self) -> bool:
        beside = filter(None, (self.shared_expert, self.shared_expert_gate))
        return super().chooses_on_device and None not in map(try_describe, beside)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(x)
            torch.ops.exkv.sigmoid_(gate)
            shared.mul_(gate)
        return shared.add_(super().forward(x))


class ClampedExperts(Experts):
    """Experts with biases and a clamped gate, see :func:`clamped_swiglu` (gpt-oss)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, bias=True)
        settings = config.settings(ClampedExpertsConfig)
        self.alpha, self.limit = settings.swiglu_alpha, settings.swiglu_limit

    def run(self, x: Tensor, routing: Routing) -> Tensor:
        matrices = self.matrices()

        def run(expert: int, inputs: Tensor) -> Tensor:
            gate, up, down = matrices[expert]
            return down(clamped_swiglu(gate(inputs), up(inputs), self.alpha, self.limit))

        return sum_of_experts(x, routing, len(matrices), run)


def routed_experts(config: ModelConfig, dtype: torch.dtype, **options: bool) -> Experts:
    """Experts with the shared one that the config has, if any."""
    shared = config.settings(ExpertsConfig).shared_inner
    return (SharedExperts if shared else Experts)(config, dtype, **options)


def mixture_or_mlp(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: int,
    experts: Callable[[ModelConfig, torch.dtype], MLP],
) -> MLP:
    """The experts, or a gated MLP in a dense layer."""
    dense = config.settings(ExpertsConfig).is_dense(layer)
    return GatedMLP(config, dtype) if dense else experts(config, dtype)


def run_experts(
    x: Tensor, routing: Routing, matrices: Sequence[Sequence[Linear]], act: str
) -> Tensor:
    """Run the op ``experts``, or module by module where one has hooks; ``matrices`` are gate, up
    and down of each expert."""
    flat = [part for expert in matrices for part in expert]
    if any(part._forward_pre_hooks or part._forward_hooks for part in flat):
        return _module_by_module(x, routing, matrices, act)
    format, inner = flat[0].format, flat[0].size[0]
    if any(part.format is not format for part in flat):
        pairs = [(part.format, parameters_of(part)) for part in flat]
        return mixed_experts(x, routing, pairs, inner, act)
    tensors = [[parameters_of(part) for part in expert] for expert in matrices]
    return format.experts(x, routing, tensors, inner, act)


def _module_by_module(
    x: Tensor, routing: Routing, matrices: Sequence[Sequence[Linear]], act: str
) -> Tensor:
    def run(expert: int, inputs: Tensor) -> Tensor:
        gate, up, down = matrices[expert]
        inner = gate(inputs)
        ACTIVATIONS[act].gate(inner, up(inputs))
        return down(inner)

    return sum_of_experts(x, routing, len(matrices), run)


@describes(GatedMLP)
def _separate(mlp: GatedMLP) -> GatedBlock:
    return _gated(map(describe, (mlp.gate_proj, mlp.up_proj, mlp.down_proj)), mlp.act)


@describes(Experts)
def _experts(mlp: Experts) -> ExpertsBlock:
    if mlp.router.tolerance is not None:
        raise NotDescribed("experts by SparseMixer")
    return ExpertsBlock(
        router=mlp.router.numbers,
        gate=describe(mlp.gate),
        correction=None if mlp.correction is None else parameter(mlp, "correction"),
        experts=tuple(_gated(map(describe, each), mlp.act) for each in mlp.matrices()),
    )


def _gated(parts: Iterable[Projection], act: str) -> GatedBlock:
    gate, up, down = parts
    return GatedBlock(gate=gate, up=up, down=down, act=act)


@describes(SharedExperts)
def _shared(mlp: SharedExperts) -> ExpertsBlock:
    gate = mlp.shared_expert_gate
    return replace(
        _experts(mlp),
        shared=describe(mlp.shared_expert),
        shared_gate=None if gate is None else describe(gate),
    )


@describes(FusedGatedMLP)
def _fused(mlp: FusedGatedMLP) -> GatedBlock:
    both = describe(mlp.gate_up_proj)
    gate, up = both.split(mlp.down_proj.size[1], mlp.down_proj.size[1])
    return GatedBlock(gate=gate, up=up, down=describe(mlp.down_proj), act=mlp.act)


@describes(PlainMLP)
def _plain(mlp: PlainMLP) -> PlainBlock:
    return PlainBlock(up=describe(mlp.up_proj), down=describe(mlp.down_proj), act=mlp.act)

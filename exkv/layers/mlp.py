"""MLPs: the gated one (Shazeer, 2020: SwiGLU and kin), and a mixture of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from exkv.checkpoint import ExpertsConfig, ModelConfig
from exkv.ops.activations import ACTIVATIONS
from exkv.ops.experts import Routing
from exkv.weights.format import mixed_experts

from .descriptions import GatedBlock, describe, describes
from .linear import Linear, PlainModule, parameters_of, side_by_side


class MLP(PlainModule):
    """``forward(x)``, x (B, T, hidden) -> (B, T, hidden)."""


class GatedMLP(MLP):
    """down(act(gate(x)) * up(x)); x (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
        ACTIVATIONS[self.act].gate(gate, up)
        del up  # not to be in the next projection's way
        return self.down_proj(gate)


class FusedGatedMLP(MLP):
    """The same with gate and up as the two halves of one matrix, as Phi-3's checkpoints have it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = gate.contiguous()
        ACTIVATIONS[self.act].gate(gate, up)
        return self.down_proj(gate)


class Expert(nn.Module):
    """One MLP of a mixture, under the names that Mixtral's checkpoints give its weights:
    w1 is the gate, w3 up, w2 down. It holds weights; ``Experts`` runs them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.w1 = Linear(hidden, inner, bias=False, dtype=dtype)
        self.w2 = Linear(inner, hidden, bias=False, dtype=dtype)
        self.w3 = Linear(hidden, inner, bias=False, dtype=dtype)


class Experts(MLP):
    """A mixture of experts: each token passes the few that the gate rates highest, and their
    answers are summed by these ratings' softmax; x (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        settings = config.settings(ExpertsConfig)
        count, self.act = settings.num_local_experts, config.hidden_act
        self.taken = settings.num_experts_per_tok
        self.gate = Linear(config.hidden_size, count, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(config, dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)  # (B * T, hidden)
        ratings = self.gate(tokens).float().softmax(-1)
        weights, chosen = ratings.topk(self.taken, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        experts = cast(Iterable[Expert], self.experts)
        matrices = [(expert.w1, expert.w3, expert.w2) for expert in experts]
        routing = Routing(chosen=chosen, weights=weights)
        return run_experts(tokens, routing, matrices, self.act).view_as(x)


def run_experts(
    x: torch.Tensor, routing: Routing, matrices: Sequence[Sequence[Linear]], act: str
) -> torch.Tensor:
    """The op ``experts``; ``matrices`` are gate, up and down of each expert."""
    flat = [part for expert in matrices for part in expert]
    format = flat[0].format
    if any(part.format is not format for part in flat):
        pairs = [(part.format, parameters_of(part)) for part in flat]
        return mixed_experts(x, routing, pairs, act)
    tensors = [[parameters_of(part) for part in expert] for expert in matrices]
    return format.experts(x, routing, tensors, act)


@describes(GatedMLP)
def _separate(mlp: GatedMLP) -> GatedBlock:
    gate, up, down = map(describe, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return GatedBlock(gate=gate, up=up, down=down, act=mlp.act)


@describes(FusedGatedMLP)
def _fused(mlp: FusedGatedMLP) -> GatedBlock:
    both = describe(mlp.gate_up_proj)
    gate, up = both.split(mlp.down_proj.size[1], mlp.down_proj.size[1])
    return GatedBlock(gate=gate, up=up, down=describe(mlp.down_proj), act=mlp.act)

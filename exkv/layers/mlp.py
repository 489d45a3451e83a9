"""Feed-forward networks: the gated one (Shazeer, 2020: SwiGLU and kin), and a mixture of them."""

from __future__ import annotations

import torch
from torch import nn

from exkv.checkpoint import ModelConfig
from exkv.ops.gate import GATES
from exkv.ops.layer import NETWORK_ACTS

from .linear import Linear, PlainModule, matrices, side_by_side
from .norm import RMSNorm

#: Tokens of a call, in all rows, for which a call from Python is worth saving.
FEW_TOKENS = 16


def are_few(x: torch.Tensor) -> bool:
    """Whether x (B, T, hidden) is so short."""
    return x.shape[0] * x.shape[1] <= FEW_TOKENS


class Network(PlainModule):
    """A feed-forward network, ``forward(x)``, x (B, T, hidden) -> (B, T, hidden)."""

    #: Whether :class:`GatedMLP`'s ``after`` runs it.
    plain = False


class GatedMLP(Network):
    """down(act(gate(x)) * up(x)); x (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.act = config.hidden_act
        self.multiply = GATES[self.act]
        self.plain = self.act in NETWORK_ACTS

    def after(
        self, x: torch.Tensor, read: torch.Tensor, projection: Linear, norm: RMSNorm
    ) -> torch.Tensor:
        """A layer's second half in one call, for few tokens, since it holds more at once than its
        parts: ``projection`` of what attention ``read``, (B, T, H * D), is added to x, and to that
        the network of its ``norm``. For ``plain`` ones."""
        weights, biases = matrices((self.gate_proj, self.up_proj, self.down_proj))
        return torch.ops.exkv.add_network(
            x, read, *projection.matrix, *norm.factor, weights, biases, self.act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
        self.multiply(gate, up)
        del up  # not to be in the next map's way
        return self.down_proj(gate)


class FusedGatedMLP(Network):
    """The same with gate and up as the two halves of one matrix, as Phi-3's checkpoints have it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.multiply = GATES[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gate = gate.contiguous()
        self.multiply(gate, up)
        return self.down_proj(gate)


class Expert(nn.Module):
    """One network of a mixture, under the names that Mixtral's checkpoints give its weights:
    w1 is the gate, w3 up, w2 down. It holds weights; ``Experts`` runs them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.w1 = Linear(hidden, inner, bias=False, dtype=dtype)
        self.w2 = Linear(inner, hidden, bias=False, dtype=dtype)
        self.w3 = Linear(hidden, inner, bias=False, dtype=dtype)


class Experts(Network):
    """A mixture of experts: each token passes the few that the gate rates highest, and their
    answers are summed by these ratings' softmax; x (B, T, hidden) -> (B, T, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        count, self.act = config.specific.num_local_experts, config.hidden_act
        self.taken = config.specific.num_experts_per_tok
        self.gate = Linear(config.hidden_size, count, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(config, dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)  # (B * T, hidden)
        ratings = self.gate(tokens).float().softmax(-1)
        weights, chosen = ratings.topk(self.taken, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.ops.exkv.experts(
            tokens,
            chosen,
            weights,
            [expert.w1.weight for expert in self.experts],
            [expert.w3.weight for expert in self.experts],
            [expert.w2.weight for expert in self.experts],
            self.act,
        )
        return out.view_as(x)

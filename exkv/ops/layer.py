"""What a decoder layer does before and after its cache, each in one op.

They are made of the other ops, in their order and with their results to the bit. A call from
Python costs as much as a small model's norm: the CPU kernels make all of them in one. Other devices
run the references here, whose parts find kernels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gate import GATES
from .registry import define_op

#: The activations that :func:`add_network` knows.
NETWORK_ACTS = ("silu", "gelu_pytorch_tanh")


def _heads_fake(x, norm, eps, weights, biases, cos, sin, head_dim):
    heads = (weight.shape[0] // head_dim for weight in weights)
    return tuple(x.new_empty((*x.shape[:2], count, head_dim)) for count in heads)


@define_op(
    "attention_heads(Tensor x, Tensor norm, float eps, Tensor[] weights, Tensor[] biases, "
    "Tensor cos, Tensor sin, int head_dim) -> (Tensor, Tensor, Tensor)",
    fake=_heads_fake,
    in_parts=True,
)
def attention_heads(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (B, T, hidden) -> q (B, T, H, D), k and v (B, T, H_kv, D): ``rms_norm``, three linear maps
    of it, and rotary positions for queries and keys.

    Args:
        norm: (hidden,), the norm's weight.
        weights: of queries, keys and values; biases: the same, or none (``[]``).
        cos, sin: (B, T, R), as ``rope`` takes them.
    """
    heads = (*x.shape[:2], -1, head_dim)
    q, k, v = torch.ops.exkv.linears(torch.ops.exkv.rms_norm(x, norm, eps), weights, biases)
    q, k = torch.ops.exkv.rope(q.view(heads), k.view(heads), cos, sin)
    return q, k, v.view(heads)


def _network_fake(x, read, out, out_bias, norm, eps, weights, biases, act):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_op(
    "add_network(Tensor x, Tensor read, Tensor out, Tensor? out_bias, Tensor norm, float eps, "
    "Tensor[] weights, Tensor[] biases, str act) -> Tensor",
    fake=_network_fake,
    in_parts=True,
)
def add_network(
    x: torch.Tensor,
    read: torch.Tensor,
    out: torch.Tensor,
    out_bias: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    act: str,
) -> torch.Tensor:
    """x (B, T, hidden), read (B, T, H * D) -> (B, T, hidden): the output projection of what
    attention has read is added to x, and to this a gated network of its ``rms_norm``.

    Args:
        out, out_bias: the output projection's.
        norm: (hidden,), the norm's weight.
        weights: of gate, up and down; biases: the same, or none (``[]``).
        act: the activation by config.json's name, one of :data:`NETWORK_ACTS`.
    """
    gate_up, down = weights[:2], weights[2]
    attended = torch.ops.exkv.linear(read, out, out_bias)
    x, normed = torch.ops.exkv.add_rms_norm(x, attended, norm, eps)
    del attended  # not to be in the network's way
    gate, up = torch.ops.exkv.linears(normed, gate_up, biases[:2])
    GATES[act](gate, up)
    del up, normed
    return x.add_(torch.ops.exkv.linear(gate, down, biases[2] if biases else None))

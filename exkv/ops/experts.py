"""The feed-forward networks of a mixture of experts (Shazeer et al., 2017): each token passes the
few that its router chose, and their answers are summed by the router's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .registry import define_op

ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _fake(x, chosen, weights, gate, up, down, act, counts=None):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _worst(x, chosen, weights, gate, up, down, act, counts=None):
    """All tokens choose the same experts: no single expert can have more tokens than that."""
    tokens, taken = chosen.shape
    counts = [tokens] * taken + [0] * (len(gate) - taken)
    return x, chosen, weights, gate, up, down, act, counts


@define_op(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "str act, int[]? counts=None) -> Tensor",
    fake=_fake,
    shortened=_worst,
)
def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate: Sequence[torch.Tensor],
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    act: str,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """x (N, hidden) -> (N, hidden), the weighted sum of ``down(act(gate(x)) * up(x))``.

    Experts that no token chose are not run. Sums run over experts in ascending order and are
    rounded to x's dtype after each, which is transformers' order.

    Args:
        chosen: int64 (N, K), the experts of each token, no expert twice in a row.
        weights: float32 (N, K).
        gate, up: (inner, hidden) of each expert; down: (hidden, inner).
        act: the activation by config.json's name.
        counts: tokens of each expert, where they are known; None to count them, for which the
            host waits for the device.
    """
    taken = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # (N * K), sorted by expert
    if counts is None:
        counts = torch.bincount(chosen.flatten(), minlength=len(gate)).tolist()
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for expert, pairs in enumerate(order.split(list(counts))):
        if len(pairs) == 0:
            continue
        rows = pairs.div(taken, rounding_mode="floor")
        inputs = x[rows]
        inner = ACTIVATIONS[act](F.linear(inputs, gate[expert]))
        inner = inner.mul_(F.linear(inputs, up[expert]))
        share = weights.flatten()[pairs].unsqueeze(-1)
        out.index_add_(0, rows, (F.linear(inner, down[expert]) * share).to(x.dtype))
    return out

"""The MLPs of a mixture of experts (Shazeer et al., 2017): each token passes the few that its
router chose, and their outputs are summed by the router's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .activations import ACTIVATIONS
from .registry import define_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a router chose for N tokens.

    Attributes:
        chosen: int64 (N, K), the experts of each token, none twice for a token.
        weights: float32 (N, K), by which their outputs are summed.
    """

    chosen: torch.Tensor
    weights: torch.Tensor


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _uneven(tally: torch.Tensor, tokens: int, taken: int) -> list[int]:
    """All tokens choose the same experts: no single expert can have more tokens than that."""
    return [tokens] * taken + [0] * (len(tally) - taken)


@define_op("read_tally(Tensor tally, int tokens, int taken) -> int[]", fake=_uneven)
def read_tally(tally: torch.Tensor, tokens: int, taken: int) -> list[int]:
    """How many of the tokens each expert has, for which the host waits for the device: once a
    layer. The most uneven numbers stand in for those of a tensor that has none.

    Args:
        tally: int64 (experts,), on any device.
        tokens, taken: so many, and so many experts each; what the numbers sum to.

    Raises:
        ValueError: the numbers are no routing's.
    """
    counts = tally.tolist()
    if sum(counts) == tokens * taken and min(counts) >= 0 and max(counts) <= tokens:
        return counts
    if tally.device.type != "cpu":  # a simulated device that runs dry holds no contents
        return _uneven(tally, tokens, taken)
    raise ValueError(
        f"experts: chosen must name experts 0 to {len(counts) - 1}, none twice for a token"
    )


@define_op(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "str act) -> Tensor",
    fake=_fake,
)
def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate: Sequence[torch.Tensor],
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    act: str,
) -> torch.Tensor:
    """x (N, hidden) -> (N, hidden), the weighted sum of ``down(act(gate(x)) * up(x))``.

    Experts that no token chose are not run. Sums run over experts in ascending order and are
    rounded to x's dtype after each, which is transformers' order.

    Args:
        chosen: int64 (N, K), the experts of each token, no expert twice in a row.
        weights: float32 (N, K).
        gate, up: (inner, hidden) of each expert; down: (hidden, inner).
        act: the activation by config.json's name.

    Raises:
        ValueError: arguments that don't fit together, or an expert that isn't there.
    """
    if not len(gate) == len(up) == len(down) > 0:
        raise ValueError(
            f"experts: gate, up and down are {len(gate)}, {len(up)} and {len(down)} matrices; each "
            "expert has one of each"
        )
    if act not in ACTIVATIONS:
        raise ValueError(f"experts: act is {act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    activate = ACTIVATIONS[act].apply

    def run(expert: int, inputs: torch.Tensor) -> torch.Tensor:
        inner = activate(_times(inputs, gate[expert])).mul_(_times(inputs, up[expert]))
        return _times(inner, down[expert])

    return sum_of_experts(x, Routing(chosen=chosen, weights=weights), len(gate), run)


def _times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.exkv.linear(x, weight, None)


def sum_of_experts(
    x: torch.Tensor,
    routing: Routing,
    experts: int,
    run: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum that :func:`experts` describes, of so many experts.

    Args:
        run: from an expert's index and its inputs (n, hidden) to its outputs, of this shape.
    """
    _check_routing(x, routing)
    chosen, (tokens, taken) = routing.chosen, routing.chosen.shape
    tally = (chosen.unsqueeze(-1) == torch.arange(experts, device=x.device)).sum((0, 1))
    counts = torch.ops.exkv.read_tally(tally, tokens, taken)
    order = chosen.flatten().argsort(stable=True)  # (N * K), sorted by expert
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            _add_output(out, x, routing.weights, pairs, partial(run, expert))
    return out


def _check_routing(x: torch.Tensor, routing: Routing) -> None:
    chosen, weights = routing.chosen, routing.weights
    if x.dim() != 2 or chosen.dim() != 2 or len(chosen) != len(x) or chosen.shape != weights.shape:
        raise ValueError(
            "experts: x must be (N, hidden), and chosen and weights (N, K); they are "
            f"{tuple(x.shape)}, {tuple(chosen.shape)} and {tuple(weights.shape)}"
        )
    if chosen.dtype != torch.int64 or not weights.dtype.is_floating_point:
        raise ValueError(
            f"experts: chosen must be int64 and weights floats; they are {chosen.dtype} and "
            f"{weights.dtype}"
        )


def _add_output(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    pairs: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Run one expert on its share of the (token, choice) pairs; a function of its own, so that
    nothing is left of one expert when the next one runs."""
    rows = pairs.div(weights.shape[1], rounding_mode="floor")
    share = weights.flatten()[pairs].unsqueeze(-1)
    out.index_add_(0, rows, (run(x[rows]) * share).to(x.dtype))

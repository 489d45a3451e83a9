"""MLPs of a mixture of experts (Shazeer et al., 2017): each token is routed to a few experts, and
their outputs are summed by the router's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import ACTIVATIONS
from .attention import has_tensor_cores
from .registry import computes_on, define_op, has_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A router's choice for N tokens.

    Attributes:
        chosen: int64 (N, K), distinct experts of each token.
        weights: float32 (N, K), weights of their outputs.
        counts: how many tokens chose each expert, if the host knows, so that it needn't wait for
            the device.
    """

    chosen: Tensor
    weights: Tensor
    counts: Sequence[int] | None = None


def _uneven(tally: Tensor, tokens: int, taken: int) -> list[int]:
    """The most uneven tally: all tokens choose the same experts."""
    return [tokens] * taken + [0] * (len(tally) - taken)


@define_op("read_tally(Tensor tally, int tokens, int taken) -> int[]", fake=_uneven)
def read_tally(tally: Tensor, tokens: int, taken: int) -> list[int]:
    """Tokens of each expert; the host waits for the device here, once a layer. A fake tensor yields
    the most uneven tally.

    Args:
        tally: int64 (experts,), on any device.
        tokens, taken: number of tokens, and of experts for each; the tally sums to their product.

    Raises:
        ValueError: the tally can't come from a routing.
    """
    counts = tally.tolist()
    if sum(counts) == tokens * taken and min(counts) >= 0 and max(counts) <= tokens:
        return counts
    if tally.device.type != "cpu":  # a simulated device in dry mode has no contents
        return _uneven(tally, tokens, taken)
    raise ValueError(
        f"experts: chosen must name experts 0 to {len(counts) - 1}, none twice for a token"
    )


@define_op(
    "expert_products(Tensor x, Tensor chosen, Tensor[] weights, Tensor[] biases) -> Tensor",
    fake=lambda x, chosen, weights, biases: x.new_empty((*chosen.shape, len(weights[0]))),
    kernels_fall_back=True,
)
def expert_products(
    x: Tensor, chosen: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """x (N, in), or (N, K, in) with one for each choice -> (N, K, out), x times its chosen experts.

    Kernels read the choices on the device, without synchronization; this reference reads them on
    the host.

    Args:
        chosen: int64 (N, K).
        weights: (out, in) of each expert.
        biases: (out,) of each, or none at all.

    Raises:
        ValueError: a choice that is not an expert.
    """
    if not weights or len(biases) not in (0, len(weights)):
        raise ValueError(f"expert_products: {len(weights)} experts and {len(biases)} biases")
    outs = x.new_empty((*chosen.shape, len(weights[0])))
    for expert, pairs, rows in by_choice("expert_products", x, chosen, len(weights)):
        outs[pairs] = F.linear(rows, weights[expert], biases[expert] if biases else None)
    return outs


def by_choice(
    op: str, x: Tensor, chosen: Tensor, experts: int
) -> Iterator[tuple[int, tuple[Tensor, ...], Tensor]]:
    """Yield each expert that is among ``chosen`` (N, K), indices of its pairs of a token and a
    choice, and their rows of x (N, in) or (N, K, in).

    Raises:
        ValueError: a choice that is not an expert, or x and choices that don't fit together.
    """
    pairs_of_x = x.shape[:-1] if x.dim() == 3 else (*x.shape[:1], *chosen.shape[1:])
    if chosen.dim() != 2 or chosen.dtype != torch.int64 or pairs_of_x != chosen.shape:
        raise ValueError(
            f"{op}: x must be (N, in) or (N, K, in), and chosen int64 (N, K); they are "
            f"{tuple(x.shape)} and {chosen.dtype} {tuple(chosen.shape)}"
        )
    ids = chosen.unique().tolist()
    if ids and not 0 <= ids[0] <= ids[-1] < experts:
        raise ValueError(f"{op}: chosen holds {ids[0]} to {ids[-1]}, of {experts} experts")
    for expert in ids:
        pairs = torch.where(chosen == expert)
        yield expert, pairs, x[pairs if x.dim() == 3 else pairs[0]]


#: Most tokens whose experts are chosen on the device, and most experts of one kernel call.
MOST_CHOOSING, MOST_EXPERTS = 16, 512


def chooses_on(device: torch.device, tokens: int, *, codes: bool = False) -> bool:
    """Whether kernels choose experts of so many tokens on a device, without synchronization.

    Args:
        codes: whether weights have few bits, which takes tensor cores.
    """
    if not 0 < tokens <= MOST_CHOOSING or not has_kernel("chosen_products", device.type):
        return False
    return not codes or has_tensor_cores(device)


def takes_whole_calls(x: Tensor) -> bool:
    """Whether the experts of x (N, hidden) are one call of kernels, without synchronization;
    otherwise experts run one after another, and the host must know how many tokens each has."""
    return has_kernel("chosen_experts", computes_on(x))


#: x (N, in), or (N, K, in) with one for each choice, and choices (N, K) -> (N, K, out).
Products = Callable[[Tensor, Tensor], Tensor]


def sum_of_choices(
    x: Tensor,
    routing: Routing,
    products: tuple[Products, Products, Products],
    combined: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """:func:`sum_of_experts` for few tokens, without synchronization. Sums also run over experts in
    ascending order.

    Args:
        products: by the chosen experts' gates, ups and downs.
        combined: outputs of gates and ups -> a down's input.
    """
    gate, up, down = products
    chosen, order = routing.chosen.sort(-1)
    inner = combined(gate(x, chosen), up(x, chosen))  # (N, K, inner)
    shares = routing.weights.gather(-1, order).unsqueeze(-1)
    parts = (down(inner, chosen) * shares).to(x.dtype)
    out = parts[:, 0]
    for choice in range(1, chosen.shape[1]):
        out = out + parts[:, choice]
    return out.contiguous()


@define_op(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor[] gate, Tensor[] up, Tensor[] down, "
    "str act) -> Tensor",
)
def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    act: str,
) -> Tensor:
    """x (N, hidden) -> (N, hidden), the weighted sum of ``down(act(gate(x)) * up(x))``.

    Experts that no token chose are not run. Sums run over experts in ascending order and are
    rounded to x's dtype after each, which is transformers' order.

    Args:
        chosen: int64 (N, K), the experts of each token, no expert twice in a row.
        weights: float32 (N, K).
        gate, up: (inner, hidden) of each expert; down: (hidden, inner).
        act: the activation by config.json's name.

    Raises:
        ValueError: arguments that don't fit together, or an invalid expert.
    """
    if not len(gate) == len(up) == len(down) > 0:
        raise ValueError(
            f"experts: gate, up and down are {len(gate)}, {len(up)} and {len(down)} matrices; each "
            "expert has one of each"
        )
    if act not in ACTIVATIONS:
        raise ValueError(f"experts: act is {act!r}; it must be one of {', '.join(ACTIVATIONS)}")
    routing = Routing(chosen=chosen, weights=weights)

    def run(expert: int, inputs: Tensor) -> Tensor:
        inner = _times(inputs, gate[expert])
        ACTIVATIONS[act].gate(inner, _times(inputs, up[expert]))
        return _times(inner, down[expert])

    return sum_of_experts(x, routing, len(gate), run)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.exkv.linear(x, weight, None)


def sum_of_experts(
    x: Tensor, routing: Routing, experts: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The sum that :func:`experts` describes, over ``experts`` experts.

    Args:
        run: an expert's index and its inputs (n, hidden) -> its outputs, of the same shape.
    """
    order, counts = by_expert(x, routing, experts)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)

    def output(expert: int, rows: Tensor) -> Tensor:
        return run(expert, x[rows])

    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            add_output(out, routing.weights, pairs, partial(output, expert))
    return out


def by_expert(x: Tensor, routing: Routing, experts: int) -> tuple[Tensor, list[int]]:
    """The (token, choice) pairs, numbered row by row, in the order of their experts, int64 (N * K);
    and how many each expert has."""
    _check_routing(x, routing)
    chosen, (tokens, taken) = routing.chosen, routing.chosen.shape
    if routing.counts is not None:
        return chosen.flatten().argsort(stable=True), list(routing.counts)
    tally = (chosen.unsqueeze(-1) == torch.arange(experts, device=x.device)).sum((0, 1))
    counts = torch.ops.exkv.read_tally(tally, tokens, taken)
    return chosen.flatten().argsort(stable=True), counts


def _check_routing(x: Tensor, routing: Routing) -> None:
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


def add_output(
    out: Tensor, weights: Tensor, pairs: Tensor, run: Callable[[Tensor], Tensor]
) -> None:
    """Add one expert's weighted outputs to the sums of its (token, choice) pairs. A separate
    function, so that one expert's temporaries are freed before the next runs.

    Args:
        run: the tokens' rows, int64 (n) -> the outputs (n, hidden).
    """
    rows = pairs.div(weights.shape[1], rounding_mode="floor")
    share = weights.flatten()[pairs].unsqueeze(-1)
    out.index_add_(0, rows, (run(rows) * share).to(out.dtype))

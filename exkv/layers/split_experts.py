"""A mixture of experts with some experts in host memory and everything else on a card.

The host's kernels run these experts in place, while the card runs its own. Only hidden states
travel: those of the experts' tokens, and the outputs back. Parts are summed in the same order as
when all experts are on one device, and come from the same ops on the same rows, so that devices
that compute alike give the same bits.

A call of few tokens (:func:`_sum_of_few_tokens`) goes by (token, choice) pairs, sorted by expert:
blocks of these are calls of kernels for few rows, and an expert has all of its rows in one block.
The card's blocks are enqueued first, and then its other work (:class:`Meanwhile`); the host
computes its own at the same time, in one native call (``host_experts.py``) where it can. If all
chosen experts lie on the host, one call there makes the sum. A larger call goes expert by expert
(:func:`_sum_of_many_tokens`). There, an expert with :func:`rows_to_stream` rows or more is sent to
the card instead, into one of two buffers, while the previous expert computes
(:class:`ExpertStaging`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exkv import devices, sim
from exkv.ops.experts import Routing, add_output, by_expert
from exkv.ops.weight_groups import MOST_ROWS, is_decode_sized

from .host_experts import bound_experts
from .linear import Matrix, with_tensors

if TYPE_CHECKING:
    from .mlp import Experts


class Meanwhile:
    """What a card computes from the same inputs as routed experts, alongside them: once, when the
    host is about to compute, or else when the result is needed."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        self._made: Tensor | None = None

    def start(self) -> None:
        if self._made is None:
            self._made = self._call()

    def result(self) -> Tensor:
        self.start()
        assert self._made is not None
        return self._made


def split_sum(
    mixture: Experts, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
) -> Tensor:
    """The weighted sum of the chosen experts' outputs; x (N, hidden) on the card -> (N, hidden).

    Args:
        meanwhile: what the card computes while the host does; in calls of few tokens.
    """
    if is_decode_sized(x):
        return _sum_of_few_tokens(mixture, x, routing, meanwhile)
    return _sum_of_many_tokens(mixture, x, routing)


# Which calls take most -------------------------------------------------------------------------

_worst: ContextVar[bool] = ContextVar("worst", default=False)


@contextlib.contextmanager
def worst_case() -> Iterator[None]:
    """Within the block, tokens of this thread's calls choose the experts that take the most card
    memory, so that it can be measured."""
    token = _worst.set(True)
    try:
        yield
    finally:
        _worst.reset(token)


def _has_contents(x: Tensor) -> bool:
    """False for a tensor that has only a shape."""
    return type(x) is Tensor and not sim.is_dry(x)


def _is_worst_case(x: Tensor) -> bool:
    """Whether a call stands for all calls of its shape."""
    return not _has_contents(x) or is_worst_case()


def is_worst_case() -> bool:
    """Whether the thread is within :func:`worst_case`."""
    return _worst.get()


def _worst_choice(mixture: Experts, taken: int) -> list[int]:
    """The experts that every token chooses in the worst case, those on the card first."""
    card = [each for each in range(mixture.count) if each not in mixture.on_host]
    return sorted([*card, *sorted(mixture.on_host)][:taken])


# Few tokens ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    """Pairs that are the rows of one call, with one expert each.

    Attributes:
        pairs: their numbers: choice k of token n is n * K + k.
        experts: that the call names, in ascending order.
        rows: int64 (3, n): of each pair its token, its expert's position in ``experts``, and its
            number.
        counts: number of rows of each expert.
    """

    pairs: Sequence[int]
    experts: Sequence[int]
    rows: Tensor
    counts: Sequence[int]


def _sum_of_few_tokens(
    mixture: Experts, x: Tensor, routing: Routing, meanwhile: Meanwhile | None
) -> Tensor:
    """A call with three hops: the choice comes to the host, row numbers go to the card, and then
    the host's results."""
    (tokens, taken), worst = routing.chosen.shape, _is_worst_case(x)
    if known := _has_contents(x):
        numbers, weights, inputs = devices.fetched(routing.chosen, routing.weights, x)
        chosen = numbers.flatten().tolist()
        _check_chosen(chosen, taken, mixture.count)
    if worst:
        chosen = _worst_choice(mixture, taken) * tokens
    elif mixture.counts is not None:
        mixture.counts.add_(numbers.flatten().bincount(minlength=mixture.count))
    sent = Routing(chosen=numbers, weights=weights) if known else None
    native = None if sent is None or worst else bound_experts(mixture, inputs, taken)
    if mixture.on_host.issuperset(chosen):
        if meanwhile is not None:
            meanwhile.start()
        if sent is None:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        if native is not None:
            found = native.sum(inputs, numbers, weights.float())
        else:
            found = _sum_on_host(mixture, inputs, sent, chosen)
        return devices.sent(found, x.device)
    pairs: tuple[list[int], list[int]] = [], []
    for pair, expert in enumerate(chosen):
        pairs[expert in mixture.on_host].append(pair)
    card, host = (_blocks(chosen, taken, those, worst) for those in pairs)
    if mixture.from_disk and known:
        mixture.read_ahead(expert for block in host for expert in block.experts)
    order = _output_positions([*card, *host], chosen, taken)
    rows, order = _copied_to_card([block.rows for block in card], order, x.device)
    parts = [
        _weighted_outputs(mixture, x, routing.weights, *each)
        for each in zip(card, rows, strict=True)
    ]
    if meanwhile is not None:
        meanwhile.start()
    if host and native is not None:
        those = [pair for block in host for pair in block.pairs]
        of_all = native.parts(inputs, numbers, weights.float())
        parts.append(devices.sent(of_all.flatten(0, 1)[those], x.device))
    elif host and known:
        made = [_weighted_outputs(mixture, inputs, weights, block, block.rows) for block in host]
        parts.append(devices.sent(torch.cat(made), x.device))
    elif host:
        parts.append(x.new_empty(sum(len(block.pairs) for block in host), x.shape[1]))
    together = torch.cat(parts) if worst or len(parts) > 1 else parts[0]
    parts.clear()
    out = together[order[0]]
    for rank in range(1, taken):
        out.add_(together[order[rank]])
    return out


def _sum_on_host(mixture: Experts, x: Tensor, routing: Routing, chosen: Sequence[int]) -> Tensor:
    """The sum where every token's experts are on the host, as x is; ``chosen``: of each pair."""
    experts = sorted(set(chosen))
    place = {expert: at for at, expert in enumerate(experts)}
    places = torch.tensor([place[expert] for expert in chosen]).view_as(routing.chosen)
    tally = Counter(chosen)
    counts = [tally[expert] for expert in experts]
    return mixture.sum_of(experts, x, replace(routing, chosen=places, counts=counts))


def _check_chosen(chosen: Sequence[int], taken: int, experts: int) -> None:
    """Raise ValueError for a choice that no router makes."""
    rows = (chosen[first : first + taken] for first in range(0, len(chosen), taken))
    if any(len(set(row)) < taken or not 0 <= min(row) <= max(row) < experts for row in rows):
        raise ValueError(
            f"experts: chosen must name experts 0 to {experts - 1}, none twice for a token"
        )


def _blocks(chosen: Sequence[int], taken: int, pairs: Sequence[int], worst: bool) -> list[_Block]:
    """Pairs in blocks of up to ``MOST_ROWS``; all pairs of an expert are in one block.

    Args:
        chosen: the expert of each pair.
        worst: pretend that one expert had all rows of a block, and all blocks but the first were
            full.
    """
    if worst:
        first = len(pairs) % MOST_ROWS or MOST_ROWS
        ends = [0, *range(first, len(pairs) + 1, MOST_ROWS)]
        return [_block(chosen, taken, pairs[a:b], worst) for a, b in pairwise(ends)]
    blocks: list[list[int]] = []
    for _, group in groupby(sorted(pairs, key=chosen.__getitem__), key=chosen.__getitem__):
        those = list(group)
        if not blocks or len(blocks[-1]) + len(those) > MOST_ROWS:
            blocks.append([])
        blocks[-1] += those
    return [_block(chosen, taken, block, worst) for block in blocks]


def _block(chosen: Sequence[int], taken: int, pairs: Sequence[int], worst: bool) -> _Block:
    experts = sorted({chosen[pair] for pair in pairs})
    places = [0 if worst else experts.index(chosen[pair]) for pair in pairs]
    rows = torch.tensor([[pair // taken for pair in pairs], places, pairs], dtype=torch.int64)
    return _Block(pairs, experts, rows, [places.count(place) for place in range(len(experts))])


def _output_positions(blocks: Sequence[_Block], chosen: Sequence[int], taken: int) -> Tensor:
    """For each token, the positions of its experts' outputs among those of all blocks, in ascending
    order: int64 (taken, tokens)."""
    pairs = (pair for block in blocks for pair in block.pairs)
    place = {pair: row for row, pair in enumerate(pairs)}
    ranked = [
        sorted(range(first, first + taken), key=chosen.__getitem__)
        for first in range(0, len(chosen), taken)
    ]
    return torch.tensor([[place[pairs[rank]] for pairs in ranked] for rank in range(taken)])


def _copied_to_card(
    rows: Sequence[Tensor], order: Tensor, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """All of these numbers on a card, in one copy."""
    tensors = [*rows, order]
    together = devices.sent(torch.cat([each.flatten() for each in tensors]), device)
    parts = together.split([each.numel() for each in tensors])
    *there, order = (part.view_as(like) for part, like in zip(parts, tensors, strict=True))
    return there, order


def _weighted_outputs(
    mixture: Experts, x: Tensor, weights: Tensor, block: _Block, rows: Tensor
) -> Tensor:
    """The weighted output of each pair of a block (n, hidden), all on the device of x (N, hidden).

    Args:
        rows: the block's, on this device.
    """
    tokens, places, pairs = rows
    alone = Routing(
        chosen=places.unsqueeze(1),
        weights=weights.flatten()[pairs].unsqueeze(1),
        counts=block.counts,
    )
    return mixture.sum_of(block.experts, x[tokens], alone)


# Many tokens -----------------------------------------------------------------------------------


def _sum_of_many_tokens(mixture: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Run experts in ascending order, each on the device where it lies or to which it is sent."""
    known, taken = _has_contents(x), routing.chosen.shape[1]
    order, counts = by_expert(x, routing, mixture.count)
    if worst := _is_worst_case(x):
        choice = _worst_choice(mixture, taken)
        counts = [len(x) if expert in choice else 0 for expert in range(mixture.count)]
    elif mixture.counts is not None:
        mixture.counts.add_(torch.tensor(counts))
    chosen = [expert for expert in sorted(mixture.on_host) if counts[expert]]
    sent = [e for e in chosen if worst or _is_sent(mixture, e, counts[e])]
    if mixture.from_disk and known:
        mixture.read_ahead(chosen)
    if known and len(sent) < len(chosen):
        inputs, pairs = devices.fetched(x, order)
        rows_of = pairs.div(taken, rounding_mode="floor").split(counts)

    def on_card(expert: int, rows: Tensor) -> Tensor:
        return mixture.output(mixture.expert(expert), x[rows])

    def by_sending(expert: int, rows: Tensor) -> Tensor:
        return mixture.output(next(arriving), x[rows])

    def on_host(expert: int, rows: Tensor) -> Tensor:
        if not known:
            return x.new_empty(len(rows), x.shape[1])
        found = mixture.output(mixture.expert(expert), inputs[rows_of[expert]])
        return devices.sent(found, x.device)

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with _arriving(mixture, sent) as arriving:
        for expert, pairs_of in enumerate(order.split(counts)):
            if len(pairs_of):
                here = on_host if expert in mixture.on_host else on_card
                run = by_sending if expert in sent else here
                add_output(out, routing.weights, pairs_of, partial(run, expert))
    return out


# Experts that are sent -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """How fast a host computes, and how fast its memory is copied to a card. Defaults, for when
    nothing was given or measured: a desktop with two channels of DDR5, and PCIe 4.0 with 16 lanes.

    Attributes:
        bandwidth: bytes per second at which the host reads its memory.
        flops: of its kernels on prompts, per second.
        link: bytes per second from host memory to a card.
    """

    bandwidth: float = 60e9
    flops: float = 500e9
    link: float = 25e9


def rows_to_stream(nbytes: int, weights: int, rates: HostRates) -> int:
    """The fewest rows for which sending an expert to the card takes less time than computing it on
    the host, which reads the weights once, or does one multiply-add per weight and row.

    Args:
        nbytes: of the expert.
        weights: numbers in its matrices.
    """
    sending = nbytes / rates.link
    if nbytes / rates.bandwidth > sending:
        return 1
    return int(sending * rates.flops / (2 * weights)) + 1


def _is_sent(mixture: Experts, expert: int, rows: int) -> bool:
    staging, module = mixture.staging, mixture.expert(expert)
    if staging is None or module is None:
        return False
    sizes = [part.size for part in module.modules() if isinstance(part, Matrix)]
    nbytes = sum(each.nbytes for each in module.parameters())
    weights = sum(outputs * inputs for outputs, inputs in sizes)
    return rows >= rows_to_stream(nbytes, weights, staging.rates)


@contextlib.contextmanager
def _arriving(mixture: Experts, experts: Sequence[int]) -> Iterator[Iterator[nn.Module | None]]:
    """These experts' modules on the card, one after the other."""
    modules = [mixture.expert(expert) for expert in experts]
    if not modules or mixture.staging is None:
        yield iter(modules)  # with shapes alone, all are there
        return
    with mixture.staging.lock:
        yield mixture.staging.arriving(modules)


class ExpertStaging:
    """Two buffers on a card through which experts come from host memory.

    Args:
        nbytes: of the largest expert, each tensor rounded up as allocations are.

    Attributes:
        lock: held by the call that uses them.
    """

    def __init__(self, device: torch.device, nbytes: int, rates: HostRates) -> None:
        self.device, self.nbytes, self.rates, self.lock = device, nbytes, rates, Lock()
        size = staging_bytes_of(nbytes, device.type)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._copies = [devices.SideStream(device) for _ in range(2)]

    def arriving(self, experts: Sequence[nn.Module | None]) -> Iterator[nn.Module]:
        """Each expert as a module on the card, valid until the next but one is requested. The copy
        of the next begins before the work on the current one is enqueued, and runs beside it."""
        begun = [self._begin(expert, slot % 2) for slot, expert in enumerate(experts[:1])]
        for slot, _ in enumerate(experts, 1):
            if slot < len(experts):
                begun.append(self._begin(experts[slot], slot % 2))
            self._copies[(slot - 1) % 2].wait()
            yield begun.pop(0)

    def views_of(self, tensors: Mapping[str, Tensor], slot: int = 0) -> Mapping[str, Tensor]:
        """A buffer's memory as tensors like these, for whoever holds the lock."""
        memory = self._memory[slot * self.nbytes :][: self.nbytes]
        return devices.views(memory, devices.layout_of(tensors))

    def _begin(self, expert: nn.Module | None, slot: int) -> nn.Module:
        assert expert is not None
        stored = dict(expert.named_parameters())
        made = self.views_of(stored, slot)
        copies = self._copies[slot]
        with copies:
            copies.uses(self._memory)
            for name, tensor in stored.items():
                made[name].copy_(tensor, non_blocking=True)
        return with_tensors(expert, made)


def staging_bytes_of(nbytes: int, device_type: str) -> int:
    """Bytes that :class:`ExpertStaging` allocates on a card for experts of up to ``nbytes``."""
    return devices.allocation_bytes(2 * nbytes, device_type)

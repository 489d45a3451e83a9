"""A mixture of experts of which some lie in host memory, while everything else is on a card.

The host's kernels compute these experts where they lie, beside the card's. Only hidden states
travel: those of the tokens there, and the experts' outputs back. Parts are summed in the order in
which they are summed where all experts are on one device, and come from the same ops on the same
rows, so that on devices that compute alike the bits are the same.

A call of few (token, choice) pairs takes them as rows with one expert each: all of the card's in
one call, all of the host's in another (:func:`_of_few`). A larger one goes from expert to expert
(:func:`_of_many`). There an expert with :func:`rows_to_stream` rows or more is sent to the card
instead, into one of two buffers, while the expert before it computes (:class:`ExpertStaging`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exkv import devices, sim
from exkv.ops.experts import Routing, add_output, by_expert
from exkv.ops.weight_groups import MOST_ROWS, is_decode_sized

from .linear import Matrix

if TYPE_CHECKING:
    from .mlp import Experts

#: Pairs that are rows of one call, at most: those that kernels for few rows take.
MOST_PAIRS = MOST_ROWS


def split_sum(mixture: Experts, x: Tensor, routing: Routing) -> Tensor:
    """The weighted sum of the chosen experts' outputs; x (N, hidden) on the card -> (N, hidden)."""
    if routing.chosen.numel() <= MOST_PAIRS:
        return _of_few(mixture, x, routing)
    return _of_many(mixture, x, routing)


# Which calls take most -------------------------------------------------------------------------

_worst: ContextVar[bool] = ContextVar("worst", default=False)


@contextlib.contextmanager
def worst_case() -> Iterator[None]:
    """Within the block, tokens of this thread's calls choose the experts that take most of the
    card's memory, so that it can be measured."""
    token = _worst.set(True)
    try:
        yield
    finally:
        _worst.reset(token)


def _has_contents(x: Tensor) -> bool:
    """False for a tensor that has a shape alone."""
    return type(x) is Tensor and not sim.is_dry(x)


def _takes_most(x: Tensor) -> bool:
    """Whether this stands for all calls of such a shape."""
    return not _has_contents(x) or _worst.get()


def _worst_choice(mixture: Experts, taken: int) -> list[int]:
    """The experts that every token chooses in the worst case, those on the card first."""
    card = [each for each in range(mixture.count) if each not in mixture.on_host]
    return sorted([*card, *sorted(mixture.on_host)][:taken])


# Few pairs -------------------------------------------------------------------------------------


def _of_few(mixture: Experts, x: Tensor, routing: Routing) -> Tensor:
    """The card's pairs are enqueued first, then the host computes its own. There are three hops:
    what was chosen comes to the host, the numbers of rows go to the card while the host computes,
    and then its parts."""
    tokens, taken = routing.chosen.shape
    if known := _has_contents(x):
        numbers, weights, inputs = devices.fetched(routing.chosen, routing.weights, x)
        chosen = numbers.flatten().tolist()
        _check_chosen(chosen, taken, mixture.count)
    if _takes_most(x):
        chosen = _worst_choice(mixture, taken) * tokens
    elif mixture.counts is not None:
        mixture.counts.add_(numbers.flatten().bincount(minlength=mixture.count))
    card = [pair for pair, expert in enumerate(chosen) if expert not in mixture.on_host]
    host = [pair for pair, expert in enumerate(chosen) if expert in mixture.on_host]
    place = {pair: row for row, pair in enumerate([*card, *host])}
    ranked = [
        sorted(range(first, first + taken), key=chosen.__getitem__)
        for first in range(0, tokens * taken, taken)
    ]
    order = torch.tensor([[place[pairs[rank]] for pairs in ranked] for rank in range(taken)])
    experts, indices = _call_of(chosen, card, taken, worst=_takes_most(x))
    together = devices.sent(torch.cat([indices.flatten(), order.flatten()]), x.device)
    sent = together.split([indices.numel(), order.numel()])
    indices, order = sent[0].view_as(indices), sent[1].view_as(order)
    parts = [_parts(mixture, x, routing.weights, experts, indices)] if card else []
    if host and known:
        found = _parts(mixture, inputs, weights, *_call_of(chosen, host, taken))
        parts.append(devices.sent(found, x.device))
    elif host:
        parts.append(x.new_empty(len(host), x.shape[1]))
    together = parts.pop() if len(parts) == 1 else torch.cat(parts)
    parts.clear()
    out = together[order[0]]
    for rank in range(1, taken):
        out.add_(together[order[rank]])
    return out


def _check_chosen(chosen: Sequence[int], taken: int, experts: int) -> None:
    """ValueError for what no router answers."""
    rows = (chosen[first : first + taken] for first in range(0, len(chosen), taken))
    if any(len(set(row)) < taken or not 0 <= min(row) <= max(row) < experts for row in rows):
        raise ValueError(
            f"experts: chosen must name experts 0 to {experts - 1}, none twice for a token"
        )


def _call_of(
    chosen: Sequence[int], pairs: Sequence[int], taken: int, *, worst: bool = False
) -> tuple[list[int], Tensor]:
    """The experts of these pairs, and of each its token, its expert's place among these, and the
    pair itself: int64 (3, n).

    Args:
        worst: whether one expert has all rows: none has more.
    """
    experts = sorted({chosen[pair] for pair in pairs})
    places = [0 if worst else experts.index(chosen[pair]) for pair in pairs]
    numbers = [pair // taken for pair in pairs], places, list(pairs)
    return experts, torch.tensor(numbers, dtype=torch.int64)


def _parts(
    mixture: Experts, x: Tensor, weights: Tensor, experts: Sequence[int], indices: Tensor
) -> Tensor:
    """The weighted output of each of these pairs (n, hidden), all on the device of x (N, hidden).

    Args:
        experts, indices: see :func:`_call_of`.
    """
    rows, places, pairs = indices
    alone = Routing(chosen=places.unsqueeze(1), weights=weights.flatten()[pairs].unsqueeze(1))
    return mixture.sum_of(experts, x[rows], alone)


# Many pairs ------------------------------------------------------------------------------------


def _of_many(mixture: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Experts in ascending order, each on the device where it lies or is sent to."""
    known, taken, small = _has_contents(x), routing.chosen.shape[1], is_decode_sized(x)
    order, counts = by_expert(x, routing, mixture.count)
    if worst := _takes_most(x):
        choice = _worst_choice(mixture, taken)
        counts = [len(x) if expert in choice else 0 for expert in range(mixture.count)]
    elif mixture.counts is not None:
        mixture.counts.add_(torch.tensor(counts))
    chosen = [expert for expert in sorted(mixture.on_host) if counts[expert]]
    sent = [] if small else [e for e in chosen if worst or _is_sent(mixture, e, counts[e])]
    if known and len(sent) < len(chosen):
        inputs, pairs = devices.fetched(x, order)
        rows_of = pairs.div(taken, rounding_mode="floor").split(counts)

    def on_card(expert: int, rows: Tensor) -> Tensor:
        return _one(mixture, expert, x[rows], small)

    def by_sending(expert: int, rows: Tensor) -> Tensor:
        return mixture.output(next(arriving), x[rows])

    def on_host(expert: int, rows: Tensor) -> Tensor:
        if not known:
            return x.new_empty(len(rows), x.shape[1])
        found = _one(mixture, expert, inputs[rows_of[expert]], small)
        return devices.sent(found, x.device)

    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    with _arriving(mixture, sent) as arriving:
        for expert, pairs_of in enumerate(order.split(counts)):
            if len(pairs_of):
                here = on_host if expert in mixture.on_host else on_card
                run = by_sending if expert in sent else here
                add_output(out, routing.weights, pairs_of, partial(run, expert))
    return out


def _one(mixture: Experts, expert: int, x: Tensor, small: bool) -> Tensor:
    """One expert's output for x (n, hidden), by the kernels that a call takes with all of them.

    Args:
        small: whether the call is one of few tokens.
    """
    if not (small and mixture.has_op):
        return mixture.output(mixture.expert(expert), x)
    alone = torch.zeros((len(x), 1), dtype=torch.int64, device=x.device)
    ones = torch.ones((len(x), 1), device=x.device)
    return mixture.sum_of([expert], x, Routing(chosen=alone, weights=ones))


# Experts that are sent -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """How fast a host computes, beside how fast its memory goes to a card. Without arguments, what
    is assumed where nobody gave or measured any: of a desktop with two channels of DDR5, and of
    PCIe 4.0 with 16 lanes.

    Attributes:
        bandwidth: bytes a second at which the host reads its memory.
        flops: of its kernels on prompts, a second.
        link: bytes a second from host memory to a card.
    """

    bandwidth: float = 60e9
    flops: float = 500e9
    link: float = 25e9


def rows_to_stream(nbytes: int, weights: int, rates: HostRates) -> int:
    """The fewest rows for which it takes less time to send an expert to the card than to compute
    it on the host, which reads the weights once, or multiplies and adds each once for every row.

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
        yield iter(modules)  # where tensors are shapes alone, all are there
        return
    with mixture.staging.lock:
        yield mixture.staging.arriving(modules)


class ExpertStaging:
    """Two buffers on a card, by which experts come from host memory.

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
        """Each expert as a module on the card, valid until the next but one is asked for. The copy
        of the next begins before what is done with one is enqueued, and runs beside it."""
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
        return _with_tensors(expert, made)


def staging_bytes_of(nbytes: int, device_type: str) -> int:
    """Bytes that :class:`ExpertStaging` asks a card for, for experts of up to ``nbytes``."""
    return devices.allocation_bytes(2 * nbytes, device_type)


def _with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """A copy of the module with other tensors in the place of its parameters."""
    copy = object.__new__(type(module))
    found = {
        name: None if own is None else tensors[prefix + name]
        for name, own in module._parameters.items()
    }
    inside = {
        name: _with_tensors(child, tensors, f"{prefix}{name}.")
        for name, child in module._modules.items()
        if child is not None
    }
    copy.__dict__.update(module.__dict__, _parameters=found, _modules=inside)
    copy.__dict__.update((name, child) for name, child in inside.items() if name in copy.__dict__)
    return copy

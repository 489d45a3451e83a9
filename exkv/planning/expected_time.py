"""How long a decode step is to take, by what it reads: weights, caches, and of routed experts those
that tokens are expected to choose.

Units run one after the other, so that their times add up. Where experts of a unit lie in host
memory, the host computes with them while the card computes with the others, and with what all
tokens take; hidden states go there and come back. Which experts a token chooses is chance, and one
device waits for the other: what counts is the mean over these chances of the longer time. What is
computed costs nothing beside what is read, as long as there are few rows. What is read from disk
comes on top: of the experts that are chosen least often as many as memory has no room for, since
the system keeps what is used most. Bandwidths are the budgets' own; where they have none, common
ones are assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exkv.layers.split_experts import HostRates
from exkv.sizes import human

from .plan import Budget, Place, Plan, UnitCost

#: Bytes a second where nobody gave or measured any: of a card with GDDR6X, and of a host.
CARD, HOST, LINK = 1000e9, HostRates().bandwidth, HostRates().link
#: Likewise of a disk, where none could be measured either.
DISK = 1e9

#: Seconds until a hidden state has reached another device, beside its bytes over the link.
HOP_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of a card, of its host's memory, and of the link between them."""

    card: float
    host: float
    link: float = LINK


def bandwidth(budget: Budget) -> float:
    """The device's, in bytes a second; assumed where it isn't known."""
    return budget.bandwidth or (HOST if budget.device.type == "cpu" else CARD)


def rates_of(budget: Budget, budgets: Sequence[Budget]) -> Rates:
    """Of a card among these devices."""
    memory = (each for each in budgets if each.place == budget.place.memory)
    host = next(map(bandwidth, memory), HOST)
    return Rates(bandwidth(budget), host)


def unit_seconds(cost: UnitCost, rates: Rates) -> float:
    """Of a unit on a card, with its experts where the cost says they are."""
    seconds, apart = cost.traffic / rates.card, cost.host_experts
    if apart:
        there = (each for each in range(len(cost.experts)) if each not in apart)
        seconds += float(seconds_beyond(cost, rates, [*apart, *there])[len(apart)])
    return seconds


def seconds_beyond(cost: UnitCost, rates: Rates, order: Sequence[int]) -> np.ndarray:
    """Seconds that a unit takes longer, at the mean, with the first m experts of an order of all
    in host memory than with all on the card; float64 (m from 0 to all).

    How many of them a step reads is chance, by :func:`chances`; each of them counts as many bytes
    as they have at the mean. Both devices know what was chosen after a hop; the card then waits for
    another one, with the numbers of its rows, and at the end for the host's outputs.
    """
    shares = tuple(cost.chosen[each] for each in order)
    read = np.array([cost.experts[each] for each in order]) * shares
    on_host, chance = np.array([0.0, *read.cumsum()]), chances(shares)
    number = np.arange(chance.shape[1])
    mean = chance @ number
    each = np.divide(on_host, mean, out=np.zeros_like(mean), where=mean > 0)
    apart = each[:, None] * number
    read_there = on_host[-1] + cost.shared_experts
    card = HOP_SECONDS + (read_there - apart) / rates.card
    longer = (chance * np.maximum(card, apart / rates.host)).sum(1)
    seconds = longer + 2 * (HOP_SECONDS + cost.hidden_step / rates.link) - read_there / rates.card
    seconds[0] = 0.0
    return seconds


def least_seconds_beyond(cost: UnitCost, rates: Rates, on_host: np.ndarray) -> np.ndarray:
    """The same at least, of any experts of which a step reads so many bytes at the mean, those of
    none first: if every step did, since chance only takes longer."""
    read = _beside_host(cost)
    longer = np.maximum(HOP_SECONDS + (read - on_host) / rates.card, on_host / rates.host)
    seconds = longer + 2 * (HOP_SECONDS + cost.hidden_step / rates.link) - read / rates.card
    seconds[0] = 0.0
    return seconds


def even_bytes(cost: UnitCost, rates: Rates) -> float:
    """Bytes read of experts in host memory with which host and card take equally long."""
    return (HOP_SECONDS + _beside_host(cost) / rates.card) / (1 / rates.card + 1 / rates.host)


def _beside_host(cost: UnitCost) -> float:
    """Bytes that a step reads at the mean of all experts, shared ones too."""
    routed = sum(size * share for size, share in zip(cost.experts, cost.chosen, strict=True))
    return routed + cost.shared_experts


@functools.lru_cache(1024)
def chances(shares: tuple[float, ...]) -> np.ndarray:
    """Of the first m experts, how many a decode step reads: the probability of k; float64 (m from
    0 to all, k).

    As many are read of all as is expected, rounded; sets of so many by the product of their odds
    (conditional Bernoulli sampling). For equal shares that is the hypergeometric distribution.

    Args:
        shares: the probability of each expert.
    """
    likely = np.clip(shares, *_LIKELY)
    odds, taken = likely / (1 - likely), max(round(sum(shares)), 1)
    first, others = _products(odds, taken), _products(odds[::-1], taken)[::-1, ::-1]
    both = first * others
    return both / both.sum(1, keepdims=True)


#: Nothing is impossible, or certain.
_LIKELY = 1e-4, 1 - 1e-4


def _products(odds: np.ndarray, most: int) -> np.ndarray:
    """The sum of products over all sets of k of the first m odds, each row divided by its largest;
    float64 (m from 0 to all, k from 0 to ``most``)."""
    table = np.zeros((len(odds) + 1, most + 1))
    table[0, 0] = 1.0
    for before, row, each in zip(table, table[1:], odds, strict=False):
        row[:] = before
        row[1:] += each * before[:-1]
        row /= row.max()
    return table


def step_seconds(
    costs: Sequence[UnitCost], where: Sequence[Place], budgets: Sequence[Budget]
) -> float:
    """Of a decode step through units that are placed so; those of other processes take none."""
    offered = {budget.place: budget for budget in budgets}
    total, before = 0.0, None
    for cost, place in zip(costs, where, strict=True):
        budget = offered.get(place) or Budget(device=place.device, host=place.host, capacity=0)
        if place == place.memory:
            total += cost.traffic / bandwidth(budget)
        else:
            total += unit_seconds(cost, rates_of(budget, budgets))
        if cost.pinned is None and place != before:
            total, before = total + HOP_SECONDS, place
    return total


# From disk -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """What a plan reads from disk.

    Attributes:
        nbytes: of experts that memory has no room for.
        read: of these in a decode step, to be expected.
        rate: bytes a second at which they are read.
        assumed: whether nobody gave or measured it.
    """

    nbytes: int
    read: float
    rate: float
    assumed: bool

    @property
    def seconds(self) -> float:
        """Of a decode step."""
        return self.read / self.rate

    @property
    def bandwidth(self) -> str:
        """The rate in words."""
        return f"{'assumed ' if self.assumed else ''}{self.rate / 1e9:,.3g} GB/s"

    def sentence(self, tokens_per_second: float) -> str:
        """What users are told."""
        digits = ",.0f" if tokens_per_second >= 100 else ".2g"
        return (
            f"{human(self.nbytes)} of experts are read from disk as they are chosen: about "
            f"{tokens_per_second:{digits}} tokens/s predicted at {self.bandwidth}."
        )


def on_disk(plan: Plan, costs: Sequence[UnitCost]) -> OnDisk | None:
    """What a plan reads from disk; None for one in memory."""
    ledger = next((each for each in plan.ledgers if each.from_disk), None)
    if ledger is None:
        return None
    left, read = ledger.from_disk, 0.0
    for share, nbytes in sorted(_there(plan, costs)):
        read += share * min(nbytes, left)
        left -= min(nbytes, left)
    rate = ledger.budget.disk_bandwidth
    return OnDisk(nbytes=ledger.from_disk, read=read, rate=rate or DISK, assumed=not rate)


def _there(plan: Plan, costs: Sequence[UnitCost]) -> Iterator[tuple[float, int]]:
    """Of each expert in host memory that may be on disk, the probability that a decode step reads
    it, and its bytes."""
    for unit, cost in zip(plan.units, costs, strict=True):
        on_host = unit.place == unit.place.memory
        for expert in range(len(cost.experts)) if on_host else unit.host_experts:
            if cost.mapped:
                yield cost.chosen[expert], cost.mapped


# In words ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan is expected to do.

    Attributes:
        seconds: of a decode step of all rows, with full caches.
        rows: that get a token in it.
        bandwidths: in words, by which that was said.
        from_disk: a sentence on experts that are read from disk, if any are.
    """

    seconds: float
    rows: int
    bandwidths: str
    from_disk: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    def __str__(self) -> str:
        rows = "" if self.rows == 1 else f" ({self.rows:,} rows)"
        return f"{self.tokens_per_second:,.3g} tokens/s{rows}"


def expected(
    plan: Plan, costs: Sequence[UnitCost], budgets: Sequence[Budget], rows: int
) -> Expected:
    """Expectations of a plan; over hosts, with the hops of a token over their link if its speed is
    known."""
    hops = len({unit.host for unit in plan.units}) - 1
    hop = plan.link.seconds(max(cost.hidden_step for cost in costs)) if plan.link else 0.0
    disk = on_disk(plan, costs)
    seconds = step_seconds(costs, plan.places, budgets) + hops * hop
    seconds += disk.seconds if disk else 0.0
    return Expected(
        seconds=seconds,
        rows=rows,
        bandwidths=in_words(plan, budgets) + (f", disk {disk.bandwidth}" if disk else ""),
        from_disk=disk.sentence(rows / seconds) if disk else "",
    )


def in_words(plan: Plan, budgets: Sequence[Budget]) -> str:
    """The bandwidths of devices that hold weights, and whether they are assumed."""
    said, holding = [], {each.place for each in plan.ledgers if each.has_weights}
    for budget in budgets:
        if budget.place in holding:
            assumed = "" if budget.bandwidth else "assumed "
            said.append(f"{budget.place} {assumed}{bandwidth(budget) / 1e9:,.4g} GB/s")
    if plan.host_experts:
        said.append(f"link assumed {LINK / 1e9:g} GB/s")
    return ", ".join(said)


def where_experts_are(plan: Plan, costs: Sequence[UnitCost]) -> list[str]:
    """Of each device with layers that have routed experts, a line that counts these."""
    lines = []
    for ledger in plan.ledgers:
        here = [
            (unit, len(cost.experts))
            for unit, cost in zip(plan.units, costs, strict=True)
            if unit.place == ledger.place and cost.experts
        ]
        if not here:
            continue
        total = sum(count for _, count in here)
        apart = sum(len(unit.host_experts) for unit, _ in here)
        size = human(sum(unit.host_weights for unit, _ in here))
        on_host = f", {apart:,} in host memory ({size})" if apart else ""
        lines.append(f"{ledger.place}: {total - apart:,} of {total:,} experts{on_host}")
    return lines

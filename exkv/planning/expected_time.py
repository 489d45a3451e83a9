"""Predict the time of a decode step from what it reads: weights, caches, and the routed experts
that tokens are expected to choose.

Units run one after the other, so their times add up. Where a unit has experts in host memory, the
host computes those while the card computes the others and the part that all tokens take; hidden
states travel there and back. Which experts a token chooses is random, and one device waits for the
other, so what counts is the mean of the longer time. With few rows, computing costs nothing beside
reading. Disk reads come on top: the experts that are chosen least often, as many as memory has no
room for, since the system keeps what is used most. Bandwidths are the budgets' own; where those
have none, common ones are assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exkv.layers.split_experts import HostRates
from exkv.sizes import human

from .plan import Budget, Place, Plan, UnitCost

#: Bytes per second assumed if none is given or measured: a card with GDDR6X, and a host.
CARD, HOST, LINK = 1000e9, HostRates().bandwidth, HostRates().link
#: Likewise for a disk that couldn't be measured.
DISK = 1e9

#: Seconds for a hidden state to reach another device, beside its bytes over the link.
HOP_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of a card, of its host's memory, and of the link between them."""

    card: float
    host: float
    link: float = LINK


def bandwidth(budget: Budget) -> float:
    """The device's bandwidth in bytes per second; assumed where it isn't known."""
    return budget.bandwidth or (HOST if budget.device.type == "cpu" else CARD)


def rates_of(budget: Budget, budgets: Sequence[Budget]) -> Rates:
    """Rates of a card among these devices."""
    memory = (each for each in budgets if each.place == budget.place.memory)
    host = next(map(bandwidth, memory), HOST)
    return Rates(bandwidth(budget), host)


def unit_seconds(cost: UnitCost, rates: Rates) -> float:
    """Seconds of a unit on a card, with its experts where the cost says they are."""
    seconds, apart = cost.traffic / rates.card, cost.host_experts
    if apart:
        there = (each for each in range(len(cost.experts)) if each not in apart)
        seconds += float(seconds_beyond(cost, rates, [*apart, *there])[len(apart)])
    return seconds


def seconds_beyond(cost: UnitCost, rates: Rates, order: Sequence[int]) -> np.ndarray:
    """Mean extra seconds of a unit with the first m experts of an order in host memory, compared to
    all on the card; float64 (m from 0 to all).

    How many of them a step reads is random, by :func:`chances`; each counts as many bytes as they
    have on average. Both devices know the choice after a hop; the card then waits for a second hop,
    with the numbers of its rows, and in the end for the host's outputs.
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
    """A lower bound of :func:`seconds_beyond` for any experts of which a step reads ``on_host``
    bytes on average, starting from none: every step is assumed to read the mean, since randomness
    only adds time."""
    read = _beside_host(cost)
    longer = np.maximum(HOP_SECONDS + (read - on_host) / rates.card, on_host / rates.host)
    seconds = longer + 2 * (HOP_SECONDS + cost.hidden_step / rates.link) - read / rates.card
    seconds[0] = 0.0
    return seconds


def even_bytes(cost: UnitCost, rates: Rates) -> float:
    """Bytes read of experts in host memory at which host and card take equally long."""
    return (HOP_SECONDS + _beside_host(cost) / rates.card) / (1 / rates.card + 1 / rates.host)


def _beside_host(cost: UnitCost) -> float:
    """Mean bytes that a step reads of all experts, shared ones included."""
    routed = sum(size * share for size, share in zip(cost.experts, cost.chosen, strict=True))
    return routed + cost.shared_experts


@functools.lru_cache(1024)
def chances(shares: tuple[float, ...]) -> np.ndarray:
    """The probability that a decode step reads k of the first m experts; float64 (m from 0 to all,
    k).

    In total as many are read as expected, rounded; sets of that size are weighted by the product of
    their odds (conditional Bernoulli sampling). For equal shares this is the hypergeometric
    distribution.
    Args:
        shares: the probability of each expert.
    """
    likely = np.clip(shares, *_LIKELY)
    odds, taken = likely / (1 - likely), max(round(sum(shares)), 1)
    first, others = _products(odds, taken), _products(odds[::-1], taken)[::-1, ::-1]
    both = first * others
    return both / both.sum(1, keepdims=True)


#: Probabilities are clamped away from 0 and 1.
_LIKELY = 1e-4, 1 - 1e-4


def _products(odds: np.ndarray, most: int) -> np.ndarray:
    """The sum of products over all sets of k of the first m odds, each row divided by its maximum;
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
    """Seconds of a decode step through units placed so; units of other processes take none."""
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
        read: bytes of these that a decode step is expected to read.
        rate: bytes per second at which they are read.
        assumed: whether the rate was neither given nor measured.
    """

    nbytes: int
    read: float
    rate: float
    assumed: bool

    @property
    def seconds(self) -> float:
        """Of a decode step's disk reads."""
        return self.read / self.rate

    @property
    def bandwidth(self) -> str:
        """The rate in words."""
        return f"{'assumed ' if self.assumed else ''}{self.rate / 1e9:,.3g} GB/s"

    def sentence(self, tokens_per_second: float) -> str:
        """The sentence shown to users."""
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
    for share, nbytes in sorted(_mapped_experts(plan, costs)):
        read += share * min(nbytes, left)
        left -= min(nbytes, left)
    rate = ledger.budget.disk_bandwidth
    return OnDisk(nbytes=ledger.from_disk, read=read, rate=rate or DISK, assumed=not rate)


def _mapped_experts(plan: Plan, costs: Sequence[UnitCost]) -> Iterator[tuple[float, int]]:
    """For each expert in host memory that may be on disk: the probability that a decode step reads
    it, and its bytes."""
    for unit, cost in zip(plan.units, costs, strict=True):
        on_host = unit.place == unit.place.memory
        for expert in range(len(cost.experts)) if on_host else unit.host_experts:
            if cost.mapped:
                yield cost.chosen[expert], cost.mapped


# In words ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The predicted speed of a plan.

    Attributes:
        seconds: of a decode step of all rows, with full caches.
        rows: that get a token in it.
        bandwidths: that the prediction used, in words.
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
    """The predicted speed of a plan; over hosts, with a token's hops over their link if its speed
    is known."""
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
    """The bandwidths of devices that hold weights, marked where they are assumed."""
    said, holding = [], {each.place for each in plan.ledgers if each.has_weights}
    for budget in budgets:
        if budget.place in holding:
            assumed = "" if budget.bandwidth else "assumed "
            said.append(f"{budget.place} {assumed}{bandwidth(budget) / 1e9:,.4g} GB/s")
    if plan.host_experts:
        said.append(f"link assumed {LINK / 1e9:g} GB/s")
    return ", ".join(said)


def where_experts_are(plan: Plan, costs: Sequence[UnitCost]) -> list[str]:
    """For each device with layers that have routed experts, one line that counts them."""
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

"""How long a decode step is to take, by what it reads: weights, caches, and of routed experts those
that tokens are expected to choose.

Units run one after the other, so that their times add up. Where experts of a unit lie in host
memory, the host computes with them while the card computes with the others and the shared ones;
hidden states go there and come back. What is computed costs nothing beside what is read, as long as
there are few rows. Bandwidths are the budgets' own; where they have none, common ones are assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from exkv.sizes import human

from .plan import Budget, Place, Plan, UnitCost

#: Bytes a second where nobody gave or measured any: of a card with GDDR6X, of a desktop's two
#: channels of DDR5, and of PCIe 4.0 with 16 lanes.
CARD, HOST, LINK = 1000e9, 60e9, 25e9

#: Seconds until a hidden state has reached another device, beside its bytes over the link.
HOP_SECONDS = 20e-6

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of a card, of its host's memory, and of the link between them."""

    card: float
    host: float
    link: float = LINK

    def round_trip(self, hidden: int) -> float:
        """Seconds that hidden states of so many bytes take to the host and back."""
        return 2 * (HOP_SECONDS + hidden / self.link)

    def experts(self, beside: float, expected: float, on_host: Number) -> Number:
        """Seconds that routed and shared experts take, without the round trip.

        Args:
            beside: bytes of shared experts.
            expected: bytes of routed experts that a step reads, wherever they lie.
            on_host: of these, in host memory.
        """
        on_card = (beside + expected - on_host) / self.card
        return np.maximum(on_card, on_host / self.host)


def bandwidth(budget: Budget) -> float:
    """The device's, in bytes a second; assumed where it isn't known."""
    return budget.bandwidth or (HOST if budget.device.type == "cpu" else CARD)


def rates_of(budget: Budget, budgets: Sequence[Budget]) -> Rates:
    """Of a card among these devices."""
    memory = (each for each in budgets if each.place == budget.place.memory)
    host = next(map(bandwidth, memory), HOST)
    return Rates(bandwidth(budget), host)


def expected_bytes(cost: UnitCost, experts: Sequence[int] | None = None) -> float:
    """Of these routed experts, all by default, that a decode step reads."""
    indices = range(len(cost.experts)) if experts is None else experts
    return sum(cost.experts[each] * cost.chosen[each] for each in indices)


def unit_seconds(cost: UnitCost, rates: Rates) -> float:
    """Of a unit on a card, with its experts where the cost says they are."""
    if not cost.host_experts:
        return cost.traffic / rates.card
    expected, on_host = expected_bytes(cost), expected_bytes(cost, cost.host_experts)
    rest = (cost.traffic - cost.beside - expected) / rates.card
    experts = rates.experts(cost.beside, expected, on_host)
    return rest + float(experts) + rates.round_trip(cost.hidden_step)


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


# In words ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan is expected to do.

    Attributes:
        seconds: of a decode step of all rows, with full caches.
        rows: that get a token in it.
        bandwidths: in words, by which that was said.
    """

    seconds: float
    rows: int
    bandwidths: str

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    def __str__(self) -> str:
        rows = "" if self.rows == 1 else f" ({self.rows:,} rows)"
        return f"{self.tokens_per_second:,.3g} tokens/s{rows}"


def expected(
    plan: Plan, costs: Sequence[UnitCost], budgets: Sequence[Budget], rows: int
) -> Expected:
    """What is to be expected of a plan of one machine."""
    return Expected(
        seconds=step_seconds(costs, plan.places, budgets),
        rows=rows,
        bandwidths=in_words(plan, budgets),
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
        on_host = f", {apart:,} on the host ({size})" if apart else ""
        lines.append(f"{ledger.place}: experts: {total - apart:,} of {total:,} there{on_host}")
    return lines

"""Layers on cards with their coldest experts in host memory: the search compared with every
placement of small rigs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sweep import cases

from exkv.planning import Budget, Link, UnitCost
from exkv.planning.expected_time import rates_of
from exkv.planning.ledgers import plan_where
from exkv.planning.plan import CPU
from exkv.planning.search import orders
from exkv.planning.search.bits_apart import BitsApart
from exkv.planning.search.experts import _Coldest, place_experts, with_experts_apart

HOP, LINK = 20e-6, 25e9


def random_rig(
    rng: np.random.Generator, *, alike: bool, host_bandwidth: float = 60e9
) -> tuple[list[UnitCost], list[Budget]]:
    """Up to 4 units, some with 2 to 4 experts, 1 to 3 cards, and a host."""
    count = int(rng.integers(2, 4))
    size, share = int(rng.integers(2, 9)) * 10**5, float(rng.choice([0.05, 0.3, 0.6]))
    scale = int(rng.choice([20, 1000]))
    units = []
    for index in range(int(rng.integers(2, 5))):
        has = index < 2 or (len(units) < 3 and rng.random() < 0.7)
        count = count if alike else int(rng.integers(2, 5))
        sizes = [size] * count if alike else rng.integers(2, 9, count) * 10**5
        shares = [share] * count if alike else rng.random(count)
        experts = tuple(int(n) * scale for n in sizes) if has else ()
        chosen = tuple(map(float, shares)) if has else ()
        dense, cache = (int(rng.integers(1, 5)) * 10**5 * scale for _ in range(2))
        read = sum(n * p for n, p in zip(experts, chosen, strict=True))
        units.append(
            UnitCost(
                name=str(index),
                weights=dense + sum(experts),
                cache=cache,
                workspace={"cuda": int(rng.integers(1, 4)) * 10**5 * scale, "cpu": 10**5},
                traffic=round(dense + cache + read),
                hidden_step=8192,
                experts=experts,
                chosen=chosen,
            )
        )
    total = sum(unit.weights + unit.cache for unit in units)
    cards = int(rng.integers(1, 4))
    budgets = [
        Budget(
            device=torch.device("cuda", card),
            capacity=int(total * rng.uniform(0.4, 1.0) / cards),
            bandwidth=float(rng.choice([300e9, 1000e9])),
        )
        for card in range(cards)
    ]
    host = int(total * rng.choice([0.4, 0.7, 1.0, 2.0]))
    return units, [*budgets, Budget(device=CPU, capacity=host, bandwidth=host_bandwidth)]


def every_subset(
    unit: UnitCost, card: Budget, host: Budget
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For all sets of a unit's experts in host memory: bytes, seconds of the unit, and whether the
    set is non-empty."""
    nbytes, seconds = [], []
    read = sum(n * p for n, p in zip(unit.experts, unit.chosen, strict=True))
    for apart in itertools.product([False, True], repeat=len(unit.experts)):
        trio = list(zip(unit.experts, unit.chosen, apart, strict=True))
        far = sum(n * p for n, p, there in trio if there)
        counts = counts_of(unit.chosen, apart)
        longer = longer_of(read, far, card.bandwidth, host.bandwidth, counts)
        trip = 2 * (HOP + unit.hidden_step / LINK)
        rest = (unit.traffic - read) / card.bandwidth
        nbytes.append(sum(n for n, _, there in trio if there))
        seconds.append(rest + (longer + trip if any(apart) else read / card.bandwidth))
    return np.array(nbytes), np.array(seconds), np.array(nbytes) > 0


def counts_of(shares: tuple[float, ...], apart: tuple[bool, ...]) -> dict[int, float]:
    """How many of a step's experts are in host memory -> its probability, from all sets."""
    found: dict[int, float] = {}
    for some in itertools.combinations(range(len(shares)), max(round(sum(shares)), 1)):
        odds = math.prod(shares[each] / (1 - shares[each]) for each in some)
        count = sum(apart[each] for each in some)
        found[count] = found.get(count, 0.0) + odds
    return {count: odds / sum(found.values()) for count, odds in found.items()}


def longer_of(read: float, far: float, card: float, host: float, counts: dict[int, float]) -> float:
    """Mean seconds until the later of card and host has finished."""
    mean = sum(count * p for count, p in counts.items())
    parts = {far / mean * count if mean else 0.0: p for count, p in counts.items()}
    return sum(p * max(HOP + (read - b) / card, b / host) for b, p in parts.items())


def sums(parts: list[np.ndarray]) -> np.ndarray:
    """Sums over every choice of one element from each."""
    total = np.zeros(1)
    for part in parts:
        total = (total[:, None] + part[None, :]).ravel()
    return total


def on_card(units: list[UnitCost], card: Budget, host: Budget) -> tuple[np.ndarray, np.ndarray]:
    """Bytes in host memory and seconds, for all sets of experts with which the units fit."""
    if not units:
        return np.zeros(1), np.zeros(1)
    subsets = [every_subset(unit, card, host) for unit in units]
    nbytes, seconds = (sums([each[part] for each in subsets]) for part in (0, 1))
    held = sum(unit.weights + unit.cache for unit in units)
    peak = max(unit.workspace["cuda"] for unit in units)
    # The buffers are for the largest expert of units that have any in host memory.
    staging = np.zeros(1)
    for unit, (_, _, some) in zip(units, subsets, strict=True):
        own = 2 * max(unit.experts, default=0) * some
        staging = np.maximum(staging[:, None], own[None, :]).ravel()
    fits = held - nbytes + staging + peak <= card.capacity
    return nbytes[fits], seconds[fits] + HOP


def by_force(units: list[UnitCost], budgets: list[Budget], order: str) -> float:
    """The fewest seconds of a step, infinite where nothing fits."""
    best = np.inf
    rows = itertools.permutations(budgets) if order == "any" else [budgets]
    for row in rows:
        for cuts in itertools.combinations_with_replacement(range(len(units) + 1), len(row) - 1):
            stops = [*cuts, len(units)]
            parts = [units[a:b] for a, b in zip([0, *stops], stops, strict=False)]
            best = min(best, seconds_of(list(zip(parts, row, strict=True))))
    return best


def seconds_of(parts: list[tuple[list[UnitCost], Budget]]) -> float:
    nbytes, seconds, room = [], [], 0
    host = next(budget for _, budget in parts if budget.device == CPU)
    for units, budget in parts:
        if budget.device != CPU:
            found = on_card(units, budget, host)
            nbytes.append(found[0])
            seconds.append(found[1])
            continue
        room = budget.capacity
        if units:
            room -= sum(unit.weights + unit.cache for unit in units)
            room -= max(unit.workspace["cpu"] for unit in units)
            seconds.append(np.array([sum(unit.traffic for unit in units) / host.bandwidth + HOP]))
            nbytes.append(np.zeros(1))
    fits = sums(nbytes) <= room
    return float(sums(seconds)[fits].min(initial=np.inf))


@pytest.mark.parametrize("alike", [True, False])
def test_every_placement_of_500_small_rigs_is_no_faster(alike):
    rng = np.random.default_rng(39 + alike)
    exact = refused = missed = apart = 0
    for number in range(500):
        units, budgets = random_rig(rng, alike=alike)
        order = ("listed", "any")[number % 2]
        found, best = place_experts(units, budgets, order), by_force(units, budgets, order)
        if found is None:
            refused, missed = refused + 1, missed + (best < np.inf)
            continue
        assert found.seconds >= best * (1 - 1e-9), number
        assert found.seconds * (1 - found.gap) <= best * (1 + 1e-9), number
        exact += found.gap == 0
        apart += any(found.experts.values())
        assert_fits(units, budgets, found.where, found.experts)
    assert apart > 40 and refused < 300
    assert missed <= (0 if alike else 3), "unlike experts that would fit to within one"
    assert exact > (220 if alike else 100)


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_said_of_orders_that_were_not_tried_is_a_bound(alike, monkeypatch):
    """In 30 small rigs (240 in a sweep), also with hosts about as fast as their cards, which read
    beside them, one order is tried, and every placement in any order is compared with its bound."""
    monkeypatch.setattr(orders, "MAX_STATES", 0)
    rng, beside = np.random.default_rng(10), 0
    for number in range(cases(30, 240)):
        speed = float(rng.choice([60e9, 900e9]))
        units, budgets = random_rig(rng, alike=alike, host_bandwidth=speed)
        found, best = place_experts(units, budgets, "any"), by_force(units, budgets, "any")
        if found is not None:
            assert found.seconds * (1 - found.gap) <= best * (1 + 1e-9), number
            fastest = max(budget.bandwidth for budget in budgets)
            beside += best < sum(unit.traffic for unit in units) / fastest
    assert beside, "some are faster than the fastest card with everything"


def over_hosts(
    units: list[UnitCost], hosts: list[list[Budget]], link: Link
) -> tuple[float, list[int]]:
    """The fewest seconds of a step over hosts one after the other, each with its own memory, and
    the number of units on each; infinite where nothing fits."""
    best, counts = np.inf, []
    for cuts in itertools.combinations_with_replacement(range(len(units) + 1), len(hosts) - 1):
        stops = [*cuts, len(units)]
        parts = [units[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        seconds = [by_force(part, host, "listed") for part, host in zip(parts, hosts, strict=True)]
        hops = sum(map(bool, parts)) - 1
        total = sum(seconds) + hops * link.seconds(max(unit.hidden_step for unit in units))
        if total < best:
            best, counts = total, list(map(len, parts))
    return best, counts


@pytest.mark.parametrize("alike", [True, False])
def test_every_placement_over_two_hosts_with_memory_of_their_own_is_no_faster(alike):
    rng, link = np.random.default_rng(4 + alike), Link(bandwidth=1e9, latency=1e-4)
    exact, refused, missed, apart_on = 0, 0, 0, set[str]()
    for number in range(cases(25, 200)):
        units, budgets = random_rig(rng, alike=alike)
        total = sum(unit.weights + unit.cache for unit in units)
        hosts = [
            [
                replace(budgets[at], capacity=int(total * rng.uniform(0.3, most)), host=name)
                for at, most in ((0, 0.6), (-1, 0.9))
            ]
            for name in ("a", "b")
        ]
        found = place_experts(units, list(itertools.chain(*hosts)), link=link)
        best, _ = over_hosts(units, hosts, link)
        if found is None:
            refused, missed = refused + 1, missed + (best < np.inf)
            continue
        assert found.seconds >= best * (1 - 1e-9), number
        assert found.seconds * (1 - found.gap) <= best * (1 + 1e-9), number
        exact += found.gap == 0
        apart_on |= {found.where[unit].host for unit, those in found.experts.items() if those}
        apart = [with_experts_apart(u, found.experts.get(i, ())) for i, u in enumerate(units)]
        assert plan_where(
            apart, list(itertools.chain(*hosts)), found.where, "pack", "listed"
        ).fits, number
    assert exact > 4 and apart_on == {"a", "b"}
    assert refused < number // 2 and missed <= 1 + number // 20


def in_bits(rng: np.random.Generator, units: list[UnitCost]) -> list[list[UnitCost]]:
    """Options of units: unchanged, and with weights of fewer bits, for some experts possibly fewer
    than for others."""
    found = []
    for unit in units:
        options = [unit]
        for kept, part in (("int8", 2), ("int4", 4)):
            parts = [part * int(rng.integers(1, 3)) for _ in unit.experts]
            experts = tuple(n // each for n, each in zip(unit.experts, parts, strict=True))
            dense = (unit.weights - sum(unit.experts)) // part
            read = sum(n * p for n, p in zip(experts, unit.chosen, strict=True))
            options.append(
                replace(
                    unit,
                    weights=dense + sum(experts),
                    traffic=round(dense + unit.cache + read),
                    experts=experts,
                    kept=kept,
                    loss=float(rng.random() * part),
                )
            )
        found.append(options)
    return found


def loss_of(costs: Sequence[UnitCost], without: float = 0.0) -> float:
    return sum(cost.loss for cost in costs) if costs else without


@pytest.mark.parametrize("alike", [True, False])
def test_bits_and_places_are_chosen_together_as_every_choice_of_small_rigs_says(alike):
    rng = np.random.default_rng(41 + alike)
    exact = refused = missed = unlike = 0
    for number in range(40):
        units, budgets = random_rig(rng, alike=alike)
        options = in_bits(rng, units[:3])
        scarce = rng.uniform(0.2, 0.9)
        budgets = [replace(each, capacity=int(each.capacity * scarce)) for each in budgets]
        order = ("listed", "any")[number % 2]
        search = BitsApart(options, budgets, order)
        search.search(np.inf)
        every = sorted(itertools.product(*options), key=loss_of)
        fitting = (each for each in every if by_force(list(each), budgets, order) < np.inf)
        best = loss_of(next(fitting, ()), np.inf)
        assert search.least <= best * (1 + 1e-9), number
        if search.costs is None:
            refused, missed = refused + 1, missed + (best < np.inf)
            continue
        found = loss_of(search.costs)
        assert found >= best * (1 - 1e-9), number
        placed = place_experts(search.costs, budgets, order)
        assert placed is not None
        assert_fits(search.costs, budgets, placed.where, placed.experts)
        exact += found <= best * (1 + 1e-9)
        unlike += len({cost.kept for cost in search.costs}) > 1
    assert exact > 25 and refused < 15 and not missed and unlike > 10


def test_no_set_of_experts_is_below_the_bound():
    rng, below = np.random.default_rng(39), 0
    for _ in range(100):
        units, budgets = random_rig(rng, alike=False)
        card, host, rates = budgets[0], budgets[-1], rates_of(budgets[0], budgets)
        for unit in (unit for unit in units if unit.experts):
            least = _Coldest.least_of(unit, rates)
            corners = [0, *(after for *_, after in least.parts)]
            freed, seconds = least.freed[corners], least.seconds[corners]
            for nbytes, took, some in zip(*every_subset(unit, card, host), strict=True):
                more = took - unit.traffic / card.bandwidth
                bound = min(np.interp(nbytes, freed, seconds), *seconds[freed >= nbytes])
                assert bound <= more + 1e-12
                below += bool(some and bound > more - 0.1 * took)
    assert below > 100, "bounds are near"


def assert_fits(units, budgets, where, experts):
    apart = [with_experts_apart(unit, experts.get(i, ())) for i, unit in enumerate(units)]
    plan = plan_where(apart, budgets, where, "pack", "listed")
    assert plan.fits
    held = sum(unit.weights + unit.host_weights for unit in plan.units)
    assert held == sum(unit.weights for unit in units)
    on_host = next(ledger for ledger in plan.ledgers if ledger.device == CPU)
    whole = sum(unit.weights for unit in plan.units if unit.device == CPU)
    assert on_host.weights == whole + sum(unit.host_weights for unit in plan.units)

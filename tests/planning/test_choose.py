"""The least lossy options that fit, compared with all combinations on all contiguous ranges."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exkv.planning.plan import Budget, Place, UnitCost
from exkv.planning.search.choose import least_lossy_units
from exkv.planning.search.placement import fits_units, place_units

KEPT = ("as stored", "int8", "int4")


def brute_force(options, budgets, order) -> float:
    """The least loss over all combinations for which the planner finds a placement."""
    tied = {0, len(options) - 1} if options[-1][0].shared else set()
    least = math.inf
    for chosen in itertools.product(*options):
        loss = sum(cost.loss for cost in chosen)
        alike = len({cost.kept for i, cost in enumerate(chosen) if i in tied}) <= 1
        if alike and loss < least and fits_units(chosen, budgets, order):
            least = loss
    return least


@st.composite
def cases(draw):
    """Up to five units, the last possibly tied to the first, which may be pinned to the memory of
    the first of one or two hosts."""
    count = draw(st.integers(1, 5))
    number = st.integers(0, 12)
    tied = count > 1 and draw(st.booleans())
    pinned = Place(torch.device("cpu"), "a") if draw(st.booleans()) else None
    sizes = [[draw(number) for _ in KEPT] for _ in range(count)]
    if tied:
        sizes[-1] = sizes[0]
    caches = [{"cache": draw(number) // 4, "host_cache": draw(number) // 6} for _ in range(count)]
    shares = _shared_caches(draw, caches)
    options = [
        [
            UnitCost(
                name=f"unit {index}",
                weights=size,
                **caches[index],
                shared_cache=shares[index],
                workspace={"meta": draw(number), "cpu": draw(number)},
                logits=0 if index < count - 1 else 1,
                shared={0: size} if tied and index == count - 1 else {},
                pinned=pinned if index == 0 else None,
                kept=kept,
                hidden=3,
                loss=draw(st.integers(0, 9)) * (position > 0),
            )
            for position, (kept, size) in enumerate(zip(KEPT, each, strict=True))
        ]
        for index, each in enumerate(sizes)
    ]
    devices = [f"meta:{index}" for index in range(draw(st.integers(1, 3)))]
    devices += ["cpu"] * draw(st.booleans())
    first = draw(st.integers(1, len(devices)))  # devices of the first of two hosts
    budgets = [
        Budget(
            device=torch.device(name),
            host="a" if position < first else "b",
            capacity=draw(st.integers(0, 40)),
            promised_workspace=draw(st.integers(0, 5)),
        )
        for position, name in enumerate(devices)
    ]
    return options, budgets, draw(st.sampled_from(["listed", "any"]))


def _shared_caches(draw, caches) -> list[dict[int, tuple[int, int]]]:
    """For each unit, possibly an earlier one whose keys and values it shares."""
    shares: list[dict[int, tuple[int, int]]] = []
    for index, own in enumerate(caches):
        reads = index - 1 - draw(st.integers(0, 2))
        if reads < 1 or any(reads in other for other in shares):  # another one lies between
            own["cache"] += draw(st.sampled_from([0, 0, 10]))
            shares.append({})
            continue
        own |= caches[reads]
        shares.append({reads: (own["cache"], own["host_cache"])})
    return shares


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_combination_that_fits_loses_less(case):
    options, budgets, order = case
    found = least_lossy_units(options, budgets, order)
    least = brute_force(options, budgets, order)
    if found is None:
        assert least == math.inf
        return
    assert sum(cost.loss for cost in found) == least
    place_units(found, budgets, order=order)  # raises where they have no place


def test_where_orders_are_too_many_options_are_chosen_in_one_that_fits():
    """Twenty unlike cards, so small that the first unit only fits on the last of them."""
    cards = [Budget(device=torch.device("meta", i), capacity=21 + i) for i in range(20)]
    options = [
        [
            UnitCost(
                name=f"unit {index}",
                weights=(40 if index == 0 else 20) // (1 + position),
                cache=0,
                workspace={"meta": 0},
                kept=kept,
                loss=float(position),
            )
            for position, kept in enumerate(KEPT)
        ]
        for index in range(20)
    ]
    found = least_lossy_units(options, cards, "any")
    assert found is not None and sum(cost.loss for cost in found) <= 1
    assert place_units(found, cards, order="any").fits
    assert least_lossy_units([options[0]] * 60, cards, "any") is None

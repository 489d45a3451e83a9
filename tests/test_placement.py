"""The planner's arithmetic: pure functions on bytes, compared with trying every placement."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exkv import PlacementError
from exkv.placement import Budget, UnitCost, human, place

CPU = torch.device("cpu")
# Devices that needn't exist: nothing is put there.
CARDS = [torch.device("meta", index) for index in range(3)]


def cost(name="u", weights=10, cache=0, workspace=0, **more) -> UnitCost:
    peaks = {"meta": workspace, "cpu": workspace}
    return UnitCost(name=name, weights=weights, cache=cache, workspace=peaks, **more)


def budgets(*sizes: int, reserve: int = 0) -> list[Budget]:
    return [
        Budget(device=device, available=size, reserve=reserve)
        for device, size in zip(CARDS, sizes, strict=False)
    ]


def test_devices_are_filled_in_order():
    plan = place([cost()] * 5, budgets(20, 10, 99))
    assert plan.devices == (CARDS[0], CARDS[0], CARDS[1], CARDS[2], CARDS[2])
    assert [ledger.headroom for ledger in plan.ledgers] == [0, 0, 79]


def test_weights_and_caches_add_up_and_workspaces_share():
    plan = place([cost(cache=3, workspace=5), cost(cache=4, workspace=7)], budgets(34))
    (ledger,) = plan.ledgers
    assert (ledger.weights, ledger.cache, ledger.workspace) == (20, 7, 7)
    assert ledger.total == 34
    with pytest.raises(PlacementError):
        place([cost(cache=3, workspace=5), cost(cache=4, workspace=7)], budgets(33))


def test_a_reserve_and_a_cap_shrink_the_limit():
    assert Budget(device=CPU, available=100, reserve=30).limit == 70
    assert Budget(device=CPU, available=100, reserve=30, cap=50).limit == 50
    assert Budget(device=CPU, available=10, reserve=30).limit == 0
    assert place([cost()] * 3, budgets(20, 30, reserve=10)).devices == (CARDS[0], *CARDS[1:2] * 2)


def test_a_tied_tensor_costs_nothing_beside_its_twin():
    units = [cost(), cost(), cost(weights=12, shared={0: 10})]
    assert place(units, budgets(22)).ledgers[0].weights == 22
    assert place(units, budgets(20, 12)).ledgers[1].weights == 12
    with pytest.raises(PlacementError):
        place(units, budgets(20, 11))


def test_a_pinned_unit_stands_on_its_device_and_takes_from_no_other():
    plan = place([cost(pinned=CPU), cost(), cost()], budgets(20))
    assert plan.devices == (CPU, CARDS[0], CARDS[0])
    assert {ledger.device: ledger.weights for ledger in plan.ledgers} == {CARDS[0]: 20, CPU: 10}


def test_what_stands_already_stays_and_is_not_counted_again():
    plan = place([cost()] * 4, budgets(99, 20)[1:], placed=[CARDS[0]] * 2)
    assert plan.devices == (CARDS[0], CARDS[0], CARDS[1], CARDS[1])
    assert plan.ledgers[0].weights == 20


def test_the_error_names_unit_device_and_numbers():
    with pytest.raises(PlacementError, match="no room for third") as caught:
        place([cost(), cost(), cost("third", cache=2)], budgets(10, 15))
    error = caught.value
    assert (error.unit, error.device, error.needed, error.available) == (
        "third",
        "meta:1",
        22,
        15,
    )
    assert "22 bytes" in str(error) and "15 for this model, 7 too few" in str(error)


sizes = st.integers(0, 12)
units = st.lists(
    st.builds(cost, weights=sizes, cache=sizes, workspace=sizes), min_size=1, max_size=5
)


def total(run: list[UnitCost]) -> int:
    workspace = max((c.workspace["meta"] for c in run), default=0)
    return sum(c.weights + c.cache for c in run) + workspace


@given(units, st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_a_plan_is_found_exactly_when_there_is_one(costs, limits):
    """Against every way to cut the units into runs in device order."""

    def fits(cuts: tuple[int, ...]) -> bool:
        bounds = (0, *cuts, len(costs))
        runs = [costs[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        return all(
            sum(c.weights + c.cache for c in run)
            + max((c.workspace["meta"] for c in run), default=0)
            <= limit
            for run, limit in zip(runs, limits, strict=True)
        )

    places = range(len(costs) + 1)
    possible = any(
        fits(cuts) for cuts in itertools.combinations_with_replacement(places, len(limits) - 1)
    )
    try:
        plan = place(costs, budgets(*limits))
    except PlacementError as error:
        assert not possible
        assert error.needed > error.available
        return
    assert possible
    order = [CARDS.index(device) for device in plan.devices]
    assert order == sorted(order)
    for ledger, limit in zip(plan.ledgers, limits, strict=True):
        here = [c for c, device in zip(costs, plan.devices, strict=True) if device == ledger.device]
        assert ledger.total == total(here) <= limit


def test_human_sizes():
    assert [human(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]

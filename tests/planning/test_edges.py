"""Plans at the edges: pinned units beside overflow, a host that isn't offered, rows that add no
token, and every small placement compared with all possible ones."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from simproc import run_sim
from tiny import LLAMA_70B, llama, reference, save

from exkv import Cache, Model, PlacementError, place, sim
from exkv.planning import Budget, Place, UnitCost, make_budgets
from exkv.planning.ledgers import plan_where
from exkv.planning.search.placement import fits_units, place_units

CPU = torch.device("cpu")
HOST = Place(CPU)
IDS = torch.randint(3, 320, (4, 30), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(reference(llama()), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    file = tmp_path_factory.mktemp("large") / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return file.parent


# The host ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["pack", "balance", "fewest"])
def test_embedding_on_the_host_beside_unused_overflow(folder, objective):
    model = Model(folder, embed_cpu=True)
    plan = place(model, Cache(model, 40), "24G", objective, cpu="8G")
    assert list(map(str, plan.devices)) == ["cpu", *["cuda:0"] * 5]


def test_draft_is_not_placed_on_an_absent_host(folder, large):
    main, draft = Model(folder, embed_cpu=True), Model(large)
    plan = place(main, Cache(main, 40), "1G")
    with pytest.raises(PlacementError, match="no room for"):
        place(draft, Cache(draft, 40), beside=plan)
    assert [str(budget.device) for budget in plan.remaining()] == ["cuda:0"]


# The promise ------------------------------------------------------------------------------------


def rows_without_a_token(folder):
    """Calls of at most one token per row, with none in some, on a card cut to the byte."""
    outcomes = []
    for rows, length, last in itertools.product((2, 4), (1, 2), (False, True)):
        sim.set_capacity(0, 1 << 23)
        model = Model(folder)
        cache = Cache(model, length, rows)
        plan = place(model, cache, last_id_only=last)
        sim.set_capacity(0, plan.ledgers[0].total)
        model.load(plan=plan)
        kept = None
        for new in itertools.product((0, 1), repeat=rows):
            if any(new):
                cache.reset()
                kept = model.forward(IDS[:rows, :1], cache, new_lens=list(new), last_id_only=last)
        del kept
        outcomes.append(model.report.surprises())
        cache = None
        model.unload()
    return outcomes


def test_rows_that_bring_no_token_are_promised_too(folder):
    assert run_sim(rows_without_a_token, "8M", args=[folder]) == [[]] * 8


# Against all placements -------------------------------------------------------------------------


def drawn(rng: random.Random) -> tuple[list[UnitCost], list[Budget]]:
    count = rng.randrange(2, 6)
    costs = []
    for index in range(count):
        tied = {0: 3} if index == count - 1 and rng.random() < 0.4 else {}
        costs.append(
            UnitCost(
                name=f"u{index}",
                weights=rng.randrange(3, 12),
                cache=rng.randrange(5) if 0 < index < count - 1 else 0,
                workspace={"cuda": rng.randrange(6), "cpu": rng.randrange(6)},
                logits=rng.randrange(3) if index == count - 1 else 0,
                traffic=rng.randrange(1, 9),
                shared=tied,
                pinned=HOST if index == 0 and rng.random() < 0.3 else None,
                host_cache=rng.randrange(3) if 0 < index < count - 1 else 0,
            )
        )
    budgets = [
        Budget(
            device=torch.device("cuda", i),
            capacity=rng.randrange(10, 60),
            promised_workspace=rng.choice([0, 0, 4]),
            bandwidth=float(rng.randrange(1, 9)),
        )
        for i in range(rng.randrange(1, 4))
    ]
    if rng.random() < 0.4:
        budgets.append(Budget(device=CPU, capacity=rng.randrange(5, 60), bandwidth=1.0))
    return costs, budgets


def all_plans(costs, budgets, order):
    """Every contiguous placement that fits, by trying all cuts and all orders of devices."""
    free = [i for i, cost in enumerate(costs) if cost.pinned is None]
    orders = [budgets] if order == "listed" else itertools.permutations(budgets)
    seen = set()
    for devices in orders:
        for cuts in itertools.combinations_with_replacement(range(len(free) + 1), len(devices) - 1):
            bounds = [0, *cuts, len(free)]
            where = [cost.pinned for cost in costs]
            for budget, (start, stop) in zip(devices, itertools.pairwise(bounds), strict=True):
                for index in free[start:stop]:
                    where[index] = budget.place
            if tuple(where) not in seen:
                seen.add(tuple(where))
                plan = plan_where(costs, budgets, where, "pack", order)
                if plan.fits:
                    yield plan


def on_the_host(plan) -> int:
    """Bytes on the overflow; its floor alone doesn't count."""
    free = [u for u in plan.units if u.device == CPU]
    return sum(u.weights + u.cache + u.logits for u in free)


def value(plan, objective, costs) -> tuple:
    """The value that the objective minimizes, after the overflow."""
    cards = [ledger for ledger in plan.ledgers if ledger.units and ledger.device.type != "cpu"]
    if objective == "balance":
        return (-min((ledger.headroom for ledger in cards), default=0),)
    if objective == "fewest":
        return (len({unit.device for unit in plan.units}),)
    return ()


@pytest.mark.parametrize("order", ["listed", "any"])
@pytest.mark.parametrize("objective", ["pack", "balance", "fewest"])
def test_no_placement_is_better_than_the_plan(objective, order):
    rng, outcomes, wrong = random.Random(11), {"placed": 0, "refused": 0}, []
    for case in range(400):
        costs, budgets = drawn(rng)
        fitting = list(all_plans(costs, budgets, order))
        assert fits_units(costs, budgets, order) == bool(fitting), case
        try:
            plan = place_units(costs, budgets, objective=objective, order=order)
        except PlacementError as error:
            outcomes["refused"] += 1
            if fitting or error.needed <= error.available:
                wrong.append((case, "refused", [p.devices for p in fitting]))
            continue
        outcomes["placed"] += 1
        if not plan.fits or plan.devices not in {p.devices for p in fitting}:
            wrong.append((case, "does not fit", plan.devices))
            continue
        cards_only = not any(budget.device == CPU for budget in budgets)
        best = min(value(p, objective, costs) for p in fitting)
        if cards_only and value(plan, objective, costs) != best:
            wrong.append((case, objective, plan.devices, best))
        if not cards_only and on_the_host(plan) > 0:
            without = [p for p in fitting if not any(
                unit.device == CPU and cost.pinned is None
                for unit, cost in zip(p.units, costs, strict=True))]  # fmt: skip
            mine = [u for u, c in zip(plan.units, costs, strict=True)
                    if u.device == CPU and c.pinned is None]  # fmt: skip
            if without and mine:
                wrong.append((case, "overflow though cards have room", plan.devices))
    assert wrong == []
    assert min(outcomes.values()) >= 40


# What is typed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("24", "24 bytes.*24G"),
        ("24G,cuda:1", "'cuda:1'.*sizes of cards and names of devices"),
        ("24G,,12G", "item 2 of .*is empty"),
        ("0x24G", "'0x24G'"),
        ("24G,24X", "'24X'"),
    ],
)
def test_invalid_devices_are_named(devices, message):
    with pytest.raises(ValueError, match=message):
        make_budgets(devices)


def test_equal_cards_can_be_counted():
    sizes = [budget.capacity >> 30 for budget in make_budgets("2x24G,8G")]
    assert sizes == [24, 24, 8]
    assert [str(b.device) for b in make_budgets("2x24G,8G")] == ["cuda:0", "cuda:1", "cuda:2"]


def test_list_per_device_must_match_the_devices():
    with pytest.raises(ValueError, match="reserve names 1 device, and there are 2: cuda:0, cuda:1"):
        make_budgets("24G,24G", reserve=[1 << 30])
    with_host = make_budgets("24G,24G", reserve="1G,2G", cpu="8G")  # the host is not a card
    assert [budget.reserve >> 30 for budget in with_host] == [1, 2, 0]
    assert [budget.reserve for budget in make_budgets("24G,24G", reserve=5)] == [5, 5]

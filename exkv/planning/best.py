"""``weights="best"``: of all ways of keeping each unit's weights, those that lose least and fit.

Options and their ledger lines come from here, the search among them is ``search.choose``'s.
``least_lossy_with_cache`` chooses the cache too: what a kind of cache loses over all layers counts
as what weights lose (``exkv.weights.choice`` says what that is).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from exkv.cache import BY_LOSS, CACHES
from exkv.errors import PlacementError
from exkv.weights.choice import Choice
from exkv.weights.on_load import AS_STORED, OPTIONS

from .fitting import fitted
from .host_experts import with_host_experts
from .plan import PlacedUnit, Plan, UnitCost
from .scenario import Scenario, Workload
from .search.choose import least_lossy_units
from .solve import plans_for


def planned(scenario: Scenario) -> tuple[Scenario, tuple[Plan, ...], list[list[UnitCost]]]:
    """The scenario with all chosen that it leaves open, a plan for each workload, and the costs;
    PlacementError, as of ``exkv.planning.solve.plans_for``, where nothing fits."""
    usual = with_host_experts(_with_weights(scenario))
    costs = usual.costs(usual.peaks())
    with contextlib.suppress(PlacementError):
        return usual, usual.attempt(costs), costs
    scenario = settled(scenario)
    costs = scenario.costs(scenario.peaks())
    return scenario, plans_for(scenario, costs), costs


def settled(scenario: Scenario) -> Scenario:
    """The scenario with all chosen that it leaves open: how calls run, by ``fitting``, then the
    weights of each model, and which experts lie in host memory. Where nothing fits, the weights
    have the fewest bits, so that a refusal says what lacks even then."""
    sized = fitted(scenario, lambda way: _in_fewest_bits(way).fits())
    return with_host_experts(_with_weights(sized))


def _with_weights(scenario: Scenario) -> Scenario:
    """With the weights chosen of each model that leaves them open, one model after the other, as
    they are placed."""
    for position in scenario.placing:
        if scenario.workloads[position].model.losses() is not None:
            scenario = _settle(scenario, position)
    return scenario


def _in_fewest_bits(scenario: Scenario) -> Scenario:
    """With the weights that are open as small as can be."""
    return scenario.each(_smallest)


def _smallest(workload: Workload) -> Workload:
    if (losses := workload.model.losses()) is None or workload.model.choice is not None:
        return workload
    fewest = Choice.of(losses, dict.fromkeys(losses.units, OPTIONS[-1]))
    return replace(workload, model=workload.model.chosen(fewest))


def _settle(scenario: Scenario, position: int) -> Scenario:
    workload = scenario.workloads[position]
    options = unit_options(workload, scenario)
    costs = least_lossy_units(options, scenario.budgets_of(position), scenario.order)
    costs = costs or [min(each, key=lambda cost: cost.weights) for each in options]
    choice = Choice(
        kept={cost.name: cost.kept or AS_STORED for cost in costs},
        loss={cost.name: cost.loss for cost in costs},
    )
    workloads = list(scenario.workloads)
    workloads[position] = replace(workload, model=workload.model.chosen(choice))
    return replace(scenario, workloads=tuple(workloads))


def unit_options(workload: Workload, scenario: Scenario) -> list[list[UnitCost]]:
    """Of each unit, its ledger lines in all ways in which its weights can be kept."""
    losses = workload.model.losses()
    assert losses is not None
    ways = []
    for option in OPTIONS:
        variant = workload.model.chosen(Choice.of(losses, dict.fromkeys(losses.units, option)))
        there = replace(workload, model=variant)
        ways.append((there, there.peaks(scenario.budgets)))
    sizes = frozenset().union(*(there.allocated_sizes(peaks) for there, peaks in ways))
    costs = [there.costs(peaks, scenario.home, sizes) for there, peaks in ways]
    return [list(each) for each in zip(*costs, strict=True)]


def least_lossy_with_cache(scenario: Scenario) -> tuple[str, Scenario] | None:
    """The kind of cache, of those that keep every token on its layer's device, and the weights
    that lose least together; None where nothing fits."""
    found: list[tuple[float, str, Scenario]] = []
    for name in BY_LOSS:
        lost = sum(losses.caches[name] for w in scenario.workloads if (losses := w.model.losses()))
        if found and lost >= min(found)[0]:
            continue
        tried = settled(scenario.as_kind(CACHES[name]))
        if tried.fits():
            found.append((lost + weights_loss(tried), name, tried))
    if not found:
        return None
    _, name, best = min(found, key=lambda each: each[0])
    return name, best


def weights_loss(scenario: Scenario) -> float:
    """The sum over all units of all models."""
    chosen = (workload.model.choice for workload in scenario.workloads)
    return sum(sum(choice.loss.values()) for choice in chosen if choice)


# In words ---------------------------------------------------------------------------------------


def given_up(plan: Plan) -> list[str]:
    """What the weights are kept as, a line a device; none for a plan that has not chosen."""
    lines = []
    for ledger in plan.ledgers:
        units = [u for u in plan.units if u.place == ledger.place and u.kept is not None]
        if units:
            loss = sum(unit.loss for unit in units)
            lines.append(f"{ledger.place}: {', '.join(_ranges(units))}; loss {100 * loss:.2g} %")
    return lines


def _ranges(units: Sequence[PlacedUnit]) -> Iterator[str]:
    """Neighbours that are kept alike."""
    for kept, group in groupby(units, key=lambda unit: unit.kept):
        names = [unit.name.rpartition(".")[2] for unit in group]
        layers = [name for name in names if name.isdigit()]
        first, last = (layers or [""])[0], (layers or [""])[-1]
        said = {
            "embedding": names[0] == "embed_tokens",
            f"layer {first}": len(layers) == 1,
            f"layers {first}-{last}": len(layers) > 1,
            "head": names[-1] == "lm_head",
        }
        yield f"{' and '.join(words for words, so in said.items() if so)} {kept}"

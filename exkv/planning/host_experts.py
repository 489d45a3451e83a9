"""Models whose layers are on cards while some of their experts lie in host memory: in place of
whole layers there, for models with routed experts that are larger than the cards.

``search.experts`` finds the placement from the units' costs with all their experts; here it is
checked against their costs without, segments and workspaces included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exkv.caching_allocator import ROUND_LARGE

from .ledgers import plan_where
from .plan import Budget, Place, UnitCost, without_memory
from .scenario import Scenario, Workload
from .search.experts import place_experts
from .search.placement import fits_units

#: Searches, each with less room on the cards that turned out to be too full.
_TRIES = 8


def with_host_experts(scenario: Scenario) -> Scenario:
    """The scenario with experts in host memory for each model that needs it, one model after the
    other in placement order; unchanged where it may not have any, or nothing fits that way
    either."""
    for position in scenario.placing:
        if scenario.may_have_host_experts(position) and not scenario.workloads[position].where:
            scenario = _with_experts_settled(scenario, position)
    return scenario


def _with_experts_settled(scenario: Scenario, position: int) -> Scenario:
    workload, budgets = scenario.workloads[position], scenario.budgets_of(position)
    costs = workload.costs(workload.peaks(budgets), scenario.home)
    cards = without_memory(budgets)
    if fits_units(costs, cards, scenario.order):
        return scenario
    found = _placed(workload, costs, budgets, scenario)
    if found is None:
        return scenario
    workloads = list(scenario.workloads)
    workloads[position] = found
    return replace(scenario, workloads=tuple(workloads))


def _placed(
    workload: Workload, costs: Sequence[UnitCost], budgets: Sequence[Budget], scenario: Scenario
) -> Workload | None:
    """The workload with experts in host memory and all units placed; None where nothing fits."""
    lacking: dict[Place, int] = {}
    for _ in range(_TRIES):
        smaller = [_reduced_budget(budget, lacking.get(budget.place, 0)) for budget in budgets]
        found = place_experts(costs, smaller, scenario.order, scenario.link)
        if found is None:
            return None
        experts = {costs[i].name: frozenset(those) for i, those in found.experts.items()}
        model = workload.model.with_host_experts(experts)
        there = replace(workload, model=model, where=found.where, gap=found.gap)
        now = there.costs(there.peaks(budgets), scenario.home)
        plan = plan_where(now, budgets, found.where, scenario.objective, scenario.order)
        if plan.fits:
            return there
        for ledger in plan.ledgers:
            if ledger.used and ledger.headroom < 0:
                more = ROUND_LARGE if ledger.budget.segmented else 0
                lacking[ledger.place] = lacking.get(ledger.place, 0) - ledger.headroom + more
    return None


def _reduced_budget(budget: Budget, nbytes: int) -> Budget:
    """The budget reduced by ``nbytes``."""
    cap = None if budget.cap is None else max(budget.cap - nbytes, 0)
    return replace(budget, reserve=budget.reserve + nbytes, cap=cap)

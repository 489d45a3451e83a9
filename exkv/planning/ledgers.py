"""The ledgers of a plan for a given placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exkv.devices import ELSEWHERE

from .plan import (
    ALONE,
    UNBOUNDED,
    Budget,
    Ledger,
    Place,
    PlacedUnit,
    Plan,
    Role,
    UnitCost,
    role_of,
)


def plan_where(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    where: Sequence[Place],
    objective: str,
    order: str,
    role: Role = ALONE,
) -> Plan:
    """The plan with units in these places, whether or not it fits.

    Args:
        role: of these units within a plan over several hosts.
    """
    ledgers = empty_ledgers(costs, budgets, where, role)
    units = []
    for unit, changed in placing(costs, ledgers, where):
        units.append(unit)
        ledgers |= {place: each for place, each in changed.items() if place.device != ELSEWHERE}
    hosts = list(dict.fromkeys(place.host for place in ledgers))
    return Plan(
        objective=objective,
        order=order,
        units=tuple(units),
        ledgers=tuple(sorted(ledgers.values(), key=lambda each: hosts.index(each.place.host))),
        role=role,
    )


def empty_ledgers(
    costs: Sequence[UnitCost], budgets: Sequence[Budget], where: Sequence[Place], role: Role
) -> dict[Place, Ledger]:
    """Ledgers before any unit is placed: of all offered devices, and of host memory that the
    transport of hidden states needs."""
    ledgers = {budget.place: Ledger.empty(budget) for budget in budgets}
    hidden = max((cost.hidden for cost in costs), default=0)
    for place in dict.fromkeys(place.memory for place in where):
        transport = role_of(place.host, where, role).transport(hidden)
        if transport:
            budget = ledgers[place].budget if place in ledgers else _unbounded(place)
            ledgers[place] = Ledger.empty(budget, transport)
    return ledgers


def _unbounded(place: Place) -> Budget:
    return Budget(device=place.device, host=place.host, capacity=UNBOUNDED)


def placing(
    costs: Sequence[UnitCost], ledgers: Mapping[Place, Ledger], where: Sequence[Place]
) -> Iterator[tuple[PlacedUnit, Mapping[Place, Ledger]]]:
    """Place the units one by one, yielding for each the updated ledgers: its device's, and the
    host's if it is elsewhere and has experts in host memory."""
    ledgers = dict(ledgers)
    for index, (cost, place) in enumerate(zip(costs, where, strict=True)):
        apart = cost.host_weights if place != place.memory else 0
        there = {other for other, at in enumerate(where[:index]) if at == place}
        weights = cost.weights - sum(cost.shared[other] for other in cost.shared.keys() & there)
        weights += cost.host_weights - apart
        beside = cost.shared_cache.keys() & there
        cache = cost.cache_on(place.device)
        cache -= sum(cost.cache_beside(other, place.device) for other in beside)
        ledger = ledgers.get(place) or Ledger.empty(_unbounded(place))
        changed = {place: ledger.with_unit(cost, weights, cache)}
        if apart:
            host = ledgers.get(place.memory) or Ledger.empty(_unbounded(place.memory))
            changed[place.memory] = host.with_experts(cost)
        ledgers |= changed
        unit = PlacedUnit(
            name=cost.name,
            device=place.device,
            host=place.host,
            weights=weights,
            cache=cache,
            workspace=cost.workspace[place.device.type],
            logits=cost.logits,
            kept=cost.kept,
            loss=cost.loss,
            host_experts=cost.host_experts if apart else (),
            host_weights=apart,
            mapped=cost.mapped,
        )
        yield unit, changed

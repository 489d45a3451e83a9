"""Where every unit goes: arithmetic on bytes; no device is touched, nothing is read.

``place_units`` finds the best plan under an objective: ``offer`` says what devices have and in
which orders they may be filled, ``ranges`` finds the best ranges of units, and
``exkv.planning.ledgers`` writes the ledgers. ``exkv.planning.scenario`` makes costs from models and
caches; ``exkv.loading.loader`` carries the plan out. Devices may belong to several hosts; each host
has contiguous units, so that a token enters it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exkv.errors import PlacementError
from exkv.sizes import human

from ..ledgers import empty_ledgers, placing, plan_where
from ..plan import ALONE, OBJECTIVES, ORDERS, Budget, Ledger, Link, Plan, UnitCost, one_of
from .bounds import gap, has_room, may_have_room
from .offer import Offer, canonical
from .ranges import RangeTable


def place_units(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    objective: str = "pack",
    order: str = "listed",
    link: Link | None = None,
) -> Plan:
    """Put every unit on a device: contiguous ranges, the best under the objective.

    The CPU beside other devices is overflow: it gets as few bytes as possible, whatever the
    objective.

    Args:
        costs: every unit of the model (or of its rest, for a load that goes on elsewhere).
        budgets: the devices, in filling order if ``order`` is "listed"; those of a host are
            listed together.
        objective: see ``OBJECTIVES``.
        order: "listed", or "any", with which the result does not depend on how they are listed:
            hosts, and the devices of each, are filled in any order, one host after the other. If
            there are too many unlike devices to try all orders, the plan's ``gap`` bounds what the
            best of them could save.
        link: what joins the hosts; "speed" over several needs it.

    Raises:
        PlacementError: they do not fit. It names the first unit without a place, and its
            ``plan`` is the attempt, with the overfull device's negative headroom.
        ValueError: an unknown objective or order, "speed" without every bandwidth, or devices of
            one host that are listed apart.
    """
    one_of("objective", objective, OBJECTIVES)
    one_of("order", order, ORDERS)
    if not budgets:
        raise ValueError("no devices to place the model on")
    if order == "any":
        budgets = canonical(budgets, costs)
    table = RangeTable(costs, Offer(budgets, costs, order))
    ranges = table.solve(objective, order, link)
    if ranges is None:
        raise _no_place(table, objective, order)
    plan = plan_where(costs, budgets, table.where(ranges), objective, order)
    return replace(plan, link=link, gap=gap(table, ranges, objective, order, link))


def fits_units(costs: Sequence[UnitCost], budgets: Sequence[Budget], order: str = "listed") -> bool:
    """Whether :func:`place_units` finds a plan, under any objective. Faster, for searches."""
    if order == "any":
        budgets = canonical(budgets, costs)
    return has_room(RangeTable(costs, Offer(budgets, costs, order)))


def _no_place(table: RangeTable, objective: str, order: str) -> PlacementError:
    """Fill the devices in order, the last with all that is left, and report what it lacks."""
    where = table.where(table.attempt())
    plan = plan_where(table.costs, table.budgets, where, objective, order)
    steps = placing(table.costs, empty_ledgers(table.costs, table.budgets, where, ALONE), where)
    over = (
        (unit.name, ledger)
        for unit, changed in steps
        for ledger in changed.values()
        if ledger.headroom < 0
    )
    name, ledger = next(over, None) or _no_room_for_transport(plan)
    weights, cache = (sum(getattr(c, line) for c in table.costs) for line in ("weights", "cache"))
    offered = ", ".join(f"{budget.place} {human(budget.limit)}" for budget in table.budgets)
    others = "".join(f"; {line}" for budget in table.budgets for line in budget.others)
    transport = f", transport {human(ledger.transport)}" if ledger.transport else ""
    transport += f", staging {human(ledger.staging)}" if ledger.staging else ""
    transport += f", allocator {human(ledger.allocator)}" if ledger.allocator else ""
    tried = (
        "" if table.exact or not may_have_room(table) else " in any of the orders that were tried"
    )
    return PlacementError(
        f"no room for {name}{tried}: {ledger.place} would have to hold {ledger.total:,} bytes "
        f"(weights {human(ledger.weights)}, cache {human(ledger.cache)}, workspace "
        f"{human(ledger.workspace)}, logits {human(ledger.logits)}{transport}) and has "
        f"{ledger.limit:,} for this model, {-ledger.headroom:,} too few. In all: "
        f"weights {human(weights)} and cache {human(cache)} on {offered}{others}",
        unit=name,
        device=str(ledger.place),
        needed=ledger.total,
        available=ledger.limit,
        plan=plan,
    )


def _no_room_for_transport(plan: Plan) -> tuple[str, Ledger]:
    """The first unit of the host whose memory is too small for transport, and its ledger."""
    ledger = next(each for each in plan.ledgers if each.used and each.headroom < 0)
    return plan.units[plan.units_on(ledger.place.host)[0]].name, ledger

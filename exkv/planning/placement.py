"""Where every unit goes: arithmetic on bytes, no device touched, nothing read.

``place_units`` finds the best plan under an objective: it counts what every range of units would
take on every device, and ``exkv.planning.partition`` chooses among them. ``exkv.planning.scenario``
makes costs from models and caches; ``exkv.loading.loader`` carries the plan out. Devices may be of
several hosts: each host has units that follow each other, so that a token enters it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from exkv.devices import ELSEWHERE
from exkv.errors import PlacementError
from exkv.sizes import human

from .offer import Offer, canonical
from .orders import Orders
from .partition import Costs, UnitRange, best_ranges
from .plan import (
    ALONE,
    OBJECTIVES,
    ORDERS,
    UNBOUNDED,
    Budget,
    Ledger,
    Link,
    Place,
    PlacedUnit,
    Plan,
    Role,
    UnitCost,
    one_of,
    role_of,
)

#: Seconds that a hidden state's hop to the next device costs a decode step. Hardly any, but of
#: two plans that read equally fast the one with fewer hops is the faster. Between hosts the link's
#: time comes on top.
_HOP_SECONDS = 20e-6


def place_units(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    objective: str = "pack",
    order: str = "listed",
    link: Link | None = None,
) -> Plan:
    """Put every unit on a device: contiguous ranges, the best under the objective.

    The CPU beside other devices is overflow: it takes as few bytes as possible, whatever the
    objective says.

    Args:
        costs: every unit of the model (or of its rest, for a load that goes on elsewhere).
        budgets: the devices, in the order in which they are filled if ``order`` is "listed"; those
            of a host follow each other.
        objective: see ``OBJECTIVES``.
        order: "listed", or "any": then the result does not depend on how they are listed. Hosts
            and the devices of each are filled in any order, one host after the other.
        link: what joins the hosts; "speed" over several needs it.

    Raises:
        PlacementError: they do not fit. It names the first unit without a place, and its
            ``plan`` is the attempt, with the overfull device's negative headroom.
        ValueError: an unknown objective or order, "speed" without every bandwidth, or a host's
            devices that are listed apart.
    """
    one_of("objective", objective, OBJECTIVES)
    one_of("order", order, ORDERS)
    if not budgets:
        raise ValueError("no devices to place the model on")
    if order == "any":
        budgets = canonical(budgets, costs)
    table = _Table(costs, budgets)
    ranges = table.solve(objective, order, link)
    if ranges is None:
        raise _no_place(table, objective, order)
    plan = plan_where(costs, budgets, table.where(ranges), objective, order)
    return replace(plan, link=link)


class _Table:
    """Costs of all ranges on all devices, as the matrices that ``exkv.planning.partition`` takes.

    Pinned units have their place and are left out of the ranges.
    """

    def __init__(self, costs: Sequence[UnitCost], budgets: Sequence[Budget]) -> None:
        self.costs, self.budgets, self.offer = costs, budgets, Offer(budgets, costs)
        self.pinned = {i: cost.pinned for i, cost in enumerate(costs) if cost.pinned is not None}
        self.free = [i for i in range(len(costs)) if i not in self.pinned]
        memo: dict[tuple, np.ndarray] = {}
        self.bytes = [self._bytes(device, memo) for device in range(len(budgets))]
        self.fits = [self._fits(device) for device in range(len(budgets))]
        several = len({budget.device.type for budget in budgets}) > 1
        self.overflow = [several and budget.device.type == "cpu" for budget in budgets]

    def _fits(self, device: int) -> dict[Role | None, np.ndarray]:
        """By the role of its host: the ranges that fit, and whether there may be none."""
        fits = {}
        for role in self.offer.roles(device):
            fits[role] = self.bytes[device] <= self.offer.limit(device, role)
            np.fill_diagonal(fits[role], self.offer.may_be_empty(device, role))
        return fits

    def _bytes(self, device: int, memo: dict[tuple, np.ndarray]) -> np.ndarray:
        """Entry [i, j]: bytes of free units i to j - 1 on this device; devices of one type that
        nothing is pinned to are alike."""
        budget, floor = self.budgets[device], self.offer.floors[device]
        key = budget.device.type, floor, budget.place if self.offer.pinned[device] else None
        if key not in memo:
            held = np.array([0, *(self._held(index, budget) for index in self.free)])
            held = held.cumsum()
            table = held[None, :] - held[:, None] + self._peaks(budget.device.type, floor)
            for position, index in enumerate(self.free):
                for other, nbytes in self.costs[index].shared.items():
                    if other in self.free:
                        table[: self.free.index(other) + 1, position + 1 :] -= nbytes
            table[np.tril_indices(len(table), -1)] = UNBOUNDED  # no range ends before it starts
            memo[key] = table
        return memo[key]

    def _held(self, index: int, budget: Budget) -> int:
        """What a unit keeps on the device, beside units that are pinned there."""
        cost = self.costs[index]
        twins = [other for other in cost.shared if self.pinned.get(other) == budget.place]
        shared = sum(cost.shared[other] for other in twins)
        return cost.weights + cost.cache_on(budget.device) + cost.logits - shared

    def _peaks(self, kind: str, floor: int) -> np.ndarray:
        """Entry [i, j]: the largest workspace among free units i to j - 1."""
        count = len(self.free)
        peaks = np.array([self.costs[i].workspace[kind] for i in self.free])
        rows = np.triu(np.broadcast_to(peaks, (count, count)))
        table = np.full((count + 1, count + 1), floor, dtype=np.int64)
        table[:-1, 1:] = np.maximum(np.maximum.accumulate(rows, axis=1), floor)
        return table

    def solve(self, objective: str, order: str, link: Link | None) -> list[UnitRange] | None:
        """The best ranges, or None where nothing fits."""
        orders = self.offer.orders(order)
        if objective == "balance" and not self._keep_headroom_large(orders):
            return None
        weights, toll = self._weights(objective, order), self._toll(objective, order, link)
        found = best_ranges(self._by_role(weights), np.add, orders, toll)
        if found is None:
            return None
        return self._packed(found[1]) if (objective, order) == ("pack", "any") else found[1]

    def fill_up(self, order: str) -> list[UnitRange] | None:
        """Earlier devices hold what they can, but for what would be left to an overflow device."""
        none = [np.zeros_like(size, dtype=float) for size in self.bytes]
        found = best_ranges(self._by_role(none), np.add, self.offer.orders(order))
        return None if found is None else found[1]

    def _packed(self, ranges: Sequence[UnitRange]) -> list[UnitRange]:
        """The same devices in the same order, the earlier ones full."""
        rank = {each.device: position for position, each in enumerate(ranges)}
        last, hosts = len(self.budgets), dict[int, int]()
        for number, host in enumerate(self.offer.hosts):
            first = -1 if number == self.offer.first else last
            hosts |= dict.fromkeys(host, min(first, *(rank.get(d, last) for d in host)))
        devices = sorted(range(last), key=lambda d: (hosts[d], rank.get(d, last)))
        table = _Table(self.costs, [self.budgets[d] for d in devices])
        for position, device in enumerate(devices):
            if device not in rank:
                table._allow(position, np.zeros_like(table.bytes[position], dtype=bool))
        packed = table.fill_up("listed")
        assert packed is not None, "they were found to hold the units"
        return [UnitRange(devices[each.device], each.start, each.stop) for each in packed]

    def _by_role(
        self, weights: Sequence[np.ndarray], empty: float = 0.0
    ) -> list[dict[Role | None, Costs]]:
        """The costs of ranges that fit: overflow first, then these weights."""
        costs = []
        for size, over, weight, fits in zip(
            self.bytes, self.overflow, weights, self.fits, strict=True
        ):
            first = size.astype(float) if over else np.zeros(size.shape)
            second = weight.copy()
            np.fill_diagonal(first, 0.0)
            np.fill_diagonal(second, empty)
            costs.append({role: _where(fit, first, second) for role, fit in fits.items()})
        return costs

    def _allow(self, device: int, ranges: np.ndarray) -> None:
        """Forbid all but these; no unit at all is as possible as it was."""
        for fits in self.fits[device].values():
            empty = fits.diagonal().copy()
            fits &= ranges
            np.fill_diagonal(fits, empty)

    def _keep_headroom_large(self, orders: Orders) -> bool:
        """Forbid every range that leaves less headroom than the smallest one has to be; False where
        nothing fits."""
        weights = [
            np.full(room.shape, -np.inf) if over else -room
            for room, over in zip(self._headrooms(), self.overflow, strict=True)
        ]
        found = best_ranges(self._by_role(weights, -np.inf), np.maximum, orders)
        for device, headroom in enumerate(self._headrooms()):
            if found is not None and not self.overflow[device]:
                self._allow(device, headroom >= -found[0])
        return found is not None

    def _headrooms(self) -> list[np.ndarray]:
        return [
            (limit - size).astype(float)
            for limit, size in zip(self.offer.limits, self.bytes, strict=True)
        ]

    def _weights(self, objective: str, order: str) -> list[np.ndarray]:
        """The additive cost of each range under the objective."""
        if objective == "speed":
            return self._seconds()
        if (objective, order) == ("pack", "listed"):
            return [np.zeros(size.shape) for size in self.bytes]
        uneven = self._unevenness()
        if objective == "balance":
            return uneven
        # One for each device, and among equals the even ones: all of that adds up to less.
        worst = [
            np.max(u, where=np.logical_or.reduce(list(fits.values())), initial=0)
            for u, fits in zip(uneven, self.fits, strict=True)
        ]
        return [1 + u / (1 + sum(worst)) for u in uneven]

    def _toll(self, objective: str, order: str, link: Link | None) -> float:
        """The additive cost of a hop between hosts under the objective."""
        unweighed = objective == "balance" or (objective, order) == ("pack", "listed")
        if unweighed or len(self.offer.hosts) == 1:
            return 0.0
        if objective != "speed":
            return len(self.budgets) + 1.0  # fewer hosts before fewer devices
        if link is None:
            raise ValueError(
                "objective='speed' over several hosts needs the link between them, such as "
                "10Gbit,0.2ms"
            )
        return link.seconds(max(cost.hidden_step for cost in self.costs))

    def _unevenness(self) -> list[np.ndarray]:
        """How far below the largest limit a range takes a device's headroom, squared: the sum is
        least where headrooms are even. In MiB, to keep floats small."""
        largest = max(self.offer.limits)
        return [
            ((largest - room) / 2**20) ** 2 - ((largest - room[0, 0]) / 2**20) ** 2
            for room in self._headrooms()
        ]

    def _seconds(self) -> list[np.ndarray]:
        """What a decode step takes on each device: reading, and the hop to it."""
        unknown = [str(b.place) for b in self.budgets if not b.bandwidth]
        if unknown:
            raise ValueError(
                f"objective='speed' needs the bandwidth of {', '.join(unknown)}, in bytes a second"
            )
        read = np.array([0, *(self.costs[i].traffic for i in self.free)], dtype=float).cumsum()
        traffic = read[None, :] - read[:, None]
        return [traffic / budget.bandwidth + _HOP_SECONDS for budget in self.budgets]

    def where(self, ranges: Sequence[UnitRange]) -> list[Place]:
        """The place of every unit, once the free ones are in these ranges."""
        where = dict(self.pinned)
        for each in ranges:
            place = self.budgets[each.device].place
            where |= dict.fromkeys(self.free[each.start : each.stop], place)
        return [where[index] for index in range(len(self.costs))]

    def attempt(self) -> list[UnitRange]:
        """Each device takes as many units as it can, the last all that is left."""
        ranges, start, last = [], 0, len(self.budgets) - 1
        for device in range(last):
            fits = self.fits[device][self.offer.roles(device)[0]][start, start:]
            stop = start + int(np.flatnonzero(fits).max(initial=0))
            if stop > start:
                ranges.append(UnitRange(device, start, stop))
            start = stop
        return [*ranges, UnitRange(last, start, len(self.free))]


def _where(fits: np.ndarray, first: np.ndarray, second: np.ndarray) -> Costs:
    """Infinite where a range does not fit."""
    return Costs(np.where(fits, first, np.inf), np.where(fits, second, np.inf))


def fits_units(costs: Sequence[UnitCost], budgets: Sequence[Budget], order: str = "listed") -> bool:
    """Whether :func:`place_units` finds a plan, under whatever objective. Quicker, for searches."""
    return _Table(costs, budgets).fill_up(order) is not None


def plan_where(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    where: Sequence[Place],
    objective: str,
    order: str,
    role: Role = ALONE,
) -> Plan:
    """The plan of units that are in these places, whether it fits or not.

    Args:
        role: of all of them together, where they are one host's piece of a plan over several.
    """
    ledgers = _empty(costs, budgets, where, role)
    units = []
    for unit, ledger in _place(costs, ledgers, where):
        units.append(unit)
        if unit.device != ELSEWHERE:
            ledgers[unit.place] = ledger
    hosts = list(dict.fromkeys(place.host for place in ledgers))
    return Plan(
        objective=objective,
        order=order,
        units=tuple(units),
        ledgers=tuple(sorted(ledgers.values(), key=lambda each: hosts.index(each.place.host))),
        role=role,
    )


def _empty(
    costs: Sequence[UnitCost], budgets: Sequence[Budget], where: Sequence[Place], role: Role
) -> dict[Place, Ledger]:
    """The ledgers of all that is offered, and of memory that hosts take without, before a unit is
    placed: what hosts need to pass hidden states on is theirs."""
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


def _place(
    costs: Sequence[UnitCost], ledgers: Mapping[Place, Ledger], where: Sequence[Place]
) -> Iterator[tuple[PlacedUnit, Ledger]]:
    """Every unit where it is placed, and its device's ledger once it is."""
    ledgers = dict(ledgers)
    for index, (cost, place) in enumerate(zip(costs, where, strict=True)):
        ledger = ledgers.get(place) or Ledger.empty(_unbounded(place))
        before = where[:index]
        twins = [other for other in cost.shared if other < index and before[other] == place]
        shared = sum(cost.shared[other] for other in twins)
        ledgers[place] = ledger.with_unit(cost, shared)
        unit = PlacedUnit(
            name=cost.name,
            device=place.device,
            host=place.host,
            weights=cost.weights - shared,
            cache=cost.cache_on(place.device),
            workspace=cost.workspace[place.device.type],
            logits=cost.logits,
            kept=cost.kept,
            loss=cost.loss,
        )
        yield unit, ledgers[place]


def _no_place(table: _Table, objective: str, order: str) -> PlacementError:
    """Fill the devices in order, the last with all that is left, and say what it lacks."""
    where = table.where(table.attempt())
    plan = plan_where(table.costs, table.budgets, where, objective, order)
    steps = _place(table.costs, _empty(table.costs, table.budgets, where, ALONE), where)
    over = ((unit.name, ledger) for unit, ledger in steps if ledger.headroom < 0)
    name, ledger = next(over, None) or _no_room_for_transport(plan)
    weights, cache = (sum(getattr(c, line) for c in table.costs) for line in ("weights", "cache"))
    offered = ", ".join(f"{budget.place} {human(budget.limit)}" for budget in table.budgets)
    others = "".join(f"; {line}" for budget in table.budgets for line in budget.other_models())
    transport = f", transport {human(ledger.transport)}" if ledger.transport else ""
    return PlacementError(
        f"no room for {name}: {ledger.place} would have to hold {ledger.total:,} bytes "
        f"(weights {human(ledger.weights)}, cache {human(ledger.cache)}, workspace "
        f"{human(ledger.workspace)}, logits {human(ledger.logits)}{transport}) and has "
        f"{ledger.limit:,} for this model, {-ledger.headroom:,} too few. In all: weights "
        f"{human(weights)} and cache {human(cache)} on {offered}{others}",
        unit=name,
        device=str(ledger.place),
        needed=ledger.total,
        available=ledger.limit,
        plan=plan,
    )


def _no_room_for_transport(plan: Plan) -> tuple[str, Ledger]:
    """The host's memory that has too little, and the first unit of the host."""
    ledger = next(each for each in plan.ledgers if each.used and each.headroom < 0)
    return plan.units[plan.units_on(ledger.place.host)[0]].name, ledger

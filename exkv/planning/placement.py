"""Where every unit goes: arithmetic on bytes, no device touched, nothing read.

``place_units`` finds the best plan under an objective: it counts what every range of units would
take on every device, and ``exkv.planning.partition`` chooses among them. ``exkv.planning.scenario``
makes costs from models and caches; ``exkv.loading.loader`` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from exkv.errors import PlacementError
from exkv.sizes import human

from .partition import Combine, UnitRange, best_ranges
from .plan import OBJECTIVES, ORDERS, UNBOUNDED, Budget, Ledger, PlacedUnit, Plan, UnitCost, one_of

#: Seconds that a hidden state's hop to the next device costs a decode step. Hardly any, but of
#: two plans that read equally fast the one with fewer hops is the faster.
_HOP_SECONDS = 20e-6


def place_units(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    objective: str = "pack",
    order: str = "listed",
) -> Plan:
    """Put every unit on a device: contiguous ranges, the best under the objective.

    The CPU beside other devices is overflow: it takes as few bytes as possible, whatever the
    objective says.

    Args:
        costs: every unit of the model (or of its rest, for a load that goes on elsewhere).
        budgets: the devices, in the order in which they are filled if ``order`` is "listed".
        objective: see ``OBJECTIVES``.
        order: "listed", or "any": then the result does not depend on how they are listed.

    Raises:
        PlacementError: they do not fit. It names the first unit without a place, and its
            ``plan`` is the attempt, with the overfull device's negative headroom.
        ValueError: an unknown objective or order, or "speed" without every bandwidth.
    """
    one_of(objective, OBJECTIVES)
    one_of(order, ORDERS)
    if not budgets:
        raise ValueError("no devices to place the model on")
    if order == "any":
        budgets = sorted(budgets, key=_canonical)
    table = _Table(costs, budgets)
    ranges = table.solve(objective, order)
    if ranges is None:
        raise _no_place(table, objective, order)
    return plan_where(costs, budgets, table.where(ranges), objective, order)


def _canonical(budget: Budget) -> tuple:
    """An order of devices that follows from what they are: large ones first."""
    return -budget.limit, budget.device.type, budget.device.index or 0


def limit_beside(budget: Budget, pinned: Sequence[UnitCost]) -> int:
    """What a device has for ranges beside the units that are pinned to it."""
    here = [cost for cost in pinned if cost.pinned == budget.device]
    return budget.limit - sum(c.weights + c.cache_on(budget.device) + c.logits for c in here)


def floor_beside(budget: Budget, pinned: Sequence[UnitCost]) -> int:
    """Workspace that a device needs whichever range is placed on it."""
    peaks = (c.workspace[budget.device.type] for c in pinned if c.pinned == budget.device)
    return max([budget.promised_workspace, *peaks])


def kind_of(budget: Budget, limit: int, floor: int, pinned: bool) -> tuple:
    """Devices of one kind are interchangeable; one that units are pinned to is its own."""
    alone = budget.device if pinned else None
    return budget.device.type, limit, floor, budget.bandwidth, alone


class _Table:
    """Costs of all ranges on all devices, as the matrices that ``exkv.planning.partition`` takes.

    Pinned units have their place and are left out of the ranges.
    """

    def __init__(self, costs: Sequence[UnitCost], budgets: Sequence[Budget]) -> None:
        self.costs, self.budgets = costs, budgets
        self.pinned = {i: cost.pinned for i, cost in enumerate(costs) if cost.pinned is not None}
        self.free = [i for i in range(len(costs)) if i not in self.pinned]
        memo: dict[tuple, np.ndarray] = {}
        self.bytes = [self._bytes(budget, memo) for budget in budgets]
        self.limits = [limit_beside(budget, self._pinned_to(budget)) for budget in budgets]
        self.fits = [size <= limit for size, limit in zip(self.bytes, self.limits, strict=True)]
        for fits in self.fits:
            np.fill_diagonal(fits, True)
        several = len({budget.device.type for budget in budgets}) > 1
        self.overflow = [several and budget.device.type == "cpu" for budget in budgets]

    def _pinned_to(self, budget: Budget) -> list[UnitCost]:
        return [self.costs[i] for i, device in self.pinned.items() if device == budget.device]

    def _bytes(self, budget: Budget, memo: dict[tuple, np.ndarray]) -> np.ndarray:
        """Entry [i, j]: bytes of free units i to j - 1 on this device; devices of one type that
        nothing is pinned to are alike."""
        pinned = budget.device if self._pinned_to(budget) else None
        key = budget.device.type, floor_beside(budget, self._pinned_to(budget)), pinned
        if key not in memo:
            held = np.array([0, *(self._held(index, budget) for index in self.free)])
            held = held.cumsum()
            table = held[None, :] - held[:, None] + self._peaks(budget)
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
        twins = [other for other in cost.shared if self.pinned.get(other) == budget.device]
        shared = sum(cost.shared[other] for other in twins)
        return cost.weights + cost.cache_on(budget.device) + cost.logits - shared

    def _peaks(self, budget: Budget) -> np.ndarray:
        """Entry [i, j]: the largest workspace among free units i to j - 1."""
        count, floor = len(self.free), floor_beside(budget, self._pinned_to(budget))
        peaks = np.array([self.costs[i].workspace[budget.device.type] for i in self.free])
        rows = np.triu(np.broadcast_to(peaks, (count, count)))
        table = np.full((count + 1, count + 1), floor, dtype=np.int64)
        table[:-1, 1:] = np.maximum(np.maximum.accumulate(rows, axis=1), floor)
        return table

    def solve(self, objective: str, order: str) -> list[UnitRange] | None:
        """The best ranges, or None where nothing fits."""
        kinds = None if order == "listed" else [self._kind(d) for d in range(len(self.budgets))]
        if self.pinned_without_room() is not None or not self._keep_overflow_small(kinds):
            return None
        if objective == "balance":
            self._keep_headroom_large(kinds)
        if objective == "pack" and order == "listed":
            return self.fill(range(len(self.budgets)))
        _, ranges = _best(self._weights(objective), np.add, kinds)
        if objective == "pack":
            return self.fill([each.device for each in ranges])
        return ranges

    def pinned_without_room(self) -> int | None:
        """Index of a pinned unit whose device is too small for what is pinned there."""
        for budget, limit in zip(self.budgets, self.limits, strict=True):
            if self._pinned_to(budget) and limit < floor_beside(budget, self._pinned_to(budget)):
                return next(i for i, device in self.pinned.items() if device == budget.device)
        return None

    def _kind(self, device: int) -> tuple:
        budget = self.budgets[device]
        pinned = self._pinned_to(budget)
        return kind_of(budget, self.limits[device], floor_beside(budget, pinned), bool(pinned))

    def _masked(self, costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Infinite where a range does not fit; an empty device costs nothing."""
        masked = []
        for cost, fits in zip(costs, self.fits, strict=True):
            cost = np.where(fits, cost, np.inf)
            np.fill_diagonal(cost, 0.0)
            masked.append(cost)
        return masked

    def _keep_overflow_small(self, kinds: Sequence | None) -> bool:
        """Forbid the overflow device more than it must take; False where nothing fits."""
        sizes = [
            size.astype(float) if over else np.zeros(size.shape)
            for size, over in zip(self.bytes, self.overflow, strict=True)
        ]
        found = best_ranges(self._masked(sizes), np.add, kinds=kinds)
        if found is None:
            return False
        least, _ = found
        for device, over in enumerate(self.overflow):
            if over:
                self._allow(device, self.bytes[device] <= least)
        return True

    def _allow(self, device: int, ranges: np.ndarray) -> None:
        """Forbid all but these; no unit at all is always possible."""
        self.fits[device] &= ranges
        np.fill_diagonal(self.fits[device], True)

    def _keep_headroom_large(self, kinds: Sequence | None) -> None:
        """Forbid every range that leaves less headroom than the smallest one has to be."""
        matrices = []
        for device, cost in enumerate(self._masked([-h for h in self._headrooms()])):
            if self.overflow[device]:
                cost[self.fits[device]] = -np.inf
            np.fill_diagonal(cost, -np.inf)
            matrices.append(cost)
        bottleneck, _ = _best(matrices, np.maximum, kinds)
        for device, headroom in enumerate(self._headrooms()):
            if not self.overflow[device]:
                self._allow(device, headroom >= -bottleneck)

    def _headrooms(self) -> list[np.ndarray]:
        return [
            (limit - size).astype(float)
            for limit, size in zip(self.limits, self.bytes, strict=True)
        ]

    def _weights(self, objective: str) -> list[np.ndarray]:
        """The additive cost of each range under the objective."""
        if objective == "speed":
            return self._masked(self._seconds())
        uneven = self._unevenness()
        if objective == "balance":
            return self._masked(uneven)
        # One for each device, and among equals the even ones: all of that adds up to less.
        worst = [np.max(u, where=f, initial=0) for u, f in zip(uneven, self.fits, strict=True)]
        return self._masked([1 + u / (1 + sum(worst)) for u in uneven])

    def _unevenness(self) -> list[np.ndarray]:
        """How far below the largest limit a range takes a device's headroom, squared: the sum is
        least where headrooms are even. In MiB, to keep floats small."""
        largest = max(self.limits)
        return [
            ((largest - room) / 2**20) ** 2 - ((largest - room[0, 0]) / 2**20) ** 2
            for room in self._headrooms()
        ]

    def _seconds(self) -> list[np.ndarray]:
        """What a decode step takes on each device: reading, and the hop to it."""
        unknown = [str(b.device) for b in self.budgets if not b.bandwidth]
        if unknown:
            raise ValueError(
                f"objective='speed' needs the bandwidth of {', '.join(unknown)}, in bytes a second"
            )
        read = np.array([0, *(self.costs[i].traffic for i in self.free)], dtype=float).cumsum()
        traffic = read[None, :] - read[:, None]
        return [traffic / budget.bandwidth + _HOP_SECONDS for budget in self.budgets]

    def where(self, ranges: Sequence[UnitRange]) -> list[torch.device]:
        """The device of every unit, once the free ones are placed in these ranges."""
        where = dict(self.pinned)
        for each in ranges:
            device = self.budgets[each.device].device
            where |= dict.fromkeys(self.free[each.start : each.stop], device)
        return [where[index] for index in range(len(self.costs))]

    def fill(self, devices: Sequence[int]) -> list[UnitRange]:
        """Each device takes as many units as it can; complete where any way is."""
        ranges, start = [], 0
        for device in devices:
            stop = start + int(np.flatnonzero(self.fits[device][start, start:])[-1])
            if stop > start:
                ranges.append(UnitRange(device, start, stop))
            start = stop
        return ranges


def _best(
    matrices: Sequence[np.ndarray], combine: Combine, kinds: Sequence | None
) -> tuple[float, list[UnitRange]]:
    """:func:`best_ranges` where it is known that there are some."""
    found = best_ranges(matrices, combine, kinds=kinds)
    assert found is not None
    return found


def fits_units(costs: Sequence[UnitCost], budgets: Sequence[Budget], order: str = "listed") -> bool:
    """Whether :func:`place_units` finds a plan, under whatever objective. Quicker, for searches."""
    table = _Table(costs, budgets)
    if order == "any":
        return table.solve("fewest", order) is not None
    if table.pinned_without_room() is not None:
        return False
    ranges = table.fill(range(len(budgets)))  # the way that gets farthest
    return (ranges[-1].stop if ranges else 0) == len(table.free)


def plan_where(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    where: Sequence[torch.device],
    objective: str,
    order: str,
) -> Plan:
    """The plan of units that are placed on these devices, whether it fits or not."""
    ledgers = {budget.device: Ledger.empty(budget) for budget in budgets}
    units = []
    for unit, ledger in _place(costs, budgets, where):
        units.append(unit)
        ledgers[unit.device] = ledger
    return Plan(
        objective=objective, order=order, units=tuple(units), ledgers=tuple(ledgers.values())
    )


def _place(
    costs: Sequence[UnitCost], budgets: Sequence[Budget], where: Sequence[torch.device]
) -> Iterator[tuple[PlacedUnit, Ledger]]:
    """Every unit where it is placed, and its device's ledger once it is."""
    ledgers = {budget.device: Ledger.empty(budget) for budget in budgets}
    for index, (cost, device) in enumerate(zip(costs, where, strict=True)):
        ledger = ledgers.get(device) or Ledger.empty(Budget(device=device, capacity=UNBOUNDED))
        before = where[:index]
        twins = [other for other in cost.shared if other < index and before[other] == device]
        shared = sum(cost.shared[other] for other in twins)
        ledgers[device] = ledger.with_unit(cost, shared)
        unit = PlacedUnit(
            name=cost.name,
            device=device,
            weights=cost.weights - shared,
            cache=cost.cache_on(device),
            workspace=cost.workspace[device.type],
            logits=cost.logits,
            kept=cost.kept,
            loss=cost.loss,
        )
        yield unit, ledgers[device]


def _no_place(table: _Table, objective: str, order: str) -> PlacementError:
    """Fill the devices in order, the last with all that is left, and say what it lacks."""
    last = len(table.budgets) - 1
    ranges = table.fill(range(last))
    rest = UnitRange(last, ranges[-1].stop if ranges else 0, len(table.free))
    where = table.where([*ranges, rest])
    steps = _place(table.costs, table.budgets, where)
    unit, ledger = next(step for step in steps if step[1].headroom < 0)
    weights, cache = (sum(getattr(c, line) for c in table.costs) for line in ("weights", "cache"))
    offered = ", ".join(f"{budget.device} {human(budget.limit)}" for budget in table.budgets)
    return PlacementError(
        f"no room for {unit.name}: {unit.device} would have to hold {ledger.total:,} bytes "
        f"(weights {human(ledger.weights)}, cache {human(ledger.cache)}, workspace "
        f"{human(ledger.workspace)}, logits {human(ledger.logits)}) and has {ledger.limit:,} for "
        f"this model, {-ledger.headroom:,} too few. In all: weights {human(weights)} and cache "
        f"{human(cache)} on {offered}",
        unit=unit.name,
        device=str(unit.device),
        needed=ledger.total,
        available=ledger.limit,
        plan=plan_where(table.costs, table.budgets, where, objective, order),
    )

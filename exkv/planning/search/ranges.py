"""Contiguous ranges of units over devices: the optimum, by dynamic programming on small matrices.

``RangeTable`` knows what every range of units takes on every device, and its cost under an
objective; ``best_ranges`` finds the ranges that cover all units at the least cost, along the orders
in which the devices may be filled (``orders``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..expected_time import HOP_SECONDS
from ..plan import UNBOUNDED, Budget, Link, Place, Role, UnitCost
from .exchange import good_order
from .offer import Offer
from .orders import Move, Orders

#: How the costs of two devices combine: ``np.add`` for sums, ``np.maximum`` for bottlenecks.
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units ``start`` to ``stop - 1`` on the device at position ``device`` of the list."""

    device: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in two parts; the sum of the first is minimized before all else.

    For a device, float64 (n + 1, n + 1): entry ``[i, j]`` is the cost of putting units ``i`` to
    ``j - 1`` there, infinity where they do not fit, and on the diagonal, for no unit, the cost of
    leaving the device empty.
    """

    first: np.ndarray
    second: np.ndarray


#: Of one device, by its host's role.
ByRole = Mapping[Role | None, Costs]


class RangeTable:
    """What all ranges of units take on all devices, and the best of them.

    Pinned units have a fixed place and are left out of the ranges.

    Attributes:
        orders: of the devices, over which the best ranges are searched; None until they are
            needed.
        exact: whether these are all possible orders.
    """

    def __init__(self, costs: Sequence[UnitCost], offer: Offer) -> None:
        self.costs, self.offer, self.budgets = costs, offer, offer.budgets
        self.orders: Orders | None = None
        self.exact = True
        budgets = offer.budgets
        self.pinned = {i: cost.pinned for i, cost in enumerate(costs) if cost.pinned is not None}
        self.free = [i for i in range(len(costs)) if i not in self.pinned]
        memo: dict[tuple, np.ndarray] = {}
        self.bytes = [self._bytes(device, memo) for device in range(len(budgets))]
        self.fits = [self._fits(device) for device in range(len(budgets))]
        several = len({budget.device.type for budget in budgets}) > 1
        self.overflow = [several and budget.device.type == "cpu" for budget in budgets]

    def _fits(self, device: int) -> dict[Role | None, np.ndarray]:
        """By the role of its host: the ranges that fit, and whether the device may stay empty."""
        fits = {}
        for role, room in self.offer.room[device].items():
            fits[role] = self.bytes[device] <= room
            np.fill_diagonal(fits[role], self.offer.may_be_empty[device][role])
        return fits

    def _bytes(self, device: int, memo: dict[tuple, np.ndarray]) -> np.ndarray:
        """Entry [i, j]: bytes of free units i to j - 1 on this device; devices of one type without
        pinned units share one table."""
        budget, floor = self.budgets[device], self.offer.floors[device]
        place = budget.place if self.offer.pinned[device] else None
        key = budget.device.type, budget.segmented, floor, place
        if key not in memo:
            held = np.array([0, *(self._held(index, budget) for index in self.free)])
            held = held.cumsum()
            table = held[None, :] - held[:, None] + self._peaks(budget, floor)
            for position, index in enumerate(self.free):
                for other, nbytes in self.costs[index].shared_on(budget.device).items():
                    if other in self.free:
                        table[: self.free.index(other) + 1, position + 1 :] -= nbytes
            table[np.tril_indices(len(table), -1)] = UNBOUNDED  # no range ends before it starts
            memo[key] = table
        return memo[key]

    def _held(self, index: int, budget: Budget) -> int:
        """Bytes that a unit keeps on the device, beside units that are pinned there."""
        cost = self.costs[index]
        beside = cost.shared_on(budget.device).items()
        shared = (n for other, n in beside if self.pinned.get(other) == budget.place)
        return cost.held_on(budget) - sum(shared)

    def _peaks(self, budget: Budget, floor: int) -> np.ndarray:
        """Entry [i, j]: the largest workspace among free units i to j - 1."""
        count = len(self.free)
        peaks = np.array([self.costs[i].call_on(budget) for i in self.free])
        rows = np.triu(np.broadcast_to(peaks, (count, count)))
        table = np.full((count + 1, count + 1), floor, dtype=np.int64)
        table[:-1, 1:] = np.maximum(np.maximum.accumulate(rows, axis=1), floor)
        return table

    def solve(self, objective: str, order: str, link: Link | None) -> list[UnitRange] | None:
        """The best ranges, or None where nothing fits."""
        if objective == "balance" and not self._keep_headroom_large():
            return None
        weights, toll = self._weights(objective, order), self.toll(objective, order, link)
        found = self._best(self._by_role(weights), np.add, toll)
        if found is None:
            return None
        return self._packed(found[1]) if (objective, order) == ("pack", "any") else found[1]

    def fill_up(self) -> list[UnitRange] | None:
        """Ranges with earlier devices as full as possible, except for what would fall to an
        overflow device."""
        found = self._best(self.unweighed(), np.add)
        return None if found is None else found[1]

    def unweighed(self) -> list[dict[Role | None, Costs]]:
        """The costs of ranges that fit: nothing but overflow."""
        return self._by_role([np.zeros_like(size, dtype=float) for size in self.bytes])

    def _best(
        self, costs: Sequence[ByRole], combine: Combine, toll: float = 0.0
    ) -> tuple[float, list[UnitRange]] | None:
        """The best ranges in all orders of the devices; if these are too many, in one that is good
        for the first costs asked about."""
        if self.orders is None:
            self.orders = self.offer.orders()
        if self.orders is None:
            self.exact = False
            self.orders = good_order(self.offer, lambda each: search(costs, combine, each, toll))
        return best_ranges(costs, combine, self.orders, toll)

    def _packed(self, ranges: Sequence[UnitRange]) -> list[UnitRange]:
        """The same devices in the same order, with earlier ones full."""
        rank = {each.device: position for position, each in enumerate(ranges)}
        last, hosts = len(self.budgets), dict[int, int]()
        for number, host in enumerate(self.offer.hosts):
            first = -1 if number == self.offer.first else last
            hosts |= dict.fromkeys(host, min(first, *(rank.get(d, last) for d in host)))
        devices = sorted(range(last), key=lambda d: (hosts[d], rank.get(d, last)))
        table = RangeTable(self.costs, Offer([self.budgets[d] for d in devices], self.costs))
        for position, device in enumerate(devices):
            if device not in rank:
                table._allow(position, np.zeros_like(table.bytes[position], dtype=bool))
        packed = table.fill_up()
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
            costs.append({role: _masked_costs(fit, first, second) for role, fit in fits.items()})
        return costs

    def _allow(self, device: int, ranges: np.ndarray) -> None:
        """Forbid all ranges but these; whether the device may stay empty doesn't change."""
        for fits in self.fits[device].values():
            empty = fits.diagonal().copy()
            fits &= ranges
            np.fill_diagonal(fits, empty)

    def _keep_headroom_large(self) -> bool:
        """Forbid every range that leaves less headroom than the best smallest headroom; False where
        nothing fits."""
        weights = [
            np.full(room.shape, -np.inf) if over else -room
            for room, over in zip(self.headrooms(), self.overflow, strict=True)
        ]
        found = self._best(self._by_role(weights, -np.inf), np.maximum)
        for device, headroom in enumerate(self.headrooms()):
            if found is not None and not self.overflow[device]:
                self._allow(device, headroom >= -found[0])
        return found is not None

    def headrooms(self) -> list[np.ndarray]:
        """Headroom that ranges leave on each device."""
        return [
            (limit - size).astype(float)
            for limit, size in zip(self.offer.limits, self.bytes, strict=True)
        ]

    def _weights(self, objective: str, order: str) -> list[np.ndarray]:
        """The additive cost of each range under the objective."""
        if objective == "speed":
            return self.seconds()
        if (objective, order) == ("pack", "listed"):
            return [np.zeros(size.shape) for size in self.bytes]
        uneven = self._unevenness()
        if objective == "balance":
            return uneven
        # One for each device, and evenness decides among equals: all of that sums to less than one.
        worst = [
            np.max(u, where=np.logical_or.reduce(list(fits.values())), initial=0)
            for u, fits in zip(uneven, self.fits, strict=True)
        ]
        return [1 + u / (1 + sum(worst)) for u in uneven]

    def toll(self, objective: str, order: str, link: Link | None) -> float:
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
        minimal where headrooms are even. In MiB, to keep floats small."""
        largest = max(self.offer.limits)
        return [
            ((largest - room) / 2**20) ** 2 - ((largest - room[0, 0]) / 2**20) ** 2
            for room in self.headrooms()
        ]

    def seconds(self) -> list[np.ndarray]:
        """Seconds of a decode step on each device: reading, and the hop to it. A hop takes hardly
        any time, but of two plans that read equally fast the one with fewer hops wins. Between
        hosts, the link's time is added."""
        unknown = [str(b.place) for b in self.budgets if not b.bandwidth]
        if unknown:
            raise ValueError(
                f"objective='speed' needs the bandwidth of {', '.join(unknown)}, in bytes per "
                "second"
            )
        return self.seconds_at([budget.bandwidth or 0.0 for budget in self.budgets])

    def seconds_at(self, bandwidths: Sequence[float]) -> list[np.ndarray]:
        """Likewise, if the devices read this many bytes per second."""
        read = np.array([0, *(self.costs[i].traffic for i in self.free)], dtype=float).cumsum()
        traffic = read[None, :] - read[:, None]
        return [traffic / bandwidth + HOP_SECONDS for bandwidth in bandwidths]

    def where(self, ranges: Sequence[UnitRange]) -> list[Place]:
        """The place of every unit, with the free ones in these ranges."""
        where = dict(self.pinned)
        for each in ranges:
            place = self.budgets[each.device].place
            where |= dict.fromkeys(self.free[each.start : each.stop], place)
        return [where[index] for index in range(len(self.costs))]

    def attempt(self) -> list[UnitRange]:
        """Each device takes as many units as it can, and the last all that is left."""
        ranges, start, last = [], 0, len(self.budgets) - 1
        for device in range(last):
            fits = next(iter(self.fits[device].values()))[start, start:]
            stop = start + int(np.flatnonzero(fits).max(initial=0))
            if stop > start:
                ranges.append(UnitRange(device, start, stop))
            start = stop
        return [*ranges, UnitRange(last, start, len(self.free))]


def _masked_costs(fits: np.ndarray, first: np.ndarray, second: np.ndarray) -> Costs:
    """Costs, infinite where a range does not fit."""
    return Costs(np.where(fits, first, np.inf), np.where(fits, second, np.inf))


def best_ranges(
    devices: Sequence[ByRole], combine: Combine, orders: Orders, toll: float = 0.0
) -> tuple[float, list[UnitRange]] | None:
    """The least cost (its second part) and the non-empty ranges that have it, in the order of the
    units.

    Args:
        devices: the costs of each.
        combine: how second parts combine; first parts are added.
        toll: added to the second part for every hop between hosts.

    Returns:
        None if no ranges cover all units. Of several optima, one that fills earlier devices.
    """
    best = search(devices, combine, orders, toll)
    if best.score[0]:
        return None
    return float(best.second[-1, -1]), best.walk_back(orders)


def search(devices: Sequence[ByRole], combine: Combine, orders: Orders, toll: float = 0.0) -> Best:
    """The results of :func:`best_ranges` for every state of the orders."""
    size = len(next(iter(devices[0].values())).first)
    best = Best(len(orders.states), size, 0.0 if combine is np.add else -np.inf)
    for states in orders.generations():
        for (device, role), moves in _by_device(orders, states).items():
            before, to, number = (np.array(column) for column in zip(*moves, strict=True))
            if device is not None:
                costs, start = _extend(best.costs(before), devices[device][role], combine)
                best.improve(to, number, costs, start)
                continue
            for state, choice in zip(to, number, strict=True):
                move = orders.states[state][choice]
                costs = _moved(best.costs(move.before), move, toll if combine is np.add else 0.0)
                best.improve(state, choice, costs, np.arange(size))
    return best


def _by_device(
    orders: Orders, states: Sequence[int]
) -> dict[tuple[int | None, Role | None], list[tuple[int, int, int]]]:
    """The moves to these states by the device that they fill: the earlier state, the state, and the
    index of the move among the state's."""
    found: dict[tuple[int | None, Role | None], list[tuple[int, int, int]]] = {}
    for state in states:
        for number, move in enumerate(orders.states[state]):
            moves = found.setdefault((move.device, move.role), [])
            moves.append((move.before, state, number))
    return found


class Best:
    """The least cost of placing the first j units in each state, and the moves that led there.

    Attributes:
        first, second: the parts of the cost, float64 (states, n + 1).
        choice: the move to the state, int (states, n + 1); the first of equal ones.
        start: where its range starts, int (states, n + 1).
    """

    def __init__(self, states: int, size: int, nothing: float) -> None:
        self.first, self.second = np.full((states, size), np.inf), np.full((states, size), np.inf)
        self.choice, self.start = np.zeros((states, size), int), np.zeros((states, size), int)
        self.first[0, 0], self.second[0, 0] = 0.0, nothing

    def costs(self, states: np.ndarray | int) -> Costs:
        return Costs(self.first[states], self.second[states])

    @property
    def score(self) -> tuple[int, float, float]:
        """Units without a place in the end, and the total cost; lower is better."""
        first, second = self.first[-1, -1], self.second[-1, -1]
        if first < np.inf:
            return 0, float(first), float(second)
        placed = np.nonzero(self.first < np.inf)[1].max()
        return max(self.first.shape[1] - 1 - int(placed), 1), np.inf, np.inf

    def improve(
        self, states: np.ndarray | int, choice: np.ndarray | int, costs: Costs, start: np.ndarray
    ) -> None:
        """Take these costs (states, n + 1), given all at once for each state, where they are lower;
        of equal ones, keep those of the earlier move."""
        first, second = self.first[states], self.second[states]
        earlier = np.asarray(choice)[..., None] < self.choice[states]
        better = (costs.second < second) | ((costs.second == second) & earlier)
        better = (costs.first < first) | ((costs.first == first) & better)
        self.first[states] = np.where(better, costs.first, first)
        self.second[states] = np.where(better, costs.second, second)
        self.choice[states] = np.where(better, np.asarray(choice)[..., None], self.choice[states])
        self.start[states] = np.where(better, start, self.start[states])

    def walk_back(self, orders: Orders) -> list[UnitRange]:
        """The ranges, found from the last unit back to the first."""
        state, stop, ranges = len(orders.states) - 1, self.first.shape[1] - 1, []
        while state:
            move, start = orders.states[state][self.choice[state, stop]], self.start[state, stop]
            if move.device is not None and start < stop:
                ranges.append(UnitRange(move.device, int(start), int(stop)))
            state, stop = move.before, start
        return ranges[::-1]


def _moved(before: Costs, move: Move, toll: float) -> Costs:
    """The costs after a move to or from a host."""
    second = move.masked(before.second)
    if move.pays is not None:
        second[move.pays] += toll
    return Costs(move.masked(before.first), second)


def _extend(before: Costs, device: Costs, combine: Combine) -> tuple[Costs, np.ndarray]:
    """Costs (states, n + 1) of covering the first j units once this device is used too, and where
    its range starts; of equal ones the shortest range, so that earlier devices are filled first."""
    first = before.first + device.first.diagonal()
    second = combine(before.second, device.second.diagonal())
    start = np.broadcast_to(np.arange(first.shape[-1]), first.shape).copy()
    starts, stops = np.nonzero(device.first < np.inf)
    for units in range(1, int((stops - starts).max(initial=0)) + 1):
        longer = before.first[:, :-units] + device.first.diagonal(units)
        costs = combine(before.second[:, :-units], device.second.diagonal(units))
        equal = (longer == first[:, units:]) & (costs < second[:, units:])
        better = (longer < first[:, units:]) | equal
        np.copyto(first[:, units:], longer, where=better)
        np.copyto(second[:, units:], costs, where=better)
        start[:, units:][better] = np.nonzero(better)[1]
    return Costs(first, second), start

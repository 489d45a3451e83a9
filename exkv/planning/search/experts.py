"""Layers on cards with their coldest experts in host memory: the ranges of layers, and the experts,
with the shortest expected time of a decode step.

Every card has a range of units, as in ``ranges``, and whole units may be left to the host. A range
that doesn't fit on its card can be made to: moving experts to host memory frees their bytes, at the
cost in time that ``expected_time`` predicts. A lower bound of that cost is computed for all ranges
at once, and then the best ranges are found as without experts:

- ``_Alike``: all experts have one size and are equally likely, so only counts matter. A unit's time
  is convex in its count except for the round trip with the first expert, so that all units that
  have any have equally many. Exact.
- ``_Unlike``: a unit's coldest experts go first. The lower convex hull of its time over the bytes
  that it frees makes a knapsack of divisible parts, the last part rounded up. Its optimum with
  divisible experts and without randomness is a lower bound. The distance between the two is the
  plan's ``gap``. Rounding may move one expert more than necessary, so that a placement that just
  fits is not always found.

Where the host has too little memory for the fastest placement, its bytes get a price: the gap is
then a bound on how much faster a better placement could be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..expected_time import (
    HOP_SECONDS,
    Rates,
    bandwidth,
    even_bytes,
    least_seconds_beyond,
    rates_of,
    seconds_beyond,
    step_seconds,
)
from ..plan import UNBOUNDED, Budget, Link, Place, Role, UnitCost
from .offer import Offer, canonical
from .ranges import Costs, RangeTable, UnitRange

#: Experts that go to the host, by the index of their unit.
Chosen = dict[int, tuple[int, ...]]

#: Tolerance for times that are summed in another order.
_ROUNDING = 1e-9
#: Most seconds that a byte of scarce host memory may be worth, and the number of bisection steps
#: of that price.
_PRICES, _BISECTIONS = (1e-14, 1e-6), 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Where units go, and which of their experts lie in host memory.

    Attributes:
        seconds: expected time of a decode step.
        gap: the largest share of these that another placement could save.
    """

    where: tuple[Place, ...]
    experts: Chosen
    seconds: float
    gap: float


def place_experts(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    order: str = "listed",
    link: Link | None = None,
) -> ExpertPlacement | None:
    """The fastest placement; None where nothing fits.

    Args:
        costs: of all units with all their experts.
        budgets: cards, and the memory of their hosts, in the order in which they are filled if
            ``order`` is "listed".
        link: what joins the hosts; None where its time isn't known.
    """
    if order == "any":
        budgets = canonical(budgets, costs)
    table = _Table(costs, Offer(budgets, costs, order), link)
    found = table.fastest()
    if found is None:
        return None
    ranges, experts, bound = found
    where = tuple(table.where(ranges))
    apart = [with_experts_apart(cost, experts.get(i, ())) for i, cost in enumerate(costs)]
    seconds = step_seconds(apart, where, budgets) + table.between_hosts(ranges)
    gap = max(1 - bound / seconds, 0.0) if seconds else 0.0
    gap = gap if gap > _ROUNDING else 0.0
    return ExpertPlacement(where=where, experts=experts, seconds=seconds, gap=gap)


def fits_experts(
    costs: Sequence[UnitCost], budgets: Sequence[Budget], order: str = "listed"
) -> bool:
    """Whether :func:`place_experts` finds a placement; faster, for searches."""
    held = sum(cost.weights + cost.cache for cost in costs if not cost.shared)
    if held > sum(budget.room for budget in budgets):
        return False
    if order == "any":
        budgets = canonical(budgets, costs)
    return _Table(costs, Offer(budgets, costs, order)).has_room()


def with_experts_apart(cost: UnitCost, experts: Sequence[int]) -> UnitCost:
    """The cost with these experts in host memory; its reserved bytes in segments stay."""
    if not experts:
        return cost
    nbytes = sum(cost.experts[each] for each in experts)
    return replace(
        cost,
        weights=cost.weights - nbytes,
        host_experts=tuple(sorted(experts)),
        host_weights=nbytes,
        staging=2 * max(cost.experts),
    )


@dataclass(frozen=True, slots=True)
class _Ways:
    """What it takes to make ranges fit on a card; entry [i, j] is for units i to j - 1.

    Attributes:
        seconds: beyond those with all experts there; infinite where they can't fit.
        freed: bytes in host memory; only of experts where these are to be few.
        bound, freed_bound: lower bounds of these two.
    """

    seconds: np.ndarray
    freed: np.ndarray
    bound: np.ndarray
    freed_bound: np.ndarray


class _Table(RangeTable):
    """Ranges that fit with experts in host memory, which lie beside the host's own units."""

    def __init__(self, costs: Sequence[UnitCost], offer: Offer, link: Link | None = None) -> None:
        super().__init__(costs, offer)
        self._units = [costs[index] for index in self.free]
        at = {budget.place: device for device, budget in enumerate(self.budgets)}
        #: For each device, the position of its host's memory; None where that isn't on offer.
        self._memory = [at.get(budget.place.memory) for budget in self.budgets]
        self._memories = sorted({at for at in self._memory if at is not None})
        self._hop = link.seconds(max(cost.hidden_step for cost in costs)) if link else 0.0
        self._made: dict[Rates, _Alike | _Unlike] = {}

    def fastest(self) -> tuple[list[UnitRange], Chosen, float] | None:
        """Ranges, their experts in host memory, and a lower bound of a step's seconds."""
        if not any(unit.experts for unit in self._units):
            return None
        ways = self._ways(least=False)
        if (bound := self._bound(ways, 0.0)) is None:
            return None
        found = self._found(ways, least=False)
        if found is not None and self._room_left(*found) >= 0:
            return *found, bound
        return self._within_memory(ways, bound)

    def has_room(self) -> bool:
        """Whether there is a placement."""
        if not any(unit.experts for unit in self._units):
            return False
        found = self._found(self._ways(least=True), least=True)
        return found is not None and self._room_left(*found) >= 0

    def _within_memory(
        self, fastest: Sequence[_Ways], bound: float
    ) -> tuple[list[UnitRange], Chosen, float] | None:
        """Like :meth:`fastest` where host memory is scarce: search for the lowest price of a byte
        at which few enough are taken. At each price, the lower bound of the total, less the value
        of the host's bytes, bounds every placement."""
        ways = self._ways(least=True)
        best = self._found(ways, least=True)
        if best is None or self._room_left(*best) < 0:
            return None
        low, high = _PRICES
        for _ in range(_BISECTIONS):
            price = (low * high) ** 0.5
            bound = max(bound, self._bound(fastest, price) or 0.0)
            found = self._found(ways, least=True, price=price)
            if found is None or self._room_left(*found) < 0:
                low = price
                continue
            high = price
            best = min(best, found, key=lambda each: self._seconds(each[0], ways))
        return *best, bound

    def _found(
        self, ways: Sequence[_Ways], *, least: bool, price: float | None = None
    ) -> tuple[list[UnitRange], Chosen] | None:
        """The ranges that cost least, and their experts in host memory.

        Args:
            least: whether bytes in host memory count: before all else, or by a price.
        """
        if price is None:
            first = [each.freed if least else None for each in ways]
            costs = [self._costs(d, w.seconds, first[d]) for d, w in enumerate(ways)]
        else:
            costs = [self._costs(d, w.seconds + price * w.freed) for d, w in enumerate(ways)]
        found = self._best(costs, np.add, self._hop)
        return None if found is None else (found[1], self._experts_of(found[1], least=least))

    def _bound(self, ways: Sequence[_Ways], price: float) -> float | None:
        """A lower bound of a step's seconds; None where nothing fits."""
        costs = [self._costs(d, w.bound + price * w.freed_bound) for d, w in enumerate(ways)]
        found = self._best(costs, np.add, self._hop)
        if found is None:
            return None
        room = sum(max(self.offer.room[memory].values()) for memory in self._memories)
        return found[0] - price * room if self.exact else self._at_least()

    def _seconds(self, ranges: Sequence[UnitRange], ways: Sequence[_Ways]) -> float:
        """Seconds of a step in these ranges."""
        bandwidths = list(map(bandwidth, self.budgets))
        read = self.seconds_at(bandwidths)
        seconds = (read[r.device] + ways[r.device].seconds for r in ranges)
        each = (float(s[r.start, r.stop]) for s, r in zip(seconds, ranges, strict=True))
        return sum(each) + self.between_hosts(ranges)

    def between_hosts(self, ranges: Sequence[UnitRange]) -> float:
        """Seconds of a step's hops from host to host."""
        hosts = len({self.budgets[each.device].host for each in ranges})
        return self._hop * max(hosts - 1, 0)

    def _apart_on(self, device: int) -> bool:
        """Whether units on this device may have experts in host memory."""
        return self._memory[device] not in (None, device)

    def _at_least(self) -> float:
        """A lower bound of a step's seconds over all placements and orders: each unit where it is
        fastest, with the host experts that make it fastest, whatever there is room for. (The
        fastest device with all experts is no bound: a card and its host read at the same time.)"""
        read = np.array([unit.traffic for unit in self._units], dtype=float)
        seconds = [
            read / bandwidth(budget)
            + (self._experts_on(device).saved if self._apart_on(device) else 0.0)
            for device, budget in enumerate(self.budgets)
        ]
        return float(np.minimum.reduce(seconds).sum()) + HOP_SECONDS * (len(read) > 0)

    def _ways(self, *, least: bool) -> list[_Ways]:
        """For every device; in host memory itself, all of a unit lies there anyway."""
        return [
            self._experts_on(device).ways(self._need(device), least=least)
            if self._apart_on(device)
            else self._ways_without_experts(device)
            for device in range(len(self.budgets))
        ]

    def _ways_without_experts(self, device: int) -> _Ways:
        extra = np.where(self._need(device) <= 0, 0.0, np.inf)
        most = self.bytes[device] - max(self.offer.room[device].values())
        nbytes = self.bytes[device] * float(self._memory[device] == device)
        return _Ways(extra, nbytes, np.where(most <= 0, 0.0, np.inf), nbytes)

    def _costs(
        self, device: int, extra: np.ndarray, freed: np.ndarray | None = None
    ) -> dict[Role | None, Costs]:
        """For all ranges: seconds, and before these, if they are to be few, bytes of host
        memory."""
        seconds = extra + self.seconds_at([bandwidth(self.budgets[device])])[0]
        first = np.zeros(extra.shape) if freed is None else freed.copy()
        first[np.tril_indices(len(first))] = np.inf
        seconds[np.tril_indices(len(first))] = np.inf
        first[seconds == np.inf] = np.inf
        found: dict[Role | None, Costs] = {}
        for role, fits in self.fits[device].items():
            empty = np.where(fits.diagonal(), 0.0, np.inf)
            found[role] = Costs(first.copy(), seconds.copy())
            np.fill_diagonal(found[role].first, empty)
            np.fill_diagonal(found[role].second, empty)
        return found

    def _need(self, device: int) -> np.ndarray:
        """Bytes by which ranges with all their experts exceed the device, in any role of its
        host."""
        return self.bytes[device] - min(self.offer.room[device].values())

    def _experts_on(self, device: int) -> _Alike | _Unlike:
        rates = rates_of(self.budgets[device], self.budgets)
        if rates not in self._made:
            alike = _Alike.are(self._units)
            self._made[rates] = _Alike(self._units, rates) if alike else _Unlike(self._units, rates)
        return self._made[rates]

    def _experts_of(self, ranges: Sequence[UnitRange], *, least: bool) -> Chosen:
        """Experts in host memory, for units in these ranges."""
        found: Chosen = {}
        for each in ranges:
            if self._apart_on(each.device):
                need = int(self._need(each.device)[each.start, each.stop])
                experts = self._experts_on(each.device)
                chosen = experts.chosen(range(each.start, each.stop), need, least=least)
                found |= {self.free[unit]: those for unit, those in chosen.items() if those}
        return found

    def _room_left(self, ranges: Sequence[UnitRange], experts: Chosen) -> int:
        """Bytes of host memory that these leave, on the host that has fewest; negative where one
        has too few."""
        left = {memory: min(self.offer.room[memory].values()) for memory in self._memories}
        for each in ranges:
            memory = self._memory[each.device]
            if memory == each.device:
                left[memory] -= int(self.bytes[memory][each.start, each.stop])
            elif memory is not None:
                units = self.free[each.start : each.stop]
                left[memory] -= sum(
                    self.costs[unit].experts[e] for unit in units for e in experts.get(unit, ())
                )
        return min(left.values())


class _Alike:
    """Units whose experts are all alike, so that only their numbers matter."""

    def __init__(self, units: Sequence[UnitCost], rates: Rates) -> None:
        self.with_experts = [bool(unit.experts) for unit in units]
        self.before = np.array([0, *self.with_experts]).cumsum()
        unit = next(unit for unit in units if unit.experts)
        self.each, self.size = len(unit.experts), unit.experts[0]
        self.seconds = seconds_beyond(unit, rates, range(self.each))
        count = np.arange(1, self.before[-1] * self.each + 1)
        #: Entry [q - 1, k - 1]: for k experts in host memory, at most of q units.
        self.exactly = np.minimum.accumulate(self._spread(count), axis=0)
        self.at_least = np.minimum.accumulate(self.exactly[:, ::-1], axis=1)[:, ::-1]

    @property
    def saved(self) -> np.ndarray:
        """Seconds, 0 or less, that experts in host memory save each unit at most."""
        return np.where(self.with_experts, self.seconds.min(), 0.0)

    @staticmethod
    def are(units: Sequence[UnitCost]) -> bool:
        kinds = {(u.experts, u.chosen, u.shared_experts, u.hidden_step) for u in units if u.experts}
        return len(kinds) == 1 and all(
            len(set(sizes)) == len(set(shares)) == 1 for sizes, shares, *_ in kinds
        )

    def _spread(self, count: np.ndarray) -> np.ndarray:
        """Seconds of that many experts in host memory, spread evenly over r units; a row for each r
        from 1."""
        units = np.arange(1, self.before[-1] + 1)[:, None]
        each, more = np.divmod(count, units)
        possible = (each > 0) & (each + (more > 0) <= self.each)
        each = np.minimum(each, self.each)
        fewer, others = self.seconds[each], self.seconds[np.minimum(each + 1, self.each)]
        return np.where(possible, (units - more) * fewer + more * others, np.inf)

    def _least(self, need: np.ndarray) -> np.ndarray:
        """The number of experts whose bytes make room, also for the buffers of the others."""
        return np.maximum(-(-(need + 2 * self.size) // self.size), 1)

    def ways(self, need: np.ndarray, *, least: bool) -> _Ways:
        units = self.before[None, :] - self.before[:, None]
        count = self._least(need)
        possible = count <= units * self.each
        table = self.exactly if least else self.at_least
        row, column = np.maximum(units, 1) - 1, np.where(possible, count, 1) - 1
        seconds = np.where(possible, table[row, column], np.inf)
        fits = need <= 0
        seconds = np.where(fits, 0.0 if least else np.minimum(seconds, 0.0), seconds)
        freed = np.where(fits, 0.0, count * self.size)
        return _Ways(seconds, freed, seconds, freed)

    def chosen(self, units: range, need: int, *, least: bool) -> Chosen:
        there = [unit for unit in units if self.with_experts[unit]]
        count, rows = int(self._least(np.array(need))), self.exactly[: len(there)]
        if need <= 0 and (least or not there or self.at_least[len(there) - 1, count - 1] >= 0):
            return {}
        if not least:
            count += int(rows[-1, count - 1 :].argmin())
        several = 1 + int(self._spread(np.array([count]))[: len(there), 0].argmin())
        each, more = divmod(count, several)
        last = there[len(there) - several :]
        counts = [each + (position < more) for position in range(several)]
        return {
            unit: tuple(range(self.each - taken, self.each))
            for unit, taken in zip(last, counts, strict=True)
        }


@dataclass(frozen=True)
class _Coldest:
    """One unit's experts, the coldest first.

    Attributes:
        experts: in this order.
        freed: bytes of the first k, for k from 0 to all.
        seconds: that the unit takes longer with these in host memory.
        best: minimum of these over the same or more experts.
    """

    experts: tuple[int, ...]
    freed: np.ndarray
    seconds: np.ndarray
    best: np.ndarray

    @classmethod
    def of(cls, unit: UnitCost, rates: Rates) -> _Coldest:
        """The unit's experts as they are."""
        order = _coldest_first(unit)
        sizes = np.array([unit.experts[each] for each in order])
        seconds = seconds_beyond(unit, rates, order)
        best = np.minimum.accumulate(seconds[::-1])[::-1]
        return cls(tuple(order), np.array([0, *sizes.cumsum()]), seconds, best)

    @classmethod
    def least_of(cls, unit: UnitCost, rates: Rates) -> _Coldest:
        """A lower bound for any set of experts: with an entry for the fractional expert at which
        host and card take equally long. Of all sets with equally many bytes read, the coldest
        experts free the most."""
        order = _coldest_first(unit)
        sizes = np.array([unit.experts[each] for each in order])
        shares = np.array([unit.chosen[each] for each in order])
        freed, on_host = (np.array([0.0, *each.cumsum()]) for each in (sizes, sizes * shares))
        even = even_bytes(unit, rates)
        if even < on_host[-1] and even not in on_host:
            place = int(np.searchsorted(on_host, even))
            freed = np.insert(freed, place, np.interp(even, on_host, freed))
            on_host = np.insert(on_host, place, even)
        seconds = least_seconds_beyond(unit, rates, on_host)
        return cls(tuple(order), freed, seconds, np.minimum.accumulate(seconds[::-1])[::-1])

    @cached_property
    def parts(self) -> list[tuple[float, int, int]]:
        """The edges of the lower convex hull of seconds over bytes: seconds per byte, and numbers
        of experts before and after."""
        freed, seconds = self.freed.tolist(), self.seconds.tolist()
        parts: list[tuple[float, int, int]] = []
        for after in range(1, len(freed)):
            while True:
                before = parts[-1][2] if parts else 0
                slope = (seconds[after] - seconds[before]) / (freed[after] - freed[before])
                if not parts or parts[-1][0] < slope:
                    break
                parts.pop()
            parts.append((slope, before, after))
        return parts

    def that_free(self, need: np.ndarray | float) -> np.ndarray:
        """The fewest experts that free so many bytes; all where even that is too few."""
        return np.minimum(np.searchsorted(self.freed, need), len(self.experts))


def _coldest_first(unit: UnitCost) -> list[int]:
    return sorted(range(len(unit.experts)), key=lambda each: (unit.chosen[each], -each))


class _Unlike:
    """Units whose experts differ: the parts of their hulls, over all units, by the cost of a byte.

    Attributes:
        parts: each part's unit, and the numbers of its experts in host memory before and after;
            those that save time come first.
        freed, seconds: entry [i, l]: of the first l parts, for units before i.
        saving: the number of parts that save time.
        staging, least_staging: of the buffers for a range's experts, at most and at least.
    """

    def __init__(
        self,
        units: Sequence[UnitCost],
        rates: Rates,
        make: Callable[[UnitCost, Rates], _Coldest] = _Coldest.of,
    ) -> None:
        self._of = units, rates
        self.coldest: dict[int, _Coldest] = {}
        alike: dict[Hashable, _Coldest] = {}
        for index, unit in enumerate(units):
            if unit.experts:
                kind = unit.experts, unit.chosen, unit.shared_experts, unit.hidden_step
                if kind not in alike:
                    alike[kind] = make(unit, rates)
                self.coldest[index] = alike[kind]
        parts = sorted(
            (slope, index, before, after)
            for index, each in self.coldest.items()
            for slope, before, after in each.parts
        )
        self.parts = np.array([part[1:] for part in parts])
        self.saving = sum(slope < 0 for slope, *_ in parts)
        self.freed = np.zeros((len(units) + 1, len(parts) + 1))
        self.seconds = np.zeros_like(self.freed)
        for number, (_, index, before, after) in enumerate(parts, 1):
            each = self.coldest[index]
            self.freed[index + 1, number] = each.freed[after] - each.freed[before]
            self.seconds[index + 1, number] = each.seconds[after] - each.seconds[before]
        for table in (self.freed, self.seconds):
            np.cumsum(table, axis=0, out=table)
            np.cumsum(table, axis=1, out=table)
        largest = np.array([2 * max(unit.experts, default=0) for unit in units])
        self.staging = _over_ranges(largest, np.maximum, 0)
        self.least_staging = _over_ranges(
            np.where(largest, largest, UNBOUNDED), np.minimum, UNBOUNDED
        )

    @cached_property
    def least(self) -> _Unlike:
        """The lower bound for any experts."""
        return _Unlike(*self._of, _Coldest.least_of)

    @property
    def saved(self) -> np.ndarray:
        """As in :class:`_Alike`."""
        saved = np.zeros(len(self._of[0]))
        for index, unit in self.least.coldest.items():
            saved[index] = unit.best[0]
        return saved

    def _first(self, need: np.ndarray) -> np.ndarray:
        """The fewest parts that free so many bytes in each range; one more than there are where
        none do."""
        count = len(self.parts)
        low, high = np.zeros(need.shape, dtype=int), np.full(need.shape, count + 1)
        starts, stops = np.indices(need.shape)
        while (low < high).any():
            middle = np.minimum((low + high) // 2, count)
            enough = self.freed[stops, middle] - self.freed[starts, middle] >= need
            high = np.where(enough & (low < high), middle, high)
            low = np.where(~enough & (low < high), middle + 1, low)
        return low

    def ways(self, need: np.ndarray, *, least: bool) -> _Ways:
        seconds, freed = self._rounded_up(need, least=least)
        bound = seconds if least else self.least._relaxed(need)
        fits = need <= 0
        seconds = np.where(fits, 0.0 if least else np.minimum(seconds, 0.0), seconds)
        bound = np.where(fits, np.minimum(bound, 0.0), bound)
        freed, needed = (np.where(fits, 0.0, n) for n in (freed, need + self.least_staging))
        return _Ways(seconds, freed, np.minimum(bound, seconds), needed)

    def _difference(self, table: np.ndarray, parts: np.ndarray) -> np.ndarray:
        starts, stops = np.indices(parts.shape)
        return table[stops, parts] - table[starts, parts]

    def _relaxed(self, need: np.ndarray) -> np.ndarray:
        """A lower bound of seconds: the last part counts only as far as needed."""
        need = need + self.least_staging
        first = self._first(need)
        whole = np.clip(first - 1, self.saving, None)
        last = np.clip(first, self.saving, len(self.parts))
        whole = np.minimum(whole, last)
        seconds = self._difference(self.seconds, whole)
        more = self._difference(self.freed, last) - self._difference(self.freed, whole)
        lacking = np.clip(need - self._difference(self.freed, whole), 0, None)
        share = np.divide(lacking, more, out=np.zeros_like(more), where=more > 0)
        seconds += share * (self._difference(self.seconds, last) - seconds)
        return np.where(first > len(self.parts), np.inf, seconds)

    def _rounded_up(self, need: np.ndarray, *, least: bool) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and bytes in host memory, with enough whole experts of the last part."""
        need = need + self.staging
        saving = 0 if least else self.saving
        first = self._first(need)
        whole = np.clip(first - 1, saving, len(self.parts))
        seconds, freed = (self._difference(t, whole) for t in (self.seconds, self.freed))
        partly = (first > whole) & (first <= len(self.parts))
        of_unit = np.where(partly, self.parts[np.minimum(whole, len(self.parts) - 1), 0], -1)
        before = self.parts[np.minimum(whole, len(self.parts) - 1), 1]
        for index, unit in self.coldest.items():
            here = of_unit == index
            had = before[here]
            count = unit.that_free(need[here] - freed[here] + unit.freed[had])
            table = unit.seconds if least else unit.best
            seconds[here] += table[count] - unit.seconds[had]
            freed[here] += unit.freed[count] - unit.freed[had]
        return np.where(first > len(self.parts), np.inf, seconds), freed

    def chosen(self, units: range, need: int, *, least: bool) -> Chosen:
        saving = 0 if least else self.saving
        needed = need + int(self.staging[units.start, units.stop])
        freed, seconds = (t[units.stop] - t[units.start] for t in (self.freed, self.seconds))
        first = int(np.searchsorted(freed, needed))
        whole = min(max(first - 1, saving), len(self.parts))
        total = float(seconds[whole])
        taken = self.parts[:whole]
        counts = dict(taken[np.isin(taken[:, 0], units)][:, (0, 2)].tolist())
        if whole < first <= len(self.parts):
            index, before, _ = self.parts[whole]
            unit = self.coldest[int(index)]
            count = int(unit.that_free(needed - freed[whole] + unit.freed[before]))
            count += 0 if least else int(unit.seconds[count:].argmin())
            total += float(unit.seconds[count] - unit.seconds[before])
            counts[int(index)] = count
        if need <= 0 and (least or first > len(self.parts) or total >= 0):
            return {}
        return {unit: self.coldest[unit].experts[:n] for unit, n in counts.items()}


def _over_ranges(values: np.ndarray, most: np.ufunc, nothing: int) -> np.ndarray:
    """Entry [i, j]: the maximum, or minimum, of values i to j - 1."""
    table = np.full((len(values) + 1, len(values) + 1), nothing)
    for start in range(len(values)):
        table[start, start + 1 :] = most.accumulate(values[start:])
    return table

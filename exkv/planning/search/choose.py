"""Choose the bits of each unit's weights: the options with the least total loss that fit the
devices.

Every unit has options, ledger lines (``UnitCost``) that differ in weights, workspace and loss, and
the units are placed in contiguous ranges on the devices. That is a chain of multiple-choice
knapsacks, one per device: once a device is closed, only the loss so far matters. So the search goes
unit by unit and device by device, with the Pareto front of bytes on this device and total loss.

A front stays short because a state is dropped if it can't end below a bound, by the linear
relaxation of what is left, whatever device it falls to (see ``knapsack.py``, which has the search
in one room). The bound starts close to the relaxation of the whole and is widened until a solution
is below it, which is then the optimum.

A device's workspace is the maximum over its units, a third coordinate of the front that has few
distinct values. Units whose options depend on each other, those that share a tensor and those that
are pinned, are few, and each of their combinations is searched separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..plan import Budget, UnitCost
from .bounds import has_room
from .knapsack import Item, Relaxed
from .offer import Offer
from .orders import Move
from .ranges import RangeTable

#: One unit's costs for each way of keeping its weights, and its layer's keys and values; they
#: differ in nothing else.
Options: TypeAlias = Sequence[UnitCost]


def least_lossy_units(
    options: Sequence[Options], budgets: Sequence[Budget], order: str = "listed"
) -> list[UnitCost] | None:
    """One option per unit, so that all fit and the summed loss is minimal.

    Args:
        options: of each unit; units that share a tensor have options of the same ``kept``.
        budgets: the devices.
        order: "listed", or "any" if the devices may be filled in any order; with very many unlike
            devices, only one order in which they fit is searched.
    Returns:
        None where none fit.
    """
    best: list[UnitCost] | None = None
    searches = [_Search(narrowed, budgets, order) for narrowed in narrowings(options)]
    for search in sorted(searches, key=lambda search: search.least):
        best = search.best(np.inf if best is None else loss_of(best)) or best
    return best


def loss_of(costs: Sequence[UnitCost]) -> float:
    return float(sum(cost.loss for cost in costs))


def narrowings(options: Sequence[Options]) -> Iterator[list[Options]]:
    """The options, with those of pinned units and of units that share a tensor narrowed to one:
    every valid combination, in which units that share agree."""
    tied = {i for i, each in enumerate(options) if each[0].shared}
    tied |= {other for each in options for other in each[0].shared}
    pinned = {i for i, each in enumerate(options) if each[0].pinned is not None}
    apart = sorted(tied | pinned)
    for chosen in itertools.product(*(options[i] for i in apart)):
        if len({cost.kept for i, cost in zip(apart, chosen, strict=True) if i in tied}) <= 1:
            narrowed = list(options)
            for i, cost in zip(apart, chosen, strict=True):
                narrowed[i] = [cost]
            yield narrowed


def smallest_of(options: Options) -> UnitCost:
    """A unit that takes, in each respect, as little as any of its options."""
    kinds, segmented = options[0].workspace, options[0].reserved
    return replace(
        options[0],
        weights=min(cost.weights for cost in options),
        cache=min(cost.cache for cost in options),
        host_cache=min(cost.host_cache for cost in options),
        segments=min(cost.segments for cost in options),
        workspace={kind: min(cost.workspace[kind] for cost in options) for kind in kinds},
        reserved={kind: min(cost.reserved[kind] for cost in options) for kind in segmented},
    )


@dataclass(frozen=True, slots=True)
class _Front:
    """States after some units, none of which is dominated by another.

    Attributes:
        held: bytes on the open device beside its workspace, int64.
        peak: its workspace, int64.
        loss: total so far, float64.
        parent: the state in the previous front, or -1 where the device was opened here.
        option: of the last unit.
        start: position of the first unit on the device.
    """

    held: np.ndarray
    peak: np.ndarray
    loss: np.ndarray
    parent: np.ndarray
    option: np.ndarray
    start: np.ndarray

    @classmethod
    def opened(cls, peak: int, loss: float, start: int = 0) -> _Front:
        """No unit on the device yet; no state at all where the loss is infinite."""
        count = int(np.isfinite(loss))
        none, held = np.full(count, -1), np.zeros(count, dtype=np.int64)
        first = np.full(count, start)
        return cls(held, np.full(count, peak), np.full(count, loss), none, none, first)

    @classmethod
    def joined(cls, fronts: Sequence[_Front]) -> _Front:
        columns = ("held", "peak", "loss", "parent", "option", "start")
        return cls(*(np.concatenate([getattr(f, column) for f in fronts]) for column in columns))

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def least(self) -> float:
        return float(self.loss.min(initial=np.inf))

    def rows(self, rows: np.ndarray) -> _Front:
        columns = (self.held, self.peak, self.loss, self.parent, self.option, self.start)
        return _Front(*(column[rows] for column in columns))

    def plus(self, held: int, peak: int, loss: float, option: int) -> _Front:
        """The states after one more unit on the device."""
        count = len(self)
        return _Front(
            self.held + held,
            np.maximum(self.peak, peak),
            self.loss + loss,
            np.arange(count),
            np.full(count, option),
            self.start,
        )

    def beside(self, links: Sequence[tuple[int, int]]) -> _Front:
        """The states less the bytes that the next unit shares with units on the device."""
        saved = np.zeros_like(self.held)
        for at, nbytes in links:
            saved += np.where(self.start <= at, nbytes, 0)
        return replace(self, held=self.held - saved)

    def best_of(self, keep: np.ndarray, ahead: Sequence[int]) -> _Front:
        """The kept states that no other of the same workspace dominates, among those that agree on
        the units at the positions ``ahead``."""
        rows = np.flatnonzero(keep)
        there = sum((self.start <= at) * (1 << bit) for bit, at in enumerate(ahead))
        there = np.zeros_like(self.start) + there
        keys = (self.loss[rows], self.held[rows], self.peak[rows], there[rows])
        rows = rows[np.lexsort(keys)]
        loss, differ = self.loss[rows], np.diff(self.peak[rows], prepend=-1)
        first = np.flatnonzero((differ != 0) | (np.diff(there[rows], prepend=-1) != 0))
        kept = []
        for begin, end in itertools.pairwise([*first, len(rows)]):
            lowest = np.minimum.accumulate(loss[begin:end])
            better = np.concatenate([[True], lowest[1:] < lowest[:-1]])
            kept.append(rows[begin:end][better])
        return self.rows(np.concatenate(kept) if kept else rows)


class _Search:
    """One search over devices, with the units that depend on each other already decided."""

    def __init__(self, options: Sequence[Options], budgets: Sequence[Budget], order: str) -> None:
        self.options, self.order = options, order
        self.pinned = [each[0] for each in options if each[0].pinned is not None]
        self.free = [i for i, each in enumerate(options) if each[0].pinned is None]
        self.budgets = list(budgets)
        self.offer = Offer(budgets, [each[0] for each in options], order)
        self.losses = [np.array([cost.loss for cost in options[i]]) for i in self.free]
        self.sizes = [self._sizes(budget) for budget in budgets]
        least = [np.minimum.reduce(each) for each in zip(*self.sizes, strict=True)]
        for position, index in enumerate(self.free):
            linked = (max((n for _, n in self.links(b)[position]), default=0) for b in budgets)
            least[position] = least[position] - self.saved(index) - max(linked)
        self.relaxed = Relaxed([Item(*each) for each in zip(least, self.losses, strict=True)])
        room = self._room(range(len(budgets)))
        #: No choice loses less.
        self.least = float(self.relaxed.least(0, room)) + sum(cost.loss for cost in self.pinned)

    def _sizes(self, budget: Budget) -> list[np.ndarray]:
        """Bytes of each option of each free unit on a device, beside what is pinned there."""
        return [np.array([self._held(cost, budget) for cost in self.options[i]]) for i in self.free]

    def _held(self, cost: UnitCost, budget: Budget) -> int:
        twins = [o for o in cost.shared if self.options[o][0].pinned == budget.place]
        shared = sum(cost.shared[other] for other in twins)
        return cost.held_on(budget) - shared

    def links(self, budget: Budget) -> list[list[tuple[int, int]]]:
        """For each free unit, the positions of earlier ones with the same keys and values, and the
        bytes that these save beside them."""
        where = {unit: at for at, unit in enumerate(self.free)}
        costs = [self.options[index][0] for index in self.free]
        return [
            [
                (where[other], cost.cache_beside(other, budget.device))
                for other in cost.shared_cache
                if other in where
            ]
            for cost in costs
        ]

    def saved(self, index: int) -> int:
        """Bytes that a unit saves beside all free units that it shares with."""
        shared = self.options[index][0].shared
        return sum(nbytes for other, nbytes in shared.items() if other in self.free)

    def best(self, below: float) -> list[UnitCost] | None:
        """The choice of least loss under ``below``, or None."""
        smallest = RangeTable([smallest_of(each) for each in self.options], self.offer)
        if not has_room(smallest):
            return None
        # If there are too many orders to try all, use one in which the smallest options fit.
        one = smallest.orders or self.offer.in_order(self.offer.hosts)
        self.orders = self.offer.orders() or one
        decided = sum(cost.loss for cost in self.pinned)
        least = self.least - decided
        most = min(below - decided, float(sum(losses.max() for losses in self.losses)))
        gap = max((losses.max() for losses in self.losses), default=0.0) / 16
        while least <= most:
            bound = min(least + gap, most)
            if (found := self._within(bound)) is not None:
                return found if loss_of(found) < below else None
            if bound == most:
                return None
            gap *= 4
        return None

    def _room(self, devices: Iterable[int]) -> int:
        """Bytes of these devices, whatever their hosts' roles."""
        limits, floors = self.offer.limits, self.offer.floors
        return sum(max(limits[device] - floors[device], 0) for device in devices)

    def _within(self, bound: float) -> list[UnitCost] | None:
        """The best choice with a loss up to the bound."""
        bound += 1e-9 * abs(bound)  # sums in another order differ in the last bits
        start = np.full(len(self.free) + 1, np.inf)
        start[0] = 0.0
        best, came = [start], list[list[_Step]]([[]])
        for moves, behind in zip(self.orders.states[1:], self.orders.behind[1:], strict=True):
            room = self._room(behind)
            came.append([_Step(self, move, best[move.before], room, bound) for move in moves])
            best.append(np.minimum.reduce([step.after for step in came[-1]]))
        return None if best[-1][-1] == np.inf else self._walk_back(came)

    def _walk_back(self, came: Sequence[Sequence[_Step]]) -> list[UnitCost]:
        chosen = [each[0] for each in self.options]
        state, stop = len(came) - 1, len(self.free)
        while state:
            step = min(came[state], key=lambda tried: tried.after[stop])
            start, taken = step.taken(stop)
            for index, option in zip(self.free[start:stop], taken, strict=True):
                chosen[index] = self.options[index][option]
            state, stop = step.move.before, start
        return chosen


class _Step:
    """A move of an order: to another host, or the filling of a device.

    Attributes:
        after: for every number of units, the least loss of that many after the move.
    """

    def __init__(
        self, search: _Search, move: Move, before: np.ndarray, room: int, bound: float
    ) -> None:
        self.move = move
        self._fill = None if move.device is None else _Fill(search, move, before, room, bound)
        self.after = move.masked(before) if self._fill is None else self._fill.after

    def taken(self, stop: int) -> tuple[int, list[int]]:
        """Of the units before ``stop``, the first one that the move places, and the options of all
        that it places."""
        return (stop, []) if self._fill is None else self._fill.taken(stop)


class _Fill:
    """One device filled after others.

    Attributes:
        after: for every number of units, the least loss of that many on the devices so far.
    """

    def __init__(
        self, search: _Search, move: Move, before: np.ndarray, room: int, bound: float
    ) -> None:
        assert move.device is not None, "this move fills no device"
        self.search, self.device, self.bound = search, move.device, bound
        self.limit = search.offer.room[move.device][move.role]
        may_be_empty = search.offer.may_be_empty[move.device][move.role]
        self.empty = before if may_be_empty else np.full_like(before, np.inf)
        self.chains = [self._chain(before, room, saves=False)]
        if any(map(search.saved, search.free)):  # a tied last unit shares if all are here
            first = np.full_like(before, np.inf)
            first[0] = before[0]
            self.chains.append(self._chain(first, 0, saves=True))
        losses = [[front.least for front in chain] for chain in self.chains]
        self.after = np.minimum.reduce([self.empty, *map(np.array, losses)])

    def _chain(self, before: np.ndarray, room: int, *, saves: bool) -> list[_Front]:
        """The fronts after 0, 1, ... units.

        Args:
            room: bytes on other devices for the units that follow.
        """
        search, device = self.search, self.device
        budget, floor = search.budgets[device], search.offer.floors[device]
        links = search.links(budget)
        fronts = [_Front.opened(floor, before[0])]
        for position, index in enumerate(search.free):
            saved = search.saved(index) if saves else 0
            lines = zip(search.options[index], search.sizes[device][position], strict=True)
            parts = [_Front.opened(floor, before[position + 1], position + 1)]
            if len(fronts[-1]):
                beside = fronts[-1].beside(links[position])
                parts += [
                    beside.plus(int(size) - saved, cost.call_on(budget), cost.loss, option)
                    for option, (cost, size) in enumerate(lines)
                ]
            ahead = {at for each in links[position + 1 :] for at, _ in each if at <= position}
            front = _Front.joined(parts)
            fronts.append(self._kept(front, position + 1, room, sorted(ahead)))
        return fronts

    def _kept(self, front: _Front, units: int, room: int, ahead: Sequence[int]) -> _Front:
        """The states that fit, and may still end within the bound.

        Args:
            ahead: positions of units whose keys and values are shared with units to come.
        """
        left = self.limit - front.held - front.peak
        rest = self.search.relaxed.least(units, left + room)
        return front.best_of((left >= 0) & (front.loss + rest <= self.bound), ahead)

    def taken(self, stop: int) -> tuple[int, list[int]]:
        """Of the units before ``stop``, the first one placed here, and the options of all that are
        placed here."""
        value, options, position = self.after[stop], list[int](), stop
        if self.empty[stop] == value:
            return stop, options
        chain = next(chain for chain in self.chains if chain[stop].least == value)
        row = int(chain[stop].loss.argmin())
        while (parent := int(chain[position].parent[row])) >= 0:
            options.append(int(chain[position].option[row]))
            row, position = parent, position - 1
        return position, options[::-1]

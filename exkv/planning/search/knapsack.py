"""Multiple-choice knapsacks: choose one option, with bytes and a loss, for every item, so that the
summed loss is minimal among the choices that fit.

``front`` has all combinations of a few items, and ``least_lossy`` the best choice for many items
within a number of bytes. Both go item by item with the Pareto front of bytes and loss so far.
``least_lossy`` drops states that can't end below a bound, by the linear relaxation of what is left
(Sinha and Zoltners, 1979: per item the lower convex hull, its steps taken steepest first); the
bound starts close to the relaxation of the whole and is widened until a solution is below it, which
is then the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: How far above the relaxation the first bound lies, as a share of it.
_FIRST_GAP = 4e-6


@dataclass(frozen=True, slots=True)
class Item:
    """An item's options: bytes, int64, and losses, float64."""

    sizes: np.ndarray
    losses: np.ndarray


class Relaxed:
    """The least loss of the items from each one on, if bytes could be divided freely."""

    def __init__(self, items: Sequence[Item]) -> None:
        steps: list[tuple[float, int, float]] = []  # loss per byte, bytes, loss: of hulls' edges
        nbytes, loss = 0, 0.0
        self._tables = [(np.zeros(1), np.zeros(1))]
        for item in reversed(items):
            points = _hull(item)
            nbytes, loss = nbytes + points[0][0], loss + points[0][1]
            for (b0, l0), (b1, l1) in itertools.pairwise(points):
                steps.append(((l1 - l0) / (b1 - b0), b1 - b0, l1 - l0))
            steps.sort()
            x = np.cumsum([nbytes, *(step[1] for step in steps)], dtype=float)
            y = np.cumsum([loss, *(step[2] for step in steps)])
            self._tables.append((x, y))
        self._tables.reverse()

    def least(self, item: int, room: np.ndarray | float) -> np.ndarray:
        """From this item on, within ``room`` bytes; infinite where they are too few."""
        x, y = self._tables[item]
        return np.where(room < x[0], np.inf, np.interp(room, x, y))


def _hull(item: Item) -> list[tuple[int, float]]:
    """The lower convex hull of an item's options: ascending bytes, falling losses."""
    hull: list[tuple[int, float]] = []
    for size, loss in sorted(zip(item.sizes.tolist(), item.losses.tolist(), strict=True)):
        if hull and loss >= hull[-1][1]:
            continue
        while hull and (size == hull[-1][0] or _above(hull, (size, loss))):
            hull.pop()
        hull.append((size, loss))
    return hull


def _above(hull: list[tuple[int, float]], point: tuple[int, float]) -> bool:
    """Whether the hull's last point lies on or above the line from the one before it to this."""
    if len(hull) < 2:
        return False
    (b0, l0), (b1, l1), (b2, l2) = hull[-2], hull[-1], point
    return (l1 - l0) * (b2 - b0) >= (l2 - l0) * (b1 - b0)


@dataclass(frozen=True, slots=True)
class _States:
    """After some items: bytes, loss, the previous state and the option of the last item; by
    ascending bytes and falling losses."""

    sizes: np.ndarray
    losses: np.ndarray
    parents: np.ndarray
    options: np.ndarray

    @classmethod
    def first(cls) -> _States:
        none = np.zeros(1, dtype=np.int64)
        return cls(none, np.zeros(1), none, none)

    def plus(self, item: Item) -> _States:
        """The states after one more item, in all its options, none dominated by another."""
        count = len(self.sizes)
        sizes = (self.sizes + item.sizes[:, None]).ravel()
        losses = (self.losses + item.losses[:, None]).ravel()
        order = np.lexsort((losses, sizes))
        lowest = np.minimum.accumulate(losses[order])
        rows = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
        return _States(sizes[rows], losses[rows], rows % count, rows // count)

    def rows(self, rows: np.ndarray) -> _States:
        return _States(self.sizes[rows], self.losses[rows], self.parents[rows], self.options[rows])


def _walk_back(states: Sequence[_States], row: int) -> list[int]:
    """The options of all items, in order, that led to a state of the last."""
    options = []
    for each in reversed(states[1:]):
        options.append(int(each.options[row]))
        row = int(each.parents[row])
    return options[::-1]


def front(items: Sequence[Item], most: int) -> tuple[Item, list[list[int]]]:
    """All combinations of the items, as one item, and the items' options for each of its own.

    Args:
        most: points, 2 or more. A larger front is cut into ``most - 1`` cells of equal bytes, and
            the first point of each is kept: in place of any other point, one with at most a cell
            fewer bytes remains.
    """
    states = [_States.first()]
    for item in items:
        states.append(states[-1].plus(item))
    rows = np.arange(len(states[-1].sizes))
    if len(rows) > most:
        sizes = states[-1].sizes
        rows = np.unique(np.searchsorted(sizes, np.linspace(sizes[0], sizes[-1], most)))
    last = states[-1].rows(rows)
    return Item(last.sizes, last.losses), [_walk_back(states, int(row)) for row in rows]


def least_lossy(items: Sequence[Item], room: int) -> list[int] | None:
    """An option for each item, so that they fit in ``room`` bytes and the summed loss is minimal;
    None where none fit."""
    relaxed = Relaxed(items)
    least = float(relaxed.least(0, room))
    most = float(sum(item.losses.max() for item in items))
    largest = float(max((item.losses.max() for item in items), default=0.0))
    gap = least * _FIRST_GAP if 0 < least < np.inf else largest / 1024
    while least <= most:
        bound = min(least + gap, most)
        if (found := _within(items, relaxed, room, bound)) is not None:
            return found
        if bound == most:
            break
        gap *= 4
    return None


def _within(items: Sequence[Item], relaxed: Relaxed, room: int, bound: float) -> list[int] | None:
    bound += 1e-9 * abs(bound)  # sums in another order differ in the last bits
    states = [_States.first()]
    for done, item in enumerate(items, 1):
        made = states[-1].plus(item)
        ends = made.losses + relaxed.least(done, room - made.sizes)
        states.append(made.rows(np.flatnonzero(ends <= bound)))
        if not len(states[-1].sizes):
            return None
    return _walk_back(states, len(states[-1].sizes) - 1)

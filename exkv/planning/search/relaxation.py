"""Bounds that no placement beats, whatever the order in which devices are filled.

Each unit has a share of the model, and all shares have to be covered. On a device, a range covers
the sum of its units' shares at a cost. Over all ranges that fit there, a device has a maximum
coverage, and each share a minimum cost. Whatever covers everything therefore costs at least as much
as filling the devices with the cheapest shares first, the last one in part: the linear relaxation
of a knapsack (Dantzig, 1957). It holds for any shares, and so does the tightest of several bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Relative precision of sums of floats.
_PRECISION = 1e-12


class Relaxation:
    """Bounds for units with these shares.

    Args:
        shares: one array per kind of share, with one of each unit, float64 (n,), nonnegative.
    """

    def __init__(self, shares: Sequence[np.ndarray]) -> None:
        sums = [np.concatenate([[0.0], each]).cumsum() for each in shares if each.any()]
        #: For each kind, what ranges cover, (n + 1, n + 1).
        self._covered = [np.maximum(each[None, :] - each[:, None], 0.0) for each in sums]

    def least(self, costs: Sequence[np.ndarray]) -> float:
        """The minimum cost of covering all units; infinite where they can't be covered.

        Args:
            costs: for each device, of ranges of units, (n + 1, n + 1); nonnegative, infinite where
                they don't fit.
        """
        return max((_least(covered, costs) for covered in self._covered), default=0.0)

    def fewest(self, groups: Sequence[Sequence[np.ndarray]]) -> int:
        """The fewest groups of devices that cover all units; more than there are if none do.

        Args:
            groups: for each group's devices, which ranges fit, bool (n + 1, n + 1).
        """
        return max((_fewest(covered, groups) for covered in self._covered), default=0)

    def most_left(self, left: Sequence[np.ndarray]) -> float:
        """The most that every device can have left while they cover all units; -inf where they
        can't.

        Args:
            left: for each device, what ranges leave there, (n + 1, n + 1); -inf where they don't
                fit.
        """
        return min((_most_left(covered, left) for covered in self._covered), default=np.inf)


def _least(covered: np.ndarray, costs: Sequence[np.ndarray]) -> float:
    offers = []
    for cost in costs:
        there = (cost < np.inf) & (covered > 0)
        if there.any():
            offers.append(((cost[there] / covered[there]).min(), covered[there].max()))
    rest, total = _all(covered), 0.0
    for rate, most in sorted(offers):
        total += rate * min(most, rest)
        rest = max(rest - most, 0.0)
    return np.inf if rest > 0 else float(total) * (1 - _PRECISION)


def _fewest(covered: np.ndarray, groups: Sequence[Sequence[np.ndarray]]) -> int:
    most = [sum(covered[fits].max(initial=0.0) for fits in group) for group in groups]
    return 1 + int(np.searchsorted(np.sort(most)[::-1].cumsum(), _all(covered)))


def _most_left(covered: np.ndarray, left: Sequence[np.ndarray]) -> float:
    steps = []  # for each device: what is left, falling, and the most that is covered
    for each in left:
        there = (each > -np.inf) & (covered > 0)
        down = np.argsort(-each[there])
        steps.append((-each[there][down], np.maximum.accumulate(covered[there][down])))
    levels = np.unique(np.concatenate([-fallen for fallen, _ in steps]))

    def covers(level: float) -> bool:
        counts = [np.searchsorted(fallen, -level, side="right") for fallen, _ in steps]
        most = (c[n - 1] for n, (_, c) in zip(counts, steps, strict=True) if n)
        return sum(most) >= _all(covered)

    low, high = -1, len(levels)  # levels[low] can be covered, levels[high] can't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if covers(levels[middle]) else (low, middle)
    return float(levels[low]) if low >= 0 else -np.inf


def _all(covered: np.ndarray) -> float:
    return float(covered[0, -1]) * (1 - _PRECISION)

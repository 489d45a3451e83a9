"""What no placement betters: bounds that don't ask in which order devices are filled.

Each unit has a share of the model, and all shares have to be covered. On a device, a range covers
the sum of its units' shares at a cost; over all ranges that fit there, a device covers at most so
much, and each share costs at least so much. Whatever covers everything therefore costs at least
what the devices do that are filled by their cheapest shares first, the last one in part: the
linear relaxation of a knapsack (Dantzig, 1957). It holds for any shares, so of bounds for several
the tightest does, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Sums of floats are right to this part of themselves.
_PRECISION = 1e-12


class Relaxation:
    """Bounds for units of these shares.

    Args:
        shares: of several kinds, one of each unit, float64 (n,); none of them negative.
    """

    def __init__(self, shares: Sequence[np.ndarray]) -> None:
        sums = [np.concatenate([[0.0], each]).cumsum() for each in shares if each.any()]
        #: Of each kind what ranges cover, (n + 1, n + 1).
        self._covered = [np.maximum(each[None, :] - each[:, None], 0.0) for each in sums]

    def least(self, costs: Sequence[np.ndarray]) -> float:
        """The least that it costs to cover all units; infinite where they can't be covered.

        Args:
            costs: of each device, of ranges of units, (n + 1, n + 1); infinite where they don't
                fit, and never negative.
        """
        return max((_least(covered, costs) for covered in self._covered), default=0.0)

    def fewest(self, groups: Sequence[Sequence[np.ndarray]]) -> int:
        """The fewest groups of devices that cover all units; more than there are where none do.

        Args:
            groups: of each group's devices, which ranges fit, bool (n + 1, n + 1).
        """
        return max((_fewest(covered, groups) for covered in self._covered), default=0)

    def most_left(self, left: Sequence[np.ndarray]) -> float:
        """The most that every device may have left while they cover all units; -inf where they
        can't.

        Args:
            left: of each device, what ranges leave there, (n + 1, n + 1); -inf where they don't
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
    steps = []  # of each device: what is left, falling, and what is covered at most
    for each in left:
        there = (each > -np.inf) & (covered > 0)
        down = np.argsort(-each[there])
        steps.append((-each[there][down], np.maximum.accumulate(covered[there][down])))
    levels = np.unique(np.concatenate([-fallen for fallen, _ in steps]))

    def covers(level: float) -> bool:
        counts = [np.searchsorted(fallen, -level, side="right") for fallen, _ in steps]
        most = (c[n - 1] for n, (_, c) in zip(counts, steps, strict=True) if n)
        return sum(most) >= _all(covered)

    low, high = -1, len(levels)  # levels[low] does, levels[high] doesn't
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if covers(levels[middle]) else (low, middle)
    return float(levels[low]) if low >= 0 else -np.inf


def _all(covered: np.ndarray) -> float:
    return float(covered[0, -1]) * (1 - _PRECISION)

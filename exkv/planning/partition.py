"""Contiguous ranges of units over devices: the optimum, by dynamic programming on small matrices.

A matrix belongs to a device; its entry ``[i, j]`` is what it costs to put units ``i`` to ``j - 1``
there, infinity where they do not fit, and on the diagonal, for no unit, what it costs to leave
the device empty. ``best_ranges`` finds those that cover all units at the least cost; which costs,
and what they mean, is ``exkv.planning.placement``'s affair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

#: How the costs of two devices combine: ``np.add`` for sums, ``np.maximum`` for bottlenecks.
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]

#: Sets of unlike devices that a search over all orders may look at.
MAX_STATES = 1 << 12


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units ``start`` to ``stop - 1`` on the device at position ``device`` of the list."""

    device: int
    start: int
    stop: int


def best_ranges(
    matrices: Sequence[np.ndarray], combine: Combine, *, kinds: Sequence[Hashable] | None = None
) -> tuple[float, list[UnitRange]] | None:
    """The least cost and the non-empty ranges that have it, in the order of the units.

    Args:
        matrices: float64 (n + 1, n + 1), one a device, in the devices' order.
        combine: of devices' costs.
        kinds: None to keep the devices' order. Else any order may be taken, and devices of one
            kind, which must have equal matrices, count as alike.

    Returns:
        None where no way covers all units. Of several best ways, one that fills earlier devices.

    Raises:
        ValueError: too many unlike devices to try all orders.
    """
    if kinds is None:
        return _in_order(matrices, combine)
    return _in_any_order(matrices, combine, kinds)


def _start(size: int, combine: Combine) -> np.ndarray:
    """Costs before any device: the first 0 units are placed for nothing."""
    costs = np.full(size, np.inf)
    costs[0] = 0.0 if combine is np.add else -np.inf
    return costs


def _extend(
    costs: np.ndarray, matrix: np.ndarray, combine: Combine
) -> tuple[np.ndarray, np.ndarray]:
    """Costs of covering the first j units once this device is used too, and where its range
    starts; of equal ones the shortest range, so that earlier devices are filled first."""
    total = combine(costs[:, None], matrix)
    start = len(costs) - 1 - total[::-1].argmin(axis=0)
    return total[start, np.arange(len(costs))], start


def _in_order(
    matrices: Sequence[np.ndarray], combine: Combine
) -> tuple[float, list[UnitRange]] | None:
    costs = _start(len(matrices[0]), combine)
    starts = []
    for matrix in matrices:
        costs, start = _extend(costs, matrix, combine)
        starts.append(start)
    if costs[-1] == np.inf:
        return None
    ranges, stop = [], len(costs) - 1
    for device in range(len(matrices) - 1, -1, -1):
        ranges.append(UnitRange(device, int(starts[device][stop]), stop))
        stop = ranges[-1].start
    return float(costs[-1]), [each for each in reversed(ranges) if each.start < each.stop]


def _in_any_order(
    matrices: Sequence[np.ndarray], combine: Combine, kinds: Sequence[Hashable]
) -> tuple[float, list[UnitRange]] | None:
    """The same over sets of devices: how many of each kind are used, whatever their order."""
    groups = members_of(kinds)
    none, full = (0,) * len(groups), tuple(len(group) for group in groups)
    best = {none: _start(len(matrices[0]), combine)}
    came: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    for state in by_size(full)[1:]:
        used = [g for g in range(len(groups)) if state[g]]
        options = [_extend(best[less(state, g)], matrices[groups[g][0]], combine) for g in used]
        table = np.stack([costs for costs, _ in options])
        choice = table.argmin(axis=0)
        column = np.arange(len(choice))
        best[state] = table[choice, column]
        came[state] = (
            np.array(used)[choice],
            np.stack([start for _, start in options])[choice, column],
        )
    if best[full][-1] == np.inf:
        return None
    return float(best[full][-1]), _walk_back(groups, came, len(matrices[0]) - 1)


def members_of(kinds: Sequence[Hashable]) -> list[list[int]]:
    """The positions of each kind; ValueError where their sets are too many to try all orders."""
    members = {kind: [d for d, k in enumerate(kinds) if k == kind] for kind in kinds}
    groups = list(members.values())
    sets = math.prod(len(group) + 1 for group in groups)
    if sets > MAX_STATES:
        raise ValueError(
            f"order='any' over {len(kinds)} devices of {len(groups)} kinds would look at {sets} "
            f"sets, and {MAX_STATES} is the limit: list the devices in the order to fill"
        )
    return groups


def by_size(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every ``(0..c for c in counts)``, smaller sums first."""
    ranges = np.indices([count + 1 for count in counts]).reshape(len(counts), -1).T
    return sorted((tuple(map(int, row)) for row in ranges), key=sum)


def less(state: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The set without one of this kind."""
    return (*state[:group], state[group] - 1, *state[group + 1 :])


def _walk_back(
    groups: Sequence[Sequence[int]],
    came: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]],
    stop: int,
) -> list[UnitRange]:
    """The ranges, from the last unit back to the first; of a kind's devices the first ones."""
    state, taken = tuple(len(group) for group in groups), []
    while any(state):
        group, start = (int(table[stop]) for table in came[state])
        if start < stop:
            taken.append((group, start, stop))
        state, stop = less(state, group), start
    left = [list(group) for group in groups]
    return [UnitRange(left[group].pop(0), start, stop) for group, start, stop in reversed(taken)]

"""Contiguous ranges of units over devices: the optimum, by dynamic programming on small matrices.

``best_ranges`` finds those that cover all units at the least cost, along the orders in which the
devices may be filled (``exkv.planning.orders``); which costs, and what they mean, is
``exkv.planning.placement``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .orders import Move, Orders
from .plan import Role

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
    """Costs in two parts: the sum of the first is to be small before all else.

    Of a device float64 (n + 1, n + 1): entry ``[i, j]`` is what it costs to put units ``i`` to
    ``j - 1`` there, infinity where they do not fit, and on the diagonal, for no unit, what it costs
    to leave the device empty. Of a state (n + 1,): of placing the first j units.
    """

    first: np.ndarray
    second: np.ndarray


#: Of one device, by its host's role.
ByRole = Mapping[Role | None, Costs]


def best_ranges(
    devices: Sequence[ByRole], combine: Combine, orders: Orders, toll: float = 0.0
) -> tuple[float, list[UnitRange]] | None:
    """The least cost (its second part) and the non-empty ranges that have it, in the order of the
    units.

    Args:
        devices: the costs of each.
        combine: of the second parts; the first ones are added.
        toll: added to the second part for every hop between hosts.

    Returns:
        None where no way covers all units. Of several best ways, one that fills earlier devices.
    """
    size = len(next(iter(devices[0].values())).first)
    states, came = [_start(size, combine)], [(np.zeros(size, int), np.zeros((1, size), int))]
    for moves in orders.states[1:]:
        reached = [_reach(move, states[move.before], devices, combine, toll) for move in moves]
        costs, choice = _least([costs for costs, _ in reached])
        states.append(costs)
        came.append((choice, np.stack([starts for _, starts in reached])))
    if states[-1].first[-1] == np.inf:
        return None
    return float(states[-1].second[-1]), _walk_back(orders, came, size - 1)


def _start(size: int, combine: Combine) -> Costs:
    """Before any device: the first 0 units are placed for nothing."""
    first, second = np.full(size, np.inf), np.full(size, np.inf)
    first[0], second[0] = 0.0, 0.0 if combine is np.add else -np.inf
    return Costs(first, second)


def _reach(
    move: Move, before: Costs, devices: Sequence[ByRole], combine: Combine, toll: float
) -> tuple[Costs, np.ndarray]:
    """What a move makes of the costs, and where its range starts."""
    if move.device is not None:
        return _extend(before, devices[move.device][move.role], combine)
    second = move.masked(before.second)
    if move.pays is not None and combine is np.add:
        second[move.pays] += toll
    return Costs(move.masked(before.first), second), np.arange(len(second))


def _extend(before: Costs, device: Costs, combine: Combine) -> tuple[Costs, np.ndarray]:
    """Costs of covering the first j units once this device is used too, and where its range
    starts; of equal ones the shortest range, so that earlier devices are filled first."""
    first = before.first[:, None] + device.first
    second = combine(before.second[:, None], device.second)
    least = first.min(axis=0)
    second[first > least] = np.inf
    start = len(least) - 1 - second[::-1].argmin(axis=0)
    return Costs(least, second[start, np.arange(len(least))]), start


def _least(options: Sequence[Costs]) -> tuple[Costs, np.ndarray]:
    """For each number of units the least of the options, and which; of equal ones the first."""
    if len(options) == 1:
        return options[0], np.zeros(len(options[0].first), int)
    first = np.stack([each.first for each in options])
    second = np.stack([each.second for each in options])
    least = first.min(axis=0)
    second[first > least] = np.inf
    choice = second.argmin(axis=0)
    return Costs(least, second[choice, np.arange(len(choice))]), choice


def _walk_back(
    orders: Orders, came: Sequence[tuple[np.ndarray, np.ndarray]], stop: int
) -> list[UnitRange]:
    """The ranges, found from the last unit back to the first."""
    state, ranges = len(orders.states) - 1, []
    while state:
        choice, starts = came[state]
        move, start = orders.states[state][choice[stop]], int(starts[choice[stop], stop])
        if move.device is not None and start < stop:
            ranges.append(UnitRange(move.device, start, stop))
        state, stop = move.before, start
    return ranges[::-1]

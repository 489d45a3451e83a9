"""Bounds for a :class:`RangeTable` in any order of its devices: whether there can be room, and how
far the ranges found may be from the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..plan import Link
from .ranges import RangeTable, UnitRange, best_ranges
from .relaxation import Relaxation

#: The value found, and the bound that no other ranges beat.
_Measure = tuple[float, float]


def has_room(table: RangeTable) -> bool:
    """Whether all units fit. If they do, they mostly fit in the listed order, and if they don't in
    any order, they are mostly too large for all devices together."""
    if table.offer.order == "any":
        if not may_have_room(table):
            return False
        listed = table.offer.in_order(table.offer.hosts)
        if best_ranges(table.unweighed(), np.add, listed) is not None:
            return True
    return table.fill_up() is not None


def may_have_room(table: RangeTable) -> bool:
    """Whether the bounds leave room for a placement."""
    costs = [np.where(fits, 0.0, np.inf) for fits, _, _ in _devices(table)]
    return _relaxed(table).least(costs) < np.inf


def gap(
    table: RangeTable, ranges: Sequence[UnitRange], objective: str, order: str, link: Link | None
) -> float:
    """How far these ranges, the table's best, may be from the best in any order: see
    :attr:`Plan.gap`."""
    if table.exact:
        return 0.0
    measures = _measures(table, ranges, objective, table.toll(objective, order, link))
    return next((_relative_gap(*each) for each in measures if _relative_gap(*each)), 0.0)


def _measures(
    table: RangeTable, ranges: Sequence[UnitRange], objective: str, toll: float
) -> Iterator[_Measure]:
    """The values that the objective compares, most important first."""
    relaxed = _relaxed(table)
    overflow = _overflow(table, ranges, relaxed)
    yield overflow
    # What is better in a later value has no more overflow.
    fits = [fits & (size <= overflow[0]) if over else fits for fits, size, over in _devices(table)]
    hosts = len({table.budgets[each.device].host for each in ranges})
    fewest = relaxed.fewest([[fits[device] for device in host] for host in table.offer.hosts])
    if objective == "balance":
        yield _smallest_headroom(table, ranges, fits, relaxed)
    elif objective == "speed":
        found, least = _seconds(table, ranges, fits, relaxed)
        yield found + toll * (hosts - 1), least + toll * (fewest - 1)
    else:
        yield hosts, fewest
        yield len(ranges), relaxed.fewest([[each] for each in fits])


def _devices(table: RangeTable) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """For each device: which ranges fit, in some role of its host; their bytes; and whether it is
    overflow."""
    fits = [np.logical_or.reduce(list(by_role.values())) for by_role in table.fits]
    return zip(fits, table.bytes, table.overflow, strict=True)


def _relaxed(table: RangeTable) -> Relaxation:
    """The relaxation by bytes, by what a step reads, and by the number of units of the commonest
    size."""
    costs = [table.costs[index] for index in table.free]
    nbytes = np.array([cost.weights + cost.cache for cost in costs], dtype=float)
    values, counts = np.unique(nbytes, return_counts=True)
    common = nbytes == values[counts.argmax()] if len(values) else nbytes
    traffic = np.array([cost.traffic for cost in costs], dtype=float)
    return Relaxation([nbytes, traffic, common.astype(float)])


def _overflow(table: RangeTable, ranges: Sequence[UnitRange], relaxed: Relaxation) -> _Measure:
    """Bytes on overflow devices."""
    there = (each for each in ranges if table.overflow[each.device])
    found = sum(table.bytes[each.device][each.start, each.stop] for each in there)
    costs = [np.where(fits, size * over, np.inf) for fits, size, over in _devices(table)]
    return float(found), relaxed.least(costs)


def _smallest_headroom(
    table: RangeTable,
    ranges: Sequence[UnitRange],
    fits: Sequence[np.ndarray],
    relaxed: Relaxation,
) -> _Measure:
    """Over devices that hold units; overflow doesn't count."""
    left = [
        np.where(fit, np.inf if over else room, -np.inf)
        for fit, room, over in zip(fits, table.headrooms(), table.overflow, strict=True)
    ]
    found = min((left[each.device][each.start, each.stop] for each in ranges), default=np.inf)
    return float(found), relaxed.most_left(left)


def _seconds(
    table: RangeTable,
    ranges: Sequence[UnitRange],
    fits: Sequence[np.ndarray],
    relaxed: Relaxation,
) -> _Measure:
    """Seconds of a decode step, without hops between hosts."""
    seconds = table.seconds()
    found = sum(seconds[each.device][each.start, each.stop] for each in ranges)
    costs = [np.where(fit, each, np.inf) for fit, each in zip(fits, seconds, strict=True)]
    return float(found), relaxed.least(costs)


def _relative_gap(found: float, bound: float) -> float:
    """The difference as a share of the larger one."""
    return 0.0 if found == bound else abs(found - bound) / max(abs(found), abs(bound))

"""What calls reserve on a device that gives memory in segments: replayed traces of dry runs.

A device's allocator keeps what calls have freed, so what one call reserves depends on those before
it. But torch gives idle segments back before it runs out of memory, and exkv does so between the
units that it loads, and before it retries a call. What counts is therefore the least memory in
which a call runs that starts without idle segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exkv.caching_allocator import SMALL_SEGMENT, Block, CachingAllocator, Rules
from exkv.devices import rounded

from .live_storages import Trace


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One unit's part of a call, as requests to its device's allocator.

    Attributes:
        requests: the storages that came and went.
        inputs: the position of the request for the unit's input, after those for the batch.
        out: the number of the storage that holds its result.
    """

    requests: Trace
    inputs: int
    out: int


def reserved_bytes(calls: Sequence[CallTrace], rules: Rules) -> int:
    """The least device memory in which these parts of a call run one after another, each with its
    predecessor's output as input; idle segments are given back before memory runs out."""
    most = _peak(calls, rules, None)
    assert most is not None
    step = SMALL_SEGMENT  # segments are multiples of it
    low, high = 0, -(-most // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _peak(calls, rules, middle * step) else (middle, high)
    return min(high * step, most)


def reserved_beside(held: int, requests: Trace, rules: Rules) -> int:
    """Likewise for requests beside ``held`` bytes that are live before and after them."""
    made = {number for number, nbytes in requests if nbytes}
    own = [(number, nbytes) for number, nbytes in requests if number in made]
    return reserved_bytes([CallTrace([(-1, max(held, 1)), *own], inputs=-1, out=-1)], rules)


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes that are allocated for a unit and stay.

    Attributes:
        fixed: its weights, its part of each adapter, and the logits that it makes.
        caches: its layer in each cache, 0 where that is on the host.
        before: likewise, before the layer grew or was converted; 0 if it did neither.
    """

    fixed: Sequence[int]
    caches: Sequence[int]
    before: Sequence[int]

    @property
    def sizes(self) -> frozenset[int]:
        return frozenset((*self.fixed, *self.caches, *self.before)) - {0}

    @property
    def nbytes(self) -> int:
        return sum(map(rounded, (*self.fixed, *self.caches)))


def reserved_for(units: Sequence[Allocated], sizes: frozenset[int], rules: Rules) -> list[int]:
    """What each unit reserves of segments that it shares with allocations of these sizes."""
    share = functools.cache(lambda nbytes: rules.share(nbytes, sizes))
    held_back = _held_back(units, rules, share)
    return [
        sum(map(share, (*unit.fixed, *unit.caches))) + held
        for unit, held in zip(units, held_back, strict=True)
    ]


def _held_back(
    units: Sequence[Allocated], rules: Rules, share: Callable[[int], int]
) -> Sequence[int]:
    """What each unit reserves in addition, of segments that held caches before they grew or were
    converted: they can't be released while they hold something that stays. The count is the bytes
    that the caches leave empty, or what that many allocations can hold back, if that is less."""
    fixed = {nbytes for unit in units for nbytes in unit.fixed if nbytes}
    before = {nbytes for unit in units for nbytes in unit.before if nbytes}
    left = {b for b in before if any(rules.shares_segments(b, f) for f in fixed)}
    holding = {f for f in fixed if any(rules.shares_segments(b, f) for b in before)}
    by_caches = [
        sum(
            share(then) - (share(now) if now < then else 0)
            for then, now in zip(unit.before, unit.caches, strict=True)
            if then in left and then != now
        )
        for unit in units
    ]
    by_fixed = [sum(rules.most_held_back(f) for f in unit.fixed if f in holding) for unit in units]
    return min(by_caches, by_fixed, key=sum)


#: Units over which the space in segments that one leaves and the next fills is averaged.
_ALIKE = 8


@functools.cache
def shared_bytes(sizes: tuple[int, ...], rules: Rules) -> int:
    """Bytes reserved per unit for many units with allocations of these sizes, which share
    segments."""
    allocator = CachingAllocator(rules)
    for nbytes in sizes * _ALIKE:
        allocator.allocate(nbytes)
    return -(-allocator.reserved // _ALIKE)


def _peak(calls: Sequence[CallTrace], rules: Rules, capacity: int | None) -> int | None:
    """The most that is reserved on a device of this capacity; None where it is too small."""
    allocator, given = CachingAllocator(rules, capacity), None
    try:
        for call in calls:
            given = _replayed(allocator, call, given)
    except MemoryError:
        return None
    return allocator.peak


def _replayed(
    allocator: CachingAllocator, call: CallTrace, given: tuple[int, Block] | None
) -> tuple[int, Block] | None:
    """Replay a part on what the one before it left; returns its result's bytes and block."""
    held: dict[int, tuple[int, Block]] = {}
    for position, (number, nbytes) in enumerate(call.requests):
        if not nbytes:
            _, block = held.pop(number)
            allocator.free(block)
        elif position == call.inputs and given is not None and given[0] == nbytes:
            held[number], given = given, None
        else:
            held[number] = nbytes, allocator.allocate(nbytes)
    if given is not None:  # not the next input: the head takes only the last tokens of it
        allocator.free(given[1])
    result = held.pop(call.out, None)
    for _, block in held.values():
        allocator.free(block)
    return result

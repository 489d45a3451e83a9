"""What calls reserve on a device that gives memory in segments: traces of dry runs, replayed.

A device's allocator keeps what calls freed, so that what one reserves depends on those before it.
But torch gives back idle segments before it runs out of memory, and exkv does so between the units
that it loads, and before it retries a call. What counts is therefore the least memory in which a
call runs that begins with no idle segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from exkv.caching_allocator import SMALL_SEGMENT, Block, CachingAllocator, Rules

from .live_storages import Trace


@dataclass(frozen=True, slots=True)
class CallTrace:
    """What one unit's part of a call asks of its device.

    Attributes:
        requests: the storages that came and went.
        inputs: the position of the request for the unit's input, behind those for the batch.
        out: the number of the storage that its result is in.
    """

    requests: Trace
    inputs: int
    out: int


def reserved_bytes(calls: Sequence[CallTrace], rules: Rules) -> int:
    """The least device memory in which these parts of a call run, one after another, each with the
    output of the one before as its input: idle segments are given back before memory runs out."""
    most = _peak(calls, rules, None)
    assert most is not None
    step = SMALL_SEGMENT  # segments are multiples of it
    low, high = 0, -(-most // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _peak(calls, rules, middle * step) else (middle, high)
    return min(high * step, most)


def reserved_beside(held: int, requests: Trace, rules: Rules) -> int:
    """Likewise of requests beside ``held`` bytes that are there before and after them."""
    made = {number for number, nbytes in requests if nbytes}
    own = [(number, nbytes) for number, nbytes in requests if number in made]
    return reserved_bytes([CallTrace([(-1, max(held, 1)), *own], inputs=-1, out=-1)], rules)


#: Units over which what segments are not filled by the one and are filled by the next is spread.
_ALIKE = 8


@functools.cache
def shared_bytes(sizes: tuple[int, ...], rules: Rules) -> int:
    """Bytes reserved for each of many units with allocations of these sizes, which share
    segments."""
    allocator = CachingAllocator(rules)
    for nbytes in sizes * _ALIKE:
        allocator.allocate(nbytes)
    return -(-allocator.reserved // _ALIKE)


def _peak(calls: Sequence[CallTrace], rules: Rules, capacity: int | None) -> int | None:
    """The most that is reserved of a device of this capacity; None where it is too small."""
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
    if given is not None:  # it was taken apart, as the last tokens are before the head
        allocator.free(given[1])
    result = held.pop(call.out, None)
    for _, block in held.values():
        allocator.free(block)
    return result

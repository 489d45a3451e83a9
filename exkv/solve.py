"""Searches among scenarios: the plans or what would fit instead, the longest context, the largest
batch, the least lossy cache, the memory that is lacking.

What a search answers was predicted and placed exactly, and so was its neighbour that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from exkv.cache import CACHES
from exkv.errors import PlacementError
from exkv.plan import Plan, human
from exkv.scenario import Peaks, Scenario

#: Rows that a search for the largest batch goes up to.
MAX_BATCH = 4096
#: Chunk sizes that a refusal tries as its remedy.
_SMALLER_CHUNKS = (1024, 512, 256, 128)


class Question(Protocol):
    """What :func:`largest` asks: whether things fit, with workspaces that are predicted, drawn
    between predictions, or left out."""

    def peaks(self) -> list[Peaks]: ...

    def no_peaks(self) -> list[Peaks]: ...

    def fits(self, peaks: Sequence[Peaks]) -> bool: ...


def plans_for(scenario: Scenario) -> tuple[Plan, ...]:
    """A plan for each workload.

    Raises:
        PlacementError: one does not fit; the error says by how much, where, and lists the nearest
            changes that would make it fit.
    """
    try:
        return scenario.attempt()
    except PlacementError as error:
        found = tuple(nearest_changes(scenario))
        remedy = "; ".join(found) or "no single change would; use a smaller model"
        raise PlacementError(
            f"{error}. What would fit: {remedy}",
            unit=error.unit,
            device=error.device,
            needed=error.needed,
            available=error.available,
            suggestions=found,
            plan=error.plan,
        ) from None


# Solving for one unknown ------------------------------------------------------------------------


def longest(scenario: Scenario, limit: int) -> int:
    """The largest ``max_seq_len`` up to ``limit`` that all caches can have; 0 if none fits."""
    return largest(lambda n: scenario.resized(max_seq_len=n), limit)


def largest_batch(scenario: Scenario, limit: int = MAX_BATCH) -> int:
    """The largest ``batch_size`` up to ``limit`` that all caches can have; 0 if none fits."""
    high = 1
    while high < limit and scenario.resized(batch_size=high).fits():
        high = min(high * 2, limit)
    return largest(lambda n: scenario.resized(batch_size=n), high)


def least_lossy(scenario: Scenario) -> str | None:
    """The first kind of ``exkv.CACHES``, which lists the exact one first, that fits."""
    return next((name for name, kind in CACHES.items() if scenario.as_kind(kind).fits()), None)


def extra_memory(scenario: Scenario) -> tuple[int, int]:
    """The least memory that one more device part would have to have: ``(position, bytes)``, the
    device on which the fewest bytes more would do, and how many; ``(0, 0)`` where all fits."""
    peaks = scenario.peaks()
    if scenario.fits(peaks):
        return 0, 0
    lacks = [_lacking(scenario, device, peaks) for device in range(len(scenario.budgets))]
    return min(enumerate(lacks), key=lambda pair: pair[1])


def _lacking(scenario: Scenario, device: int, peaks: Sequence[Peaks]) -> int:
    """Bytes that this device lacks for everything to fit."""
    high = 1 << 20
    while not scenario.with_more(device, high).fits(peaks):
        high *= 2
    return 1 + _last(0, high, lambda more: not scenario.with_more(device, more).fits(peaks))


def largest(vary: Callable[[int], Question], high: int) -> int:
    """The largest n in 1..high that fits, 0 if none does; what fits at n fits below it.

    Predicting workspaces takes far longer than placing, and between two lengths they are all but
    linear. So each step searches with workspaces drawn between those of the bounds, and only
    its answer is predicted; in the end n was found to fit and n + 1 not to, both exactly.
    """
    known: dict[int, list[Peaks]] = {}

    def fits(n: int) -> bool:
        known[n] = vary(n).peaks()
        return vary(n).fits(known[n])

    def drawn(n: int) -> bool:
        return vary(n).fits(_between(n, low, high, known[low], known[high]))

    high = _last(0, high + 1, lambda n: vary(n).fits(vary(n).no_peaks()))
    if high == 0 or not fits(1):
        return 0
    if fits(high):
        return high
    low = 1
    while high - low > 1:
        guess = max(_last(low, high, drawn), low + 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The last n that fits, of low, which does, to high, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _between(
    n: int, low: int, high: int, below: Sequence[Peaks], above: Sequence[Peaks]
) -> list[Peaks]:
    """Peaks at n on the line between those at two bounds."""
    share = (n - low) / (high - low)
    return [
        {kind: (one[kind] + (two[kind] - one[kind]) * share).astype(np.int64) for kind in one}
        for one, two in zip(below, above, strict=True)
    ]


# What would fit ---------------------------------------------------------------------------------


def nearest_changes(scenario: Scenario) -> Iterator[str]:
    """Single changes that would make it fit, each one planned; those that leave every answer as
    it is come first, then those that shorten what can be said, then those that round it."""
    yield from _smaller_chunks(scenario)
    yield from _lower_reserve(scenario)
    yield from _layers_on_the_host(scenario)
    caches = [c for workload in scenario.workloads for c in workload.promise.caches]
    if caches:
        longest_now = max(cache.max_seq_len for cache in caches)
        length = largest(scenario.shortened, longest_now - 1)
        if length:
            yield f"a cache of max_seq_len={length}"
        for kind in list(CACHES.values())[1:]:
            if scenario.as_kind(kind).fits():
                yield f"{kind.__name__} at the same length"
                break


def _smaller_chunks(scenario: Scenario) -> Iterator[str]:
    chunk = max(workload.promise.max_input_len for workload in scenario.workloads)
    smaller = [n for n in _SMALLER_CHUNKS if n < chunk]
    if smaller and scenario.in_chunks_of(smaller[-1]).fits():
        tokens = next(n for n in smaller if scenario.in_chunks_of(n).fits())
        yield f"chunks of {tokens} tokens (max_input_len={tokens}): the same answers"


def _lower_reserve(scenario: Scenario) -> Iterator[str]:
    peaks = scenario.peaks()
    high = max(budget.reserve for budget in scenario.budgets)
    if not high or not scenario.with_reserve(0).fits(peaks):
        return
    low = _last(0, high, lambda most: scenario.with_reserve(most).fits(peaks))
    yield f"a reserve_vram of {human(low)} ({low:,} bytes): the same answers"


def _layers_on_the_host(scenario: Scenario) -> Iterator[str]:
    if any(budget.device.type == "cpu" for budget in scenario.budgets):
        return
    try:
        plans = scenario.with_host().attempt()
    except PlacementError:
        return
    moved = sum(device.type == "cpu" for plan in plans for device in plan.devices)
    yield f"'cpu' as the last of devices, with {moved} units on it: the same answers, slower"

"""Searches among scenarios: the plans, or what would fit in their place; the longest context, the
largest batch, the least lossy cache, the missing memory.

Each answer was predicted and placed exactly, and so was the next value, which fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from exkv import devices as accelerators
from exkv.cache import BY_LOSS, CACHES, OffloadedStaticCache
from exkv.errors import PlacementError
from exkv.sizes import human

from .fitting import anew, even_with, smallest
from .from_disk import why_not
from .plan import Plan, UnitCost
from .scenario import Peaks, Scenario

#: Upper limit of the search for the largest batch, in rows.
MAX_BATCH = 4096
#: Chunk sizes that a refusal tries as its remedy.
_SMALLER_CHUNKS = (1024, 512, 256, 128)


class Question(Protocol):
    """What :func:`largest` searches over: whether things fit, with workspaces that are predicted,
    interpolated between predictions, or left out."""

    def peaks(self) -> list[Peaks]: ...

    def no_peaks(self) -> list[Peaks]: ...

    def fits(self, peaks: Sequence[Peaks]) -> bool: ...


def plans_for(
    scenario: Scenario, costs: Sequence[Sequence[UnitCost]] | None = None
) -> tuple[Plan, ...]:
    """A plan for each workload.

    Args:
        costs: the scenario's; None to compute them.

    Raises:
        PlacementError: one does not fit; the error says where and by how much, and, when asked,
            lists the nearest changes that would make it fit.
    """
    try:
        return scenario.attempt(costs)
    except PlacementError as error:
        raise PlacementError(
            f"{error}{even_with(scenario)}{why_not(scenario)}",
            unit=error.unit,
            device=error.device,
            needed=error.needed,
            available=error.available,
            suggestions=lambda: nearest_changes(scenario),
            plan=error.plan,
        ) from None


# Solving for one unknown ------------------------------------------------------------------------


def longest(scenario: Scenario, limit: int) -> int:
    """The largest ``max_seq_len`` up to ``limit`` that all caches can have; 0 if none fits."""
    return max(longest_in(way, limit) for way in smallest(scenario))


def longest_in(scenario: Scenario, limit: int) -> int:
    """Like :func:`longest`, with the scenario's calls as they are."""
    if scenario.resized(max_seq_len=limit).fits():
        return limit
    return largest(lambda n: scenario.resized(max_seq_len=n), limit)


def largest_batch(scenario: Scenario, limit: int = MAX_BATCH) -> int:
    """The largest ``batch_size`` up to ``limit`` that all caches can have; 0 if none fits."""
    return max(_largest_batch_in(way, limit) for way in smallest(scenario))


def _largest_batch_in(scenario: Scenario, limit: int) -> int:
    def rows(n: int) -> Scenario:
        return scenario.resized(batch_size=n)

    if rows(limit).fits():
        return limit
    without_calls = _last(0, limit, lambda n: rows(n).has_room_without_calls())
    return largest(rows, without_calls + 1)


def least_lossy(scenario: Scenario) -> str | None:
    """The least lossy kind that fits, among those that keep every token on its device."""

    def fits(name: str) -> bool:
        return any(way.fits() for way in smallest(scenario.as_kind(CACHES[name])))

    return next(filter(fits, BY_LOSS), None)


def extra_memory(scenario: Scenario) -> tuple[int, int]:
    """The fewest additional bytes with which everything fits, if one device is larger: ``(position
    of the device, bytes)``; ``(0, 0)`` where it fits already."""
    costs = scenario.costs(scenario.peaks())
    if scenario.has_room(costs):
        return 0, 0

    def lacks(device: int, nbytes: int) -> bool:
        return not scenario.with_more(device, nbytes).has_room(costs)

    first, least = 0, 1 << 20
    while lacks(first, least):
        least *= 2
    for device in range(len(scenario.budgets)):
        if device == first or not lacks(device, least - 1):
            first, least = device, 1 + _last(0, least, functools.partial(lacks, device))
    return first, least


def largest(vary: Callable[[int], Question], below: int) -> int:
    """The largest n under ``below``, which does not fit; 0 if none fits. What fits at n fits at any
    smaller value.

    Predicting workspaces takes far longer than placing, and between two lengths they are almost
    linear. So each step searches with workspaces interpolated between those at the bounds, and only
    its answer is predicted; in the end n was found to fit and n + 1 not to, both exactly.
    """
    predicted: dict[int, list[Peaks]] = {}

    def fits(n: int) -> bool:
        predicted[n] = vary(n).peaks()
        return vary(n).fits(predicted[n])

    def interpolated(n: int) -> bool:
        return vary(n).fits(_between(n, low, high, predicted[low], predicted[high]))

    one, high = vary(1), below
    if high <= 1 or not one.fits(one.no_peaks()):
        return 0
    predicted[high] = vary(high).peaks()  # memoized where it was refused
    # What fits with larger workspaces than its own fits, and is close to the answer.
    low = max(1, _last(0, high, lambda n: vary(n).fits(predicted[high])))
    if not fits(low):
        low, high = 1, low
        if high == 1 or not fits(1):
            return 0
    while high - low > 1:
        guess = max(_last(low, high, interpolated), low + 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The last n that fits, between ``low``, which does, and ``high``, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _between(
    n: int, low: int, high: int, below: Sequence[Peaks], above: Sequence[Peaks]
) -> list[Peaks]:
    """Peaks at n, interpolated between those at two bounds."""
    share = (n - low) / (high - low)
    return [
        {kind: (one[kind] + (two[kind] - one[kind]) * share).astype(np.int64) for kind in one}
        for one, two in zip(below, above, strict=True)
    ]


# What would fit ---------------------------------------------------------------------------------


def nearest_changes(scenario: Scenario) -> Iterator[str]:
    """Single changes that would make it fit, each one planned: first those that change no answer,
    then those that shorten the context, then those that lose precision."""
    yield from _smaller_chunks(scenario)
    yield from _lower_reserve(scenario)
    yield from _layers_on_the_host(scenario)
    yield from _fewer_bits(scenario)
    caches = [c for workload in scenario.workloads for c in workload.promise.caches]
    if caches:
        yield from _cache_on_the_host(scenario)
        longest_now = max(cache.max_seq_len for cache in caches)
        length = largest(scenario.shortened, longest_now)
        if length:
            yield f"a cache of max_seq_len={length}"
        for kind in (CACHES[name] for name in BY_LOSS[1:]):
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
    costs = scenario.costs(scenario.peaks())
    high = max(budget.reserve for budget in scenario.budgets)
    if not high or not scenario.with_reserve(0).has_room(costs):
        return
    low = _last(0, high, lambda most: scenario.with_reserve(most).has_room(costs))
    yield f"a reserve_vram of {human(low)} ({low:,} bytes): the same answers"


def _fewer_bits(scenario: Scenario) -> Iterator[str]:
    """The most bits in which the weights of float models fit, the same for all layers."""
    for weights in scenario.fewer_bits():
        if (fewer := scenario.with_weights(weights)) is None:
            return
        if fewer.fits():
            free = min(plan.smallest_headroom for plan in anew(fewer).attempt())
            yield f'weights="{weights}": it fits and {human(free)} stay free'
            return


def _cache_on_the_host(scenario: Scenario) -> Iterator[str]:
    if scenario.over_hosts:
        return  # the hosts' memory is unknown
    offloaded = scenario.as_kind(OffloadedStaticCache)
    needed = sum(w.host_cache_bytes() for w in offloaded.workloads)
    if needed <= accelerators.memory(accelerators.CPU).available and offloaded.fits():
        name = OffloadedStaticCache.__name__
        yield f"{name}, with {human(needed)} in host memory: the same answers, slower"


def _layers_on_the_host(scenario: Scenario) -> Iterator[str]:
    if scenario.over_hosts or any(budget.device.type == "cpu" for budget in scenario.budgets):
        return
    if scenario.objective == "speed":
        return  # planning it would take the host's bandwidth
    hosted = scenario.with_host()
    if hosted.fits():
        plans = anew(hosted).attempt()
        moved = sum(device.type == "cpu" for plan in plans for device in plan.devices)
        experts = sum(len(unit.host_experts) for plan in plans for unit in plan.units)
        what = f"{experts:,} experts" if experts else f"{moved} units"
        yield f"'cpu' as the last of devices, with {what} on it: the same answers, slower"

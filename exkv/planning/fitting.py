"""How calls run, where nobody said: in the largest chunks that fit, with logits in the largest
slices of them, and with the embedding in host memory where only that makes it fit.

None of these changes an answer. ``exkv.planning.best`` asks, before it chooses weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from exkv import devices as accelerators
from exkv.models.transformer import CHUNKS

from .scenario import Scenario, Workload

Fits = Callable[[Scenario], bool]


def fitted(scenario: Scenario, fits: Fits) -> Scenario:
    """The scenario with the largest calls that fit; with the smallest, so that a refusal says what
    lacks even then, where none do.

    Args:
        fits: whether a scenario does, whose weights may still be open.
    """
    if fits(scenario):
        return _said(scenario)
    least = smallest(scenario)
    fitting = filter(fits, ways(scenario)) if any(map(fits, least)) else iter(least[-1:])
    return _said(next(fitting))


def smallest(scenario: Scenario) -> list[Scenario]:
    """With the smallest calls that may be chosen: if one of these doesn't fit, nothing does."""
    least = [_in_chunks_of(each, _chunk_sizes(each)[-1]) for each in _places(scenario)]
    return [_sliced(each, CHUNKS[-1]) for each in least]


def anew(scenario: Scenario) -> Scenario:
    """A scenario that was fitted before, and changed since, with the largest calls that fit now."""

    def usual(workload: Workload) -> Workload:
        promise = replace(workload.promise, max_input_len=workload.model.chunks[0], logits_len=None)
        return replace(workload, promise=promise, embed_cpu=workload.model.embed_cpu)

    return fitted(scenario.each(usual), Scenario.fits)


def even_with(scenario: Scenario) -> str:
    """What a refusal adds: that it was tried with less than usual."""
    words = dict.fromkeys(each for workload in scenario.workloads for each in workload.fitted)
    return f", even with {', '.join(words)}" if words else ""


def ways(scenario: Scenario) -> Iterator[Scenario]:
    """All ways in which calls may run, those with larger chunks, then slices, first; and behind
    them those with embeddings in host memory."""
    for placed in _places(scenario):
        for size in _chunk_sizes(placed):
            chunked = _in_chunks_of(placed, size)
            yield chunked
            yield from (way for part in CHUNKS if (way := _sliced(chunked, part)) != chunked)


def _chunk_sizes(scenario: Scenario) -> list[int]:
    """Those that may be chosen, largest first."""
    return sorted({size for w in scenario.workloads for size in w.model.chunks}, reverse=True)


def _in_chunks_of(scenario: Scenario, tokens: int) -> Scenario:
    """In chunks of so many tokens at most, of those that may be chosen."""
    return scenario.each(lambda workload: workload.in_chunks_of(_size(workload, tokens)))


def _size(workload: Workload, most: int) -> int:
    sizes = workload.model.chunks
    return next((size for size in sizes if size <= most), sizes[-1])


def _places(scenario: Scenario) -> list[Scenario]:
    """It, and with embeddings in host memory where that makes a difference."""
    hosted = _embedded(scenario)
    return [scenario] if hosted == scenario else [scenario, hosted]


def _sliced(scenario: Scenario, tokens: int) -> Scenario:
    return scenario.each(lambda workload: _with_slices(workload, tokens))


def _with_slices(workload: Workload, tokens: int) -> Workload:
    if not workload.slices or tokens >= workload.promise.max_input_len:
        return workload
    return workload.with_logits_of(tokens)


def _embedded(scenario: Scenario) -> Scenario:
    """With embeddings that nobody has placed in host memory, as far as that has room for them."""
    if scenario.over_hosts or all(budget.device.type == "cpu" for budget in scenario.budgets):
        return scenario  # nobody said what memory hosts have
    hosted = scenario.each(_with_embedding_on_host)
    costs = [row[0] for row in hosted.costs(hosted.no_peaks())]
    room = accelerators.memory(accelerators.CPU).available
    return hosted if sum(cost.weights for cost in costs if cost.pinned) <= room else scenario


def _with_embedding_on_host(workload: Workload) -> Workload:
    return workload if workload.embed_cpu is not None else replace(workload, embed_cpu=True)


def _said(scenario: Scenario) -> Scenario:
    """The scenario that has in words what is smaller, or elsewhere, than usual."""
    return scenario.each(lambda workload: replace(workload, fitted=tuple(_words(workload))))


def _words(workload: Workload) -> Iterator[str]:
    chunk, slice = workload.promise.max_input_len, workload.promise.logits_len
    if chunk < workload.model.chunks[0]:
        yield f"chunks of {chunk:,} tokens"
    if slice is not None:
        yield f"logits of {slice:,} tokens at a time"
    if workload.embed_cpu and workload.model.embed_cpu is None:
        yield "the embedding in host memory"

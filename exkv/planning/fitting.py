"""Defaults that depend on available memory: the largest chunk that fits, the largest slice of a
chunk whose logits fit, and the embedding in host memory if the model only fits that way.

None of these changes an answer. ``exkv.planning.best`` applies this before it chooses weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from exkv import devices as accelerators
from exkv.models.transformer import CHUNKS

from .host_experts import with_host_experts
from .scenario import Scenario, Workload

Fits = Callable[[Scenario], bool]


def fitted(scenario: Scenario, fits: Fits) -> Scenario:
    """The scenario with the largest calls that fit; with the smallest if none do, so that a refusal
    still says what is missing.

    Args:
        fits: whether a scenario fits; its weights may be undecided.
    """
    if fits(scenario):
        return _described(scenario)
    least = smallest(scenario)
    fitting = filter(fits, ways(scenario)) if any(map(fits, least)) else iter(least[-1:])
    return _described(next(fitting))


def smallest(scenario: Scenario) -> list[Scenario]:
    """The scenarios with the smallest calls. If none of them fits, nothing does."""
    least = [_in_chunks_of(each, _chunk_sizes(each)[-1]) for each in _places(scenario)]
    return [_sliced(each, CHUNKS[-1]) for each in least]


def anew(scenario: Scenario) -> Scenario:
    """Fit a scenario again after a change."""

    def usual(workload: Workload) -> Workload:
        promise = replace(workload.promise, max_input_len=workload.model.chunks[0], logits_len=None)
        return replace(workload, promise=promise, embed_cpu=workload.model.embed_cpu)

    return with_host_experts(fitted(scenario.each(usual), Scenario.fits))


def even_with(scenario: Scenario) -> str:
    """The part of a refusal that names what was made smaller to no avail."""
    words = dict.fromkeys(each for workload in scenario.workloads for each in workload.fitted)
    return f", even with {', '.join(words)}" if words else ""


def ways(scenario: Scenario) -> Iterator[Scenario]:
    """All choices: larger chunks first, then larger slices; embeddings in host memory last."""
    for placed in _places(scenario):
        for size in _chunk_sizes(placed):
            chunked = _in_chunks_of(placed, size)
            yield chunked
            yield from (way for part in CHUNKS if (way := _sliced(chunked, part)) != chunked)


def _chunk_sizes(scenario: Scenario) -> list[int]:
    """Candidate chunk sizes, largest first."""
    return sorted({size for w in scenario.workloads for size in w.model.chunks}, reverse=True)


def _in_chunks_of(scenario: Scenario, tokens: int) -> Scenario:
    """The scenario with the largest chunks of at most ``tokens``."""
    return scenario.each(lambda workload: workload.in_chunks_of(_size(workload, tokens)))


def _size(workload: Workload, most: int) -> int:
    sizes = workload.model.chunks
    return next((size for size in sizes if size <= most), sizes[-1])


def _places(scenario: Scenario) -> list[Scenario]:
    """The scenario, and, if different, the one with embeddings in host memory."""
    hosted = _embedded(scenario)
    return [scenario] if hosted == scenario else [scenario, hosted]


def _sliced(scenario: Scenario, tokens: int) -> Scenario:
    return scenario.each(lambda workload: _with_slices(workload, tokens))


def _with_slices(workload: Workload, tokens: int) -> Workload:
    if not workload.slices or tokens >= workload.promise.max_input_len:
        return workload
    return workload.with_logits_of(tokens)


def _embedded(scenario: Scenario) -> Scenario:
    """The scenario with undecided embeddings in host memory, if there is room for them."""
    if scenario.over_hosts or all(budget.device.type == "cpu" for budget in scenario.budgets):
        return scenario  # the hosts' memory is unknown
    hosted = scenario.each(_with_embedding_on_host)
    costs = [row[0] for row in hosted.costs(hosted.no_peaks())]
    room = accelerators.memory(accelerators.CPU).available
    return hosted if sum(cost.weights for cost in costs if cost.pinned) <= room else scenario


def _with_embedding_on_host(workload: Workload) -> Workload:
    return workload if workload.embed_cpu is not None else replace(workload, embed_cpu=True)


def _described(scenario: Scenario) -> Scenario:
    """Record in words what differs from the defaults."""
    return scenario.each(lambda workload: replace(workload, fitted=tuple(_words(workload))))


def _words(workload: Workload) -> Iterator[str]:
    chunk, slice = workload.promise.max_input_len, workload.promise.logits_len
    if chunk < workload.model.chunks[0]:
        yield f"chunks of {chunk:,} tokens"
    if slice is not None:
        yield f"logits of {slice:,} tokens at a time"
    if workload.embed_cpu and workload.model.embed_cpu is None:
        yield "the embedding in host memory"

"""Evicted pages under a random load: found again in host memory, none lost, and no device ever
holds more than planned."""

from __future__ import annotations

import random

import pytest
import torch
from simproc import run_sim

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer

PAGE = 16
GREEDY = SamplingParams.greedy()


def job(prompt: list[int], new: int = 8, **options) -> Job:
    return Job(prompt=prompt, max_new_tokens=new, settings=GREEDY, **options)


def finished(engine: Engine, given: Job):
    handle = engine.submit(given)
    handle.result()
    return handle


def texts(count: int, length: int = 70) -> list[list[int]]:
    rng = random.Random(length)
    return [[rng.randrange(3, 300) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("nbits", [16, 8])
def test_a_prompt_is_found_in_host_memory_and_gives_the_same_tokens(
    tiny_model, tiny_tokenizer, nbits
):
    first, *others = texts(4)
    cache = PagedCache(tiny_model, 96, page=PAGE, nbits=nbits, host_tokens=320)
    with Engine(tiny_model, cache, tiny_tokenizer) as engine:
        expected = finished(engine, job(first)).tokens
        for text in others:
            finished(engine, job(text))
        assert sum(engine.pool.in_tiers) > 8
        again = finished(engine, job(first))
        assert again.cached_tokens == 64 and again.tokens == expected
        assert not any(engine.pool.holders)


def test_rounded_pages_are_for_jobs_that_allow_it(tiny_model, tiny_tokenizer):
    first, *others = texts(4)
    cache = PagedCache(tiny_model, 96, page=PAGE, rounded_tokens=320)
    with Engine(tiny_model, cache, tiny_tokenizer) as engine:
        expected = finished(engine, job(first)).tokens
        for text in others:
            finished(engine, job(text))
        allowed = finished(engine, job(first, approximate_reuse=True))
        assert allowed.cached_tokens == 64 and len(allowed.tokens) == 8
        exact = finished(engine, job(first))
        assert exact.cached_tokens == 0 and exact.tokens == expected
        assert finished(engine, job(first)).cached_tokens == 64  # exact pages replaced them


def test_next_turn_of_a_chat_reuses_the_answer_if_allowed(tiny_model, tiny_tokenizer):
    (first,) = texts(1, 40)
    with Engine(tiny_model, PagedCache(tiny_model, 320, page=PAGE), tiny_tokenizer) as engine:
        turn = finished(engine, job(first, 30, approximate_reuse=True))
        second = [*first, *turn.tokens, 7, 8, 9]
        plain = finished(engine, job(second))
        assert plain.cached_tokens == 32  # those of the prompt, none of the answer
        plain_tokens = plain.tokens
    with Engine(tiny_model, PagedCache(tiny_model, 320, page=PAGE), tiny_tokenizer) as engine:
        finished(engine, job(first, 30, approximate_reuse=True))
        allowed = finished(engine, job(second, approximate_reuse=True))
        assert allowed.cached_tokens == 64  # of 69 stored tokens
        assert finished(engine, job(second)).tokens == plain_tokens
        assert not any(engine.pool.holders)


def random_load(engine: Engine, seed: int) -> list:
    """Run jobs that arrive at random, some with a common prefix, some cancelled -> the others."""
    rng, (shared,) = random.Random(seed), texts(1, 48)
    coming = [
        job(
            shared[: rng.choice((0, 16, 48))]
            + [rng.randrange(3, 300) for _ in range(rng.randint(1, 30))],
            rng.randint(1, 24),
            priority=rng.choice((0, 0, 1)),
        )
        for _ in range(24)
    ]
    handles = []
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 1, 3)), len(coming))):
            handles.append(engine.submit(coming.pop()))
        if handles and rng.random() < 0.05:
            rng.choice(handles).cancel()
        try:
            engine.iterate()
        except torch.OutOfMemoryError:
            assert len(engine._running.jobs) < 2  # no other job could be preempted
    return [handle for handle in handles if handle.reason != "cancelled"]


@pytest.mark.parametrize("nbits", [16, 4])
def test_injected_oom_loses_no_job_under_random_load(
    tiny_model, tiny_tokenizer, monkeypatch, nbits
):
    cache = PagedCache(tiny_model, 160, page=PAGE, nbits=nbits, host_tokens=96)
    engine = Engine(tiny_model, cache, tiny_tokenizer, max_running=6)
    forward, calls = tiny_model.forward, [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] % 50 == 0:
            raise torch.OutOfMemoryError("from outside")
        return forward(*args, **kwargs)

    monkeypatch.setattr(tiny_model, "forward", failing)
    with engine:
        handles = random_load(engine, 3)
        assert len(handles) > 15 and {handle.reason for handle in handles} == {"length"}
        assert calls[0] > 100 and engine.stats.put_away > 0 and sum(engine.pool.in_tiers) > 0
        assert not any(engine.pool.holders)
        monkeypatch.undo()
        for handle in handles[::4]:
            with_others = list(handle.tokens)
            assert finished(engine, handle.job).tokens == with_others


def loaded_devices(folder: str) -> list:
    """Each simulated device's peak under a random load and its planned bytes; the tiers that were
    used, the number of jobs whose tokens differ from those alone, and the bytes that preempting and
    readmitting a job takes."""
    model = Model(folder, max_input_len=64)
    options = {
        "page": PAGE,
        "nbits": 8,
        "host_tokens": 96,
        "rounded_tokens": 160,
        "rounded_bits": 4,
    }
    cache = PagedCache(model, 160, **options)
    model.load_autosplit(cache)
    with Engine(model, cache, Tokenizer(folder), max_running=5) as engine:
        for index in range(2):
            torch.accelerator.reset_peak_memory_stats(index)
        handles = random_load(engine, 5)
        used = engine.pool.in_tiers
        planned = {each.budget.device.index: each.total for each in model.plan.ledgers}
        peaks = [[torch.accelerator.max_memory_allocated(i), planned[i]] for i in range(2)]
        found = [[handle.job, list(handle.tokens)] for handle in handles[::5]]
        wrong = sum(finished(engine, given).tokens != tokens for given, tokens in found)
        assert not any(engine.pool.holders)
        moved = bytes_to_leave_and_return(engine)
    return [peaks, used, wrong, moved]


def bytes_to_leave_and_return(engine: Engine) -> list[int]:
    handle = engine.submit(job(texts(1, 100)[0], 8))
    while not handle.tokens:
        engine.iterate()
    before = [torch.accelerator.memory_allocated(index) for index in range(2)]
    for index in range(2):
        torch.accelerator.reset_peak_memory_stats(index)
    engine._scheduler._preempt(handle)
    engine._scheduler._admit()
    assert engine._running.jobs == [handle]
    return [torch.accelerator.max_memory_allocated(i) - before[i] for i in range(2)]


def test_random_load_stays_within_each_devices_plan(tiny_folder):
    peaks, used, wrong, moved = run_sim(loaded_devices, "600K,64M", args=[str(tiny_folder)])
    assert all(0 < taken <= planned for taken, planned in peaks), peaks
    assert min(used) > 0 and wrong == 0
    assert max(moved) < 4096, "one page after another, without a second copy"

"""Jobs that decode in several groups, as over hosts: here one machine's calls are settled as late
as if hosts had made them."""

from __future__ import annotations

import random

import pytest
import torch

from exkv import Engine, Grammar, Job, SamplingParams
from exkv.decode import Handle

PAGE, GROUPS = 16, 3
GREEDY = SamplingParams.greedy()
HOT = SamplingParams(temperature=1.2, top_k=0, top_p=1.0)
KINDS = (
    {},
    {"guidance_scale": 1.6, "negative_prompt": [9, 8, 7]},
    {"banned_strings": ["the", "an", "e "], "logprobs": 1},
    {"grammar": Grammar.regex("[a-z]{3,9} (the|key|lamp){2,6}")},
    {"token_healing": True, "priority": 1},
    {"settings": GREEDY},
)


@pytest.fixture
def make(counted, tiny_model, monkeypatch):
    """Makes engines with a number of groups."""

    def build(pages: int, groups: int = GROUPS, **options) -> Engine:
        monkeypatch.setattr(tiny_model, "in_flight", float(groups))
        return counted(pages, PAGE, **options)

    return build


def jobs(count: int) -> list[Job]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 300) for _ in range(48)]
    return [
        Job(
            prompt=shared[: rng.choice((0, 16, 48))]
            + [rng.randrange(3, 300) for _ in range(rng.randint(1, 24))],
            **{"settings": HOT, "max_new_tokens": 20, "seed": seed, **KINDS[seed % len(KINDS)]},
        )
        for seed in range(count)
    ]


def said(handle: Handle) -> tuple[object, ...]:
    return handle.text, handle.tokens, handle.reason, handle.logprobs


def under_way(engine: Engine) -> int:
    return len(engine._scheduler._under_way)


@pytest.mark.parametrize("ngrams", [None, 3])
def test_jobs_in_groups_give_the_same_as_alone(make, monkeypatch, ngrams):
    given, alone = jobs(12), []
    one = make(14, groups=1)
    for job in given:
        alone.append(one.submit(job))
        alone[-1].result()
    engine = make(14, max_running=7, chunk=8, ngrams=ngrams)
    forward, calls = engine.model.forward, [0]

    def failing(*args, **options):
        calls[0] += 1
        if calls[0] % 31 == 0:
            raise torch.OutOfMemoryError("from outside")
        return forward(*args, **options)

    monkeypatch.setattr(engine.model, "forward", failing)
    rng, coming, handles, most = random.Random(1), list(given), [], 0
    while coming or engine.busy:
        if coming and rng.random() < 0.3:
            handles.append(engine.submit(coming.pop(0)))
            if rng.random() < 0.3:
                engine.submit(rng.choice(given)).cancel()
        if rng.random() < 0.1 and under_way(engine):  # with its call under way
            engine.submit(given[0])
            engine.iterate()
            for handle in set(engine._scheduler.rows.jobs) - set(handles):
                handle.cancel()
        engine.iterate()
        most = max(most, under_way(engine))
    assert [said(handle) for handle in handles] == [said(handle) for handle in alone]
    stats = engine.stats
    assert most > GROUPS and stats.put_away > 0 and stats.out_of_memory > 0
    assert stats.found_tokens > 0 and bool(stats.accepted_tokens) == bool(ngrams)


def test_group_begins_its_next_call_before_waiting_for_another(make, monkeypatch):
    engine, order = make(40), []
    begin_forward = engine.model.begin_forward

    def watched(ids, cache, **options):
        begun, rows = begin_forward(ids, cache, **options), len(ids)
        order.append(("begins", id(cache), rows))
        return lambda: (order.append(("is waited for", id(cache), rows)), begun())[1]

    monkeypatch.setattr(engine.model, "begin_forward", watched)
    handles = [
        engine.submit(Job(prompt=[5 + i], max_new_tokens=30, settings=GREEDY)) for i in range(6)
    ]
    while not all(handle.tokens for handle in handles):
        engine.iterate()
    engine.iterate()
    order.clear()
    before = [len(handle.tokens) for handle in handles]
    for _ in range(3):
        engine.iterate()
    assert [len(handle.tokens) for handle in handles] == [count + 3 for count in before]
    assert {rows for _, _, rows in order} == {2} and len({cache for _, cache, _ in order}) == GROUPS
    waits, begins = order[::2], order[1::2]
    assert [(cache, rows) for _, cache, rows in waits] == [(c, rows) for _, c, rows in begins]
    assert {what for what, *_ in waits} == {"is waited for"}


def test_jobs_go_to_the_group_that_has_fewer(make):
    engine = make(40)
    lengths = (4, 34, 64) * 3
    short = [Job(prompt=[5 + n], max_new_tokens=n, settings=GREEDY) for n in lengths]
    handles = [engine.submit(job) for job in short]
    while sum(handle.done for handle in handles) < 6:
        engine.iterate()
    for _ in range(2):
        engine.iterate()
    groups = engine._running.groups
    assert [len(group.parts) for group in groups] == [1, 1, 1]
    while engine.busy:
        engine.iterate()
    one = make(40, groups=1)
    assert one.run(short) == [handle.text for handle in handles]

"""Many jobs at once: each gives the tokens that it gives alone, whatever else runs; no job and no
page is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from dataclasses import replace

import pytest
import torch
from on_cpu import on_cpu
from tiny import llama, reference, save

from exkv import (
    CACHES,
    Cache,
    CacheUseError,
    Draft,
    Engine,
    Generator,
    Job,
    KVCache,
    Model,
    Paged,
    PagedCache,
    SamplingParams,
)
from exkv.cache import Storage, Window

PAGE = 16
GREEDY = SamplingParams.greedy()
WAYS = (GREEDY, SamplingParams(), SamplingParams(temperature=1.3, top_k=0, top_p=1.0))
MAKES = {
    "float": {},
    "8bit": {"storage": Storage(keys="int8", values="int8")},
    "4bit": {"storage": Storage(keys="int4", values="int4", rotate=True)},
    "float keys, 2bit values": {"storage": Storage(values="int2", rotate=True)},
    "8bit, a window": {"storage": Storage(keys="int8", values="int8"), "retention": Window(20)},
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A nearly identical model."""
    weights = reference(llama(num_hidden_layers=2, eos_token_id=None))
    for parameter in weights.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape)
    draft = on_cpu(save(weights, tmp_path_factory.mktemp("draft")))
    return draft


def drafting(model: Model, rows: int = 4) -> Draft:
    return Draft(model, Cache(model, 160, rows), tokens=3, confidence=0)


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


@pytest.fixture
def make(model, tokenizer):
    """Engines whose pages are counted at the end."""
    made = []

    def build(pages: int, options=(), **settings) -> Engine:
        cache = KVCache(model, 160, growth=Paged(PAGE, pages=pages), **dict(options))
        made.append((Engine(model, cache, tokenizer, **settings), cache.pages.pool))
        return made[-1][0]

    yield build
    for engine, pool in made:
        engine.close()
        assert not any(pool.holders) and pool.available == pool.pages


def random_jobs(count: int, seed: int) -> list[Job]:
    """Prompts with and without a common prefix, of different lengths, sampled in several ways."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 300) for _ in range(64)]
    return [
        Job(
            prompt=shared[: rng.choice((0, 0, 15, 16, 40, 64))]
            + [rng.randrange(3, 300) for _ in range(rng.randint(1, 20))],
            max_new_tokens=rng.randint(1, 44),
            seed=rng.randrange(1000),
            settings=rng.choice(WAYS),
            priority=rng.choice((0, 0, 0, 1)),
        )
        for _ in range(count)
    ]


def count_pages(engine: Engine) -> None:
    """Check that every page is either held by running jobs, once by each, or available."""
    running = engine._running
    tables = [cache.pages for cache in running._caches]
    held = [page for table in tables for row in table.rows for page in row]
    pool = tables[0].pool
    assert pool.holders == [held.count(page) for page in range(pool.pages)]
    assert pool.available == pool.pages - len(set(held))
    for group in running.groups:
        assert len([row for row in group.table.rows if row]) == len(group.parts)


def alone(make, options, jobs, **settings) -> list[list[int]]:
    """The tokens of each job, alone in a new engine."""
    found = []
    for job in jobs:
        with make(10, options, **settings) as engine:
            handle = engine.submit(job)
            handle.result()
            found.append(handle.tokens)
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MAKES)
def test_random_jobs_give_the_same_tokens_as_alone(make, draft, name):
    jobs = random_jobs(18, seed=4)
    expected = alone(make, MAKES[name], jobs)
    plain = make(9, MAKES[name], max_running=8)
    speculating = make(9, MAKES[name], max_running=8, ngrams=4, draft=drafting(draft))
    for engine in (plain, speculating):
        rng, handles, coming = random.Random(1), [], list(jobs)
        while coming or engine.busy:
            for _ in range(min(rng.choice((0, 0, 1, 3)), len(coming))):
                handles.append(engine.submit(coming.pop(0)))
            engine.iterate()
            count_pages(engine)
        assert [handle.tokens for handle in handles] == expected
        assert {handle.reason for handle in handles} <= {"length", "eos"}
        stats = engine.stats
        assert stats.put_away > 0 and stats.found_tokens > 100 and stats.most_running > 2
        assert stats.new_tokens == sum(map(len, expected))
    assert plain.stats.proposed_tokens == 0
    assert 20 < stats.accepted_tokens < stats.proposed_tokens
    assert stats.steps < plain.stats.steps


def test_engine_gives_the_tokens_of_a_generator(make, model, tokenizer):
    engine = make(40)
    prompts = ["Where is the key?", "The", "Alice has the lamp. " * 4]
    for settings in WAYS:
        jobs = [Job(prompt=p, settings=settings, seed=5, max_new_tokens=20) for p in prompts]
        generator = Generator(model, Cache(model, 160, 1), tokenizer)
        expected = [
            generator.generate_simple(p, settings, 20, 5, completion_only=True) for p in prompts
        ]
        assert engine.run(jobs) == expected


def test_freed_cache_is_allocated_as_one_pool_again(make, model, tokenizer):
    """The caches of prompts and of decoding jobs would otherwise each allocate a pool."""
    cache = PagedCache(model, 160, page=PAGE)
    job = Job(prompt=list(range(3, 43)), max_new_tokens=20, settings=GREEDY)
    texts = []
    for _ in range(2):
        with Engine(model, cache, tokenizer) as engine:
            texts.append(engine.run([job]))
        cache.free()
    assert texts[0] == texts[1]


def test_a_model_that_is_not_loaded_is_refused(model, tokenizer):
    other = Model(model.config)
    with pytest.raises(ValueError, match="the model is not loaded"):
        Engine(other, PagedCache(other, 160, page=PAGE), tokenizer)


def test_chunks_are_bounded_and_other_jobs_decode_between_them(make, monkeypatch):
    engine = make(30, chunk=7)
    calls = []
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model,
        "forward",
        lambda ids, *a, **kw: (calls.append(tuple(ids.shape)), forward(ids, *a, **kw))[1],
    )
    first = engine.submit(Job(prompt=[5, 6, 7], max_new_tokens=30, settings=GREEDY))
    engine.iterate()
    before = len(first.tokens)
    second = engine.submit(Job(prompt=list(range(3, 73)), max_new_tokens=2, settings=GREEDY))
    while not second.tokens:
        engine.iterate()
        before += 1
        assert len(first.tokens) == before  # a token in every step
    assert max(length for _, length in calls) == 7
    ends = list(itertools.accumulate(length for rows, length in calls if length > 1))
    assert {16, 32, 48, 64} <= {end - 3 for end in ends}  # no chunk crosses the end of a page


def test_prompts_with_a_common_prefix_share_pages(make):
    engine, prompt = make(30), list(range(3, 53))
    one = engine.submit(Job(prompt=prompt, max_new_tokens=3, settings=GREEDY))
    one.result()
    two = engine.submit(Job(prompt=[*prompt[:40], 200], max_new_tokens=20, settings=GREEDY))
    three = engine.submit(Job(prompt=prompt, max_new_tokens=20, settings=GREEDY))
    for _ in range(3):
        engine.iterate()
    rows = engine._running.groups[0].table.rows
    assert rows[0][:2] == rows[1][:2] and rows[0][2] != rows[1][2]
    assert (one.cached_tokens, two.cached_tokens, three.cached_tokens) == (0, 32, 48)
    three.result()
    assert three.tokens[:3] == one.tokens
    # A prompt that ends at the end of a page runs that page again, for its logits.
    four = engine.submit(Job(prompt=prompt[:32], max_new_tokens=1, settings=GREEDY))
    four.result()
    assert four.cached_tokens == 16


def test_concurrent_equal_prompts_end_with_one_copy(make):
    engine, prompt = make(30, chunk=16), list(range(3, 41))
    low = engine.submit(Job(prompt=prompt, max_new_tokens=30, settings=GREEDY, priority=0))
    engine.iterate()
    high = engine.submit(Job(prompt=prompt, max_new_tokens=30, settings=GREEDY, priority=1))
    while not (low.tokens and high.tokens):
        engine.iterate()
        count_pages(engine)
    rows = engine._running.groups[0].table.rows
    assert rows[0][:2] == rows[1][:2] and engine.stats.put_away == 1
    assert low.result() == high.result()


def test_higher_priority_preempts_and_lower_one_is_readmitted(make):
    engine = make(8)
    low = [
        engine.submit(Job(prompt=[5 + i] * 20, max_new_tokens=40, settings=GREEDY))
        for i in range(2)
    ]
    for _ in range(4):
        engine.iterate()
    high = engine.submit(Job(prompt=[9] * 60, max_new_tokens=8, settings=GREEDY, priority=2))
    high.result()
    assert engine.stats.put_away > 0 and not any(handle.done for handle in low)
    expected = alone(make, {}, [handle.job for handle in low])
    for handle in low:
        handle.result()
    assert [handle.tokens for handle in low] == expected


def test_job_that_never_fits_is_refused_with_both_numbers(make):
    engine = make(4)
    with pytest.raises(ValueError, match="the job needs 65 tokens, and the cache holds 64"):
        engine.submit(Job(prompt=[5] * 50, max_new_tokens=16))
    engine.submit(Job(prompt=[5] * 50, max_new_tokens=15)).result()
    for job, message in (
        (Job(prompt=[]), "a prompt is empty"),
        (Job(prompt=[5, 9999]), "outside the vocabulary of 320"),
        (Job(prompt=[5], max_new_tokens=0), "max_new_tokens is 0"),
        (Job(prompt=[5], seed=-1), "seed is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(job)
    with pytest.raises(TypeError, match="token ids and messages: give one or the other"):
        engine.submit(Job(prompt=[5, {"role": "user", "content": "?"}], max_new_tokens=4))
    with pytest.raises(TypeError, match="give Job"):
        engine.submit("a text")
    assert not engine.busy


def test_cancelling_frees_pages_at_once_wherever_the_job_is(make):
    engine = make(8, max_running=2)
    jobs = [Job(prompt=[7 + i] * 20, max_new_tokens=50, settings=GREEDY) for i in range(4)]
    handles = [engine.submit(job) for job in jobs]
    while not engine.stats.put_away:
        engine.iterate()
    away = next(handle for handle in handles if handle.away is not None)
    decoding = engine._running.decoding[0]
    for handle in (away, decoding, handles[3]):
        handle.cancel()
    events = engine.iterate()
    assert {e.handle: e.reason for e in events if e.reason} == dict.fromkeys(
        (away, decoding, handles[3]), "cancelled"
    )
    assert away.away is None
    count_pages(engine)
    handles[3].cancel()  # once more changes nothing
    while engine.busy:
        engine.iterate()
    assert sum(handle.reason == "length" for handle in handles) == 1


def test_draft_proposals_for_sampled_tokens_are_accepted(make, model):
    """It draws the same numbers, so a draft with the same model is always right."""
    twin = Draft(model, Cache(model, 160, 2), tokens=3, confidence=0)  # differs in its cache only
    engine = make(40, draft=twin)
    for settings in WAYS:
        jobs = [Job(prompt=[5, 6, seed], settings=settings, seed=seed) for seed in (7, 8)]
        engine.run([replace(job, max_new_tokens=21) for job in jobs])
    stats = engine.stats
    assert stats.accepted_tokens == stats.proposed_tokens > 80


def test_job_may_disable_speculation(make, draft):
    engine = make(40, draft=drafting(draft), ngrams=3)
    engine.run([Job(prompt=[5, 6, 7], max_new_tokens=20, settings=GREEDY, speculate=False)])
    assert engine.stats.proposed_tokens == 0


def test_draft_prefills_a_long_prompt_in_chunks(make, draft, monkeypatch):
    engine, calls = make(40, draft=drafting(draft), chunk=7), []
    forward = draft.forward
    monkeypatch.setattr(
        draft,
        "forward",
        lambda ids, *a, **kw: (calls.append(ids.shape[1]), forward(ids, *a, **kw))[1],
    )
    engine.run([Job(prompt=list(range(3, 60)), max_new_tokens=30, settings=GREEDY)])
    assert max(calls) == 7 and engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("pages", [1, 5, 40])
def test_paged_draft_follows_as_many_jobs_as_fit(make, draft, pages):
    jobs = random_jobs(12, seed=21)
    expected = alone(make, {}, jobs)
    rows = KVCache(draft, 160, growth=Paged(PAGE, pages=pages)).sharing_pool(4)
    engine = make(40, max_running=6, draft=Draft(draft, rows, tokens=3, confidence=0))
    handles = [engine.submit(job) for job in jobs]
    while engine.busy:
        engine.iterate()
    assert [handle.tokens for handle in handles] == expected
    assert engine.stats.proposed_tokens > 0


def test_a_draft_has_one_user(make, model, draft, tokenizer):
    held = drafting(draft)
    engine = make(10, draft=held)
    generator = Generator(model, Cache(model, 160), tokenizer, draft=held)
    with pytest.raises(CacheUseError, match="an Engine"):
        generator.generate_simple("The", num_tokens=2)
    engine.close()
    assert generator.generate_simple("The", num_tokens=2)
    with pytest.raises(TypeError, match="draft is .*Draft"):
        make(10, draft=draft)
    with pytest.raises(TypeError, match="ngrams is True"):
        make(10, ngrams=True)


@pytest.mark.parametrize("kind", ["fp16", "sliding_window"])
def test_a_generator_gives_the_same_texts_with_proposals(model, draft, tokenizer, kind):
    prompts = ["Where is the key? " * 3, "The"]
    for settings in (GREEDY, WAYS[2]):
        texts = []
        for how in ({}, {"ngrams": 4}, {"draft": drafting(draft)}):
            cache = CACHES[kind](model, 45, 2)
            generator = Generator(model, cache, tokenizer, **how)
            texts.append(generator.generate_simple(prompts, settings, 200, seed=1, logprobs=2))
            stats = generator.stats
            assert bool(how) == bool(stats.proposed_tokens)
            assert set(stats.stop_reasons) <= {"cache_full", "eos"}
            texts[-1].append(cache.sequences[0])
            if kind == "fp16":
                texts[-1].append(generator.logprobs)
        assert texts[1:] == texts[:1] * 2


def test_a_stop_ends_a_text_and_is_left_out(make):
    engine = make(40)
    whole = engine.run([Job(prompt="The key", settings=GREEDY, max_new_tokens=20)])[0]
    stop = whole[4:7]
    handle = engine.submit(Job(prompt="The key", settings=GREEDY, max_new_tokens=20, stop=stop))
    pieces = [event.text for event in handle]
    assert "".join(pieces) == handle.text == whole[: whole.index(stop)]
    assert handle.reason == "stop"


def test_error_of_one_job_ends_that_job_only(make):
    engine = make(40)

    def fail(event):
        raise RuntimeError("the callback's own")

    bad = engine.submit(Job(prompt=[5, 6], settings=GREEDY, on_event=fail))
    none_left = SamplingParams(temperature=0.0).disallow_tokens(range(320))
    empty = engine.submit(Job(prompt=[5, 6], settings=none_left))
    seen = []
    good = engine.submit(
        Job(prompt=[5, 6, 7], settings=GREEDY, max_new_tokens=9, on_event=seen.append)
    )
    good.result()
    assert [event.token for event in seen] == good.tokens and seen[-1].reason == "length"
    with pytest.raises(RuntimeError, match="the callback's own"):
        bad.result()
    with pytest.raises(ValueError, match="no token"):
        empty.result()
    assert (bad.reason, empty.reason) == ("error", "error")
    count_pages(engine)


def test_undecodable_token_ends_its_job_only(make):
    engine = make(40)
    bad = engine.submit(Job(prompt=[5, 6], settings=GREEDY))
    bad.completion._decoder._id_limit = 0  # as if the model had ids that its tokenizer lacks
    good = engine.submit(Job(prompt=[5, 6], settings=GREEDY, max_new_tokens=3))
    good.result()
    with pytest.raises(ValueError, match="is outside of the vocabulary"):
        bad.result()
    count_pages(engine)


#: Errors of a full GPU from the allocator, a library, and the CUDA runtime.
FULL = [
    torch.OutOfMemoryError("from outside"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("full", FULL, ids=lambda error: type(error).__name__)
def test_oom_caused_by_another_program_loses_no_job(make, monkeypatch, full):
    jobs = random_jobs(12, seed=3)
    expected = alone(make, {}, jobs)
    engine, count = make(30, max_running=4), itertools.count()
    forward = engine.model.forward

    def failing(*args, **kwargs):
        if next(count) % 7 == 6:
            raise full
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", failing)
    handles = [engine.submit(job) for job in jobs]
    while engine.busy:
        engine.iterate()  # a single job has nobody to preempt: it retries
        count_pages(engine)
    assert [handle.tokens for handle in handles] == expected
    assert engine.stats.out_of_memory > engine.stats.put_away > 3


@pytest.mark.parametrize("away_tokens", [0, 64, 200])
def test_preempted_jobs_stay_within_away_tokens(make, monkeypatch, away_tokens):
    jobs = [replace(job, priority=i % 3) for i, job in enumerate(random_jobs(14, seed=4))]
    expected = alone(make, {}, jobs)
    engine, count = make(9, max_running=4, away_tokens=away_tokens), itertools.count()
    forward, most, coming, handles = engine.model.forward, 0, list(jobs), []

    def failing(*args, **kwargs):
        if next(count) % 9 == 8:
            raise torch.OutOfMemoryError("from outside")
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", failing)
    token = engine.cache.layers[0].tensors["k"][0, 0].nbytes * 2 * len(engine.cache.layers)
    while coming or engine.busy:
        handles += [engine.submit(job) for job in coming[:2]]
        del coming[:2]
        engine.iterate()
        most = max(most, engine.away[1] // token)
    assert [handle.tokens for handle in handles] == expected
    assert most <= away_tokens and (most > 0) == (engine.stats.put_away > 0) == (away_tokens > 0)
    assert engine.stats.most_running > 1 or not away_tokens


@pytest.mark.parametrize("full", FULL, ids=lambda error: type(error).__name__)
def test_job_without_room_alone_fails_and_waiting_ones_continue(make, monkeypatch, full):
    jobs = [Job(prompt=[5, 6, 7], settings=GREEDY, max_new_tokens=3, seed=i) for i in range(3)]
    engine, failing = make(40, max_running=1), iter([True, True])
    forward = engine.model.forward

    def full_twice(*args, **kwargs):
        if next(failing, False):
            raise full
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", full_twice)

    async def told(job):
        return [event.reason async for event in engine.stream(job)][-1]

    async def everything():
        return await asyncio.gather(*map(told, jobs), return_exceptions=True)

    first, *others = asyncio.run(everything())
    assert isinstance(first, torch.OutOfMemoryError) and others == ["length", "length"]
    assert engine.stats.out_of_memory == 2
    count_pages(engine)


def test_streams_of_one_loop_run_together(make):
    jobs = random_jobs(6, seed=8)
    expected = alone(make, {}, jobs)
    engine = make(40)

    async def tokens(job):
        return [event.token async for event in engine.stream(job)]

    async def dropped(job):
        async for _ in engine.stream(job):
            return

    async def everything():
        long = Job(prompt=[5] * 20, max_new_tokens=100, settings=GREEDY)
        results = await asyncio.gather(*map(tokens, jobs), dropped(long))
        while engine.busy:
            await asyncio.sleep(0.01)
        return results[:-1]

    assert asyncio.run(everything()) == expected
    assert engine.stats.most_running > 1


def test_a_stream_whose_step_raises_leaves_no_page_held(make, monkeypatch):
    engine = make(10)

    def broken(placed):
        raise RuntimeError("a broken step")

    monkeypatch.setattr(engine._running.groups[0], "decode", broken)

    async def everything():
        with pytest.raises(RuntimeError, match="a broken step"):
            async for _ in engine.stream(Job(prompt=[5] * 20)):
                assert engine.pool.available < engine.pool.pages
        for _ in range(200):
            if not engine.busy:
                break
            await asyncio.sleep(0.01)
        assert engine.pool.available == engine.pool.pages

    asyncio.run(everything())


def test_jobs_are_submitted_from_other_threads(make):
    engine, handles = make(40), []
    threads = [
        threading.Thread(target=lambda job=job: handles.append(engine.submit(job)))
        for job in random_jobs(8, seed=9)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.busy:
        engine.iterate()
    assert len({handle.number for handle in handles}) == 8
    assert all(handle.done for handle in handles)


@pytest.mark.parametrize("away_tokens", [None, 96])
def test_step_does_not_scan_waiting_jobs(make, away_tokens):
    engine = make(40, max_running=2, away_tokens=away_tokens)
    for job in random_jobs(60, seed=2):
        engine.submit(Job(prompt=job.prompt, max_new_tokens=30, seed=1))
    engine.iterate()
    looked = []

    class Watched(list):
        def __iter__(self):
            looked.append(len(self))
            return super().__iter__()

    waiting = engine._scheduler.waiting = Watched(engine._scheduler.waiting)
    for _ in range(20):
        engine.iterate()
    assert not looked and len(waiting) > 50


def test_every_use_of_a_closed_engine_is_an_error(make):
    engine = make(4)
    job = Job(prompt=[5, 6], max_new_tokens=2)
    with engine:
        engine.run([job])
    engine.close()  # may be called again
    uses = {
        "submit": lambda: engine.submit(job),
        "run": lambda: engine.run([job]),
        "iterate": engine.iterate,
        "stream": lambda: asyncio.run(anext(engine.stream(job))),
    }
    for use in uses.values():
        with pytest.raises(CacheUseError, match="an Engine is closed"):
            use()


def test_engine_holds_its_cache_until_closed(make, model, tokenizer):
    with pytest.raises(ValueError, match="is not in pages"):
        Engine(model, Cache(model, 64), tokenizer)
    with pytest.raises(TypeError, match="tokenizer is a str"):
        Engine(model, PagedCache(model, 64), "tokenizer")
    with pytest.raises(ValueError, match="max_running is 0"):
        Engine(model, PagedCache(model, 64), tokenizer, max_running=0)
    cache = PagedCache(model, 64, page=PAGE)
    gc.collect()  # the refused engines' caches, which errors hold
    count = len(model.caches)
    with Engine(model, cache, tokenizer) as engine:
        handle = engine.submit(Job(prompt=[5, 6], max_new_tokens=30))
        engine.iterate()
        with pytest.raises(CacheUseError, match="which an Engine is using"):
            model.forward(torch.tensor([[5]]), cache)
        with pytest.raises(CacheUseError):
            Engine(model, cache, tokenizer)
    assert handle.reason == "cancelled" and len(model.caches) == count
    model.forward(torch.tensor([[5]]), cache)


def test_ended_jobs_are_freed_without_the_garbage_collector(model, tokenizer):
    """A cache takes gigabytes: nothing that has ended may hold it in a reference cycle."""
    gc.collect()
    gc.disable()
    try:
        count = len(model.caches)
        with Engine(model, PagedCache(model, 64, page=PAGE), tokenizer, max_running=1) as engine:
            handles = [engine.submit(Job(prompt=[5], max_new_tokens=2)) for _ in range(3)]
            handles[0].result()
        generator = Generator(model, Cache(model, 64), tokenizer)
        generator.generate_simple([5, 6], num_tokens=2)
        next(generator.stream([5, 6], GREEDY, 9))
        with pytest.raises(ValueError, match="no token"):
            generator.generate_simple([5, 6], GREEDY.disallow_tokens(range(320)))
        del engine, handles, generator
        assert len(model.caches) == count
    finally:
        gc.enable()

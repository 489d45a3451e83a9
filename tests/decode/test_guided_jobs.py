"""Guided jobs give ``generate``'s tokens, whatever runs beside them, and leak no page."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from exkv import Cache, Generator, Grammar, Job, SamplingParams

GREEDY = SamplingParams.greedy()
HOT = SamplingParams(temperature=1.2, top_k=0, top_p=1.0)
PROMPT = list(range(20, 60))
NEGATIVE = [*PROMPT[:32], 9, 8, 7]  # two of its pages are the prompt's
WAYS = (
    {"guidance_scale": 1.7},
    {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    {"guidance_scale": 0.4, "negative_prompt": [4, 5, 5]},
)


@pytest.fixture(scope="module")
def expected(tiny_model):
    """The tokens of ``generate`` for each way to decode."""
    found = []
    for way in WAYS:
        options = dict(way)
        negative = options.pop("negative_prompt", None)
        if negative is not None:
            options["negative_prompt_ids"] = torch.tensor([negative])
        ids = tiny_model.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, **options
        )
        found.append(ids[0, len(PROMPT) :].tolist())
    assert len(set(map(tuple, found))) == len(WAYS)
    return found


def test_jobs_give_generates_tokens(counted, expected):
    engine = counted(30, max_running=4)  # one, and a guided one
    jobs = [Job(prompt=PROMPT, settings=GREEDY, max_new_tokens=12, **way) for way in ({}, *WAYS)]
    handles = [engine.submit(job) for job in jobs]
    (unguided, *_) = [handle.result() for handle in handles]
    assert [handle.tokens for handle in handles[1:]] == expected
    assert engine.run(jobs[:1]) == [unguided]
    # Three prompts and a negative one found the two earlier pages.
    assert engine.stats.found_tokens == 32 * 5 and engine.stats.prompt_tokens == 5 * 40 + 1 + 35 + 3


def test_guided_generator_matches_generate_and_reuses_both_prompts(
    tiny_model, tiny_tokenizer, expected
):
    cache = Cache(tiny_model, 128, 4)
    generator = Generator(tiny_model, cache, tiny_tokenizer, ngrams=4)
    for way, tokens in zip(WAYS, expected, strict=True):
        generator.generate_simple([PROMPT, PROMPT[5:]], GREEDY, 12, **way)
        assert cache.sequences[0][len(PROMPT) :] == tokens[:11]
        negative = way.get("negative_prompt", PROMPT[-1:])
        assert [len(ids) for ids in cache.sequences] == [51, 46, *[len(negative) + 11] * 2]
        assert generator.stats.proposed_tokens == 0
    # A row that has ended stays unchanged beside one that continues.
    first, second = (list(ids) for ids in cache.sequences[:2])
    stop = next(token for token in second[35:] if token not in first[40:])
    generator.generate_simple([PROMPT, PROMPT[5:]], GREEDY, 12, stop=[stop], **WAYS[-1])
    assert cache.sequences[:2] == [first, second[: second.index(stop, 35)]]
    assert len(cache.sequences[3]) == len(cache.sequences[1]) - 35 + 3
    "".join(generator.stream(PROMPT, GREEDY, 12, **WAYS[0]))
    assert generator.stats.cached_tokens == 39 and cache.sequences[0][40:] == expected[0][:11]
    with pytest.raises(ValueError, match="3 prompts with guidance_scale, which take 6 rows"):
        generator.generate_simple([PROMPT] * 3, GREEDY, 12, **WAYS[0])
    with pytest.raises(ValueError, match="negative_prompt is given, and guidance_scale is 1"):
        generator.generate_simple(PROMPT, GREEDY, 12, negative_prompt="a")
    with pytest.raises(ValueError, match="negative_prompt is empty"):
        generator.generate_simple(PROMPT, GREEDY, 12, guidance_scale=2.0, negative_prompt=[])
    with pytest.raises(ValueError, match="guidance_scale is 2000"):
        generator.generate_simple(PROMPT, GREEDY, 12, guidance_scale=2000)


def kinds() -> list[Job]:
    """Guided and unguided jobs of several kinds."""
    rng = random.Random(3)

    def ids(most: int) -> list[int]:
        return NEGATIVE[: rng.choice((0, 16, 32))] + [
            rng.randrange(3, 300) for _ in range(rng.randint(1, most))
        ]

    more = [
        {},
        {"banned_strings": ["the", "an", "e "], "logprobs": 1},
        {"grammar": Grammar.regex("[a-z]{3,9} (the|key|lamp){2,6}")},
        {"token_healing": True, "priority": 1},
        {"settings": SamplingParams(token_repetition_penalty=1.5), "priority": 2},
    ]
    return [
        Job(
            prompt=ids(40),
            **{"settings": HOT, "max_new_tokens": 30, "seed": seed, **more[seed % 5], **guided},
        )
        for seed, guided in enumerate(
            {} if seed % 3 == 2 else {"guidance_scale": 1.6, "negative_prompt": ids(40)}
            for seed in range(10)
        )
    ]


def test_guided_jobs_give_the_same_as_alone_when_preempted(counted):
    jobs, alone = kinds(), []
    for job in jobs:
        engine = counted(14, chunk=8)
        handle = engine.submit(job)
        alone.append((handle.result(), handle.tokens, handle.reason, handle.logprobs))
        engine.close()
    for ngrams in (None, 3):
        engine = counted(14, max_running=6, chunk=8, ngrams=ngrams)
        rng, coming, handles, left_filling = random.Random(1), list(jobs), [], 0
        while coming or engine.busy:
            if coming and rng.random() < 0.2:
                handles.append(engine.submit(coming.pop(0)))
            engine.iterate()
            left_filling += any(h.logits is not None for h in engine._scheduler.waiting)
        found = [(h.text, h.tokens, h.reason, h.logprobs) for h in handles]
        assert found == alone and not any(engine.pool.holders)
        assert engine.stats.put_away > 2 and left_filling
        parts = [part for handle in handles for part in handle.parts]
        assert not any(part.away or part.last_page or part.logits is not None for part in parts)
        assert (engine.stats.accepted_tokens > 0) == (ngrams is not None)


def test_rollback_of_a_guided_job_covers_both_rows(counted, expected):
    engine = counted(12)
    job = Job(prompt=PROMPT, settings=GREEDY, max_new_tokens=12, **WAYS[1])
    texts = [event.text for event in engine.submit(job)]
    handle = engine.submit(replace(job, banned_strings=["".join(texts[7:10])]))
    assert handle.result() != "".join(texts)
    begun = handle.tokens[:8]
    assert begun[:7] == expected[1][:7] and begun[7] != expected[1][7]
    # The tokens after these are those of a run without a rollback.
    more = replace(job, prompt=PROMPT + begun, negative_prompt=NEGATIVE + begun, max_new_tokens=4)
    again = engine.submit(more)
    again.result()
    assert again.tokens == handle.tokens[8:]


def test_cancelled_guided_job_frees_both_rows(counted):
    engine = counted(12)
    job = Job(prompt=PROMPT, max_new_tokens=40, **WAYS[1])
    for steps in (1, 4, 9):  # its prompt, the negative one, its answer
        handle = engine.submit(job)
        for _ in range(steps):
            engine.iterate()
        handle.cancel()
        engine.iterate()
        assert handle.reason == "cancelled" and not any(engine.pool.holders)


def test_what_never_fits_is_refused(counted):
    with pytest.raises(ValueError, match="takes two rows, and max_running is 1"):
        counted(12, max_running=1).submit(Job(prompt=PROMPT, max_new_tokens=12, **WAYS[0]))
    engine = counted(6)  # of 16 tokens
    job = Job(prompt=PROMPT, settings=GREEDY, max_new_tokens=9, **WAYS[1])
    with pytest.raises(ValueError, match="needs 8 pages for its prompt, its negative.* has 6"):
        engine.submit(Job(prompt=PROMPT, max_new_tokens=20, **WAYS[1]))
    with pytest.raises(ValueError, match="the negative prompt has 97 tokens"):
        engine.submit(
            Job(prompt=[5], max_new_tokens=1, guidance_scale=2.0, negative_prompt=[5] * 97)
        )
    assert len(engine.submit(job).result()) > 0  # it needs all six

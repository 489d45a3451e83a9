"""Jobs of different kinds at once: each gives what it gives alone, with its events in order."""

from __future__ import annotations

import random

import pytest

from exkv import Engine, Grammar, Job, PagedCache, SamplingParams

HOT = SamplingParams(temperature=1.2, top_k=0, top_p=1.0)


def jobs() -> list[Job]:
    """A job of each kind, and some that combine several."""
    rng = random.Random(7)
    kinds = [
        {},
        {"banned_strings": ["the", "an", "e "]},
        {"token_healing": True, "logprobs": 2},
        {"grammar": Grammar.regex("[a-z]{3,9} (the|key|lamp){2,6}")},
        {"settings": HOT.with_bias({7: 9.0, 8: -9.0})},
        {"banned_strings": ["a", "key"], "logprobs": 1, "token_healing": True},
        {"grammar": Grammar.choice(["the key", "a lamp", "the ball"]), "banned_strings": ["key"]},
        {"stop": ["e"], "banned_strings": ["th", "es"], "settings": SamplingParams.greedy()},
    ]
    return [
        Job(
            prompt=[rng.randrange(3, 300) for _ in range(rng.randint(5, 30))],
            **{"settings": HOT, "max_new_tokens": 24, "seed": seed, **kind},
        )
        for seed, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("ngrams", [None, 2])
def test_each_kind_of_job_gives_the_same_as_alone(tiny_model, tiny_tokenizer, ngrams):
    def engine(pages):
        cache = PagedCache(tiny_model, 16 * pages, page=16)
        return Engine(tiny_model, cache, tiny_tokenizer, ngrams=ngrams)

    alone = []
    for job in jobs():
        with engine(8) as one:
            handle = one.submit(job)
            alone.append((handle.result(), handle.tokens, handle.reason, handle.logprobs))
    with engine(10) as many:
        handles = [many.submit(job) for job in jobs()]
        told = {handle: [] for handle in handles}
        while many.busy:
            for event in many.iterate():
                told[event.handle].append(event)
        pool, stats = many.pool, many.stats
    assert not any(pool.holders) and pool.available == pool.pages and stats.put_away > 0
    for handle, (text, tokens, reason, likely) in zip(handles, alone, strict=True):
        assert (handle.text, handle.tokens, handle.reason) == (text, tokens, reason)
        assert [each.token for each in handle.logprobs] == [each.token for each in likely]
        assert [event.token for event in told[handle]] == tokens
        assert "".join(event.text for event in told[handle]) == text
        assert [event.reason for event in told[handle] if event.reason] == [reason]
        for banned in handle.job.banned_strings:
            assert banned not in text.lower()
    biased = handles[4]
    assert 7 in biased.tokens and 8 not in biased.tokens

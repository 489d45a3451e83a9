"""Banned texts never occur, however tokenized, and jobs continue as a plain loop does."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exkv import (
    Cache,
    Engine,
    Generator,
    Grammar,
    Job,
    PagedCache,
    SamplingParams,
    SlidingWindowCache,
)
from exkv.decode.new_job import begin_completion

GREEDY = SamplingParams.greedy()
HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0)


def oracle(model, tokenizer, prompt, banned, count):
    """Greedy tokens by a plain loop, with one forward over all tokens for each position."""
    ids, forbidden = [], {}
    while len(ids) < count:
        logits = model.forward(torch.tensor([[*prompt, *ids]]), Cache(model, 128))[0, -1]
        logits[list(forbidden.get(len(ids), ()))] = -torch.inf
        ids.append(int(logits.argmax()))
        texts = [tokenizer.decode(ids[:n]).lower() for n in range(len(ids) + 1)]
        hits = [at for each in banned if (at := texts[-1].find(each.lower())) >= 0]
        if hits:
            place = next(n for n in range(len(ids)) if len(texts[n + 1]) > min(hits))
            forbidden = {at: found for at, found in forbidden.items() if at <= place}
            forbidden.setdefault(place, set()).add(ids[place])
            del ids[place:]
    return ids


@pytest.fixture(scope="module")
def ascii_only(tiny_tokenizer):
    """Settings that allow tokens of ASCII letters only, so that each character belongs to one
    token."""
    bad = [i for i in range(320) if not tiny_tokenizer.bytes_of(i).isalpha()]
    return GREEDY.disallow_tokens(bad)


def greedy_text(model, tokenizer, choice, prompt):
    generator = Generator(model, Cache(model, 128), tokenizer)
    return generator.generate_simple(prompt, choice, 16, completion_only=True)


@pytest.mark.parametrize("kind", ["float", "window", "paged"])
def test_generator_and_jobs_match_a_plain_loop(
    tiny_model, tiny_tokenizer, ascii_only, kind, monkeypatch
):
    prompt = list(range(5, 21))
    text = greedy_text(tiny_model, tiny_tokenizer, ascii_only, prompt)
    banned = [text[1:4].upper(), text[6:9], text[-5:-1]]
    bias = ascii_only.token_bias
    forward = tiny_model.forward

    def expected():
        with monkeypatch.context() as patch:
            patch.setattr(
                tiny_model,
                "forward",
                lambda *a, **k: forward(*a, **k).index_fill(
                    -1, torch.tensor(list(bias)), -torch.inf
                ),
            )
            return oracle(tiny_model, tiny_tokenizer, prompt, banned, 16)

    wanted = tiny_tokenizer.decode(expected())
    assert not any(each.lower() in wanted.lower() for each in banned) and wanted != text
    if kind == "paged":
        with Engine(tiny_model, PagedCache(tiny_model, 256, page=16), tiny_tokenizer) as engine:
            jobs = [
                Job(prompt=prompt, settings=ascii_only, max_new_tokens=16, banned_strings=strings)
                for strings in (banned, (), banned)
            ]
            assert engine.run(jobs) == [wanted, text, wanted]
            assert engine.stats.new_tokens == 48
        return
    cache = (
        Cache(tiny_model, 128, 2)
        if kind == "float"
        else SlidingWindowCache(tiny_model, max_seq_len=128, batch_size=2, window_length=100)
    )
    generator = Generator(tiny_model, cache, tiny_tokenizer)
    found = generator.generate_simple(
        [prompt, prompt], ascii_only, 16, completion_only=True, banned_strings=banned
    )
    assert found == [wanted, wanted]


@settings(deadline=None, max_examples=40)
@given(
    banned=st.lists(st.text("abKé ", min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    stop=st.sampled_from([(), ("ba",), ("Kb", "e")]),
)
@example(banned=[" ", "b", "Ka"], seed=10537, stop=())  # what had gone out ended with a "k"
def test_banned_strings_never_occur_and_text_matches_tokens(tiny_tokenizer, banned, seed, stop):
    rng = random.Random(seed)
    likely = [i for i in range(320) if set(tiny_tokenizer.bytes_of(i)) & set(b"abk\xc3\xa9 ")]
    job = Job(prompt=[5], max_new_tokens=24, banned_strings=banned, stop=stop)
    completion = begin_completion(job, tiny_tokenizer, 320, None)
    pieces = []
    while not completion.reason:
        mask = completion.allowed(320)
        left = [i for i in likely if mask is None or mask[i]]
        if not left:
            return  # they forbid everything
        pieces += completion.take(rng.choice(left), cache_full=False)
    text = "".join(piece.text for piece in pieces)
    assert [piece.token for piece in pieces] == completion.new_ids
    assert not any(each.lower() in text.lower() for each in banned)
    whole = tiny_tokenizer.decode(completion.new_ids)
    assert whole.startswith(text) if completion.reason == "stop" else whole == text


def test_seed_repeats_a_run_and_streams_hide_rolled_back_text(tiny_model, tiny_tokenizer):
    generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer)
    banned = ["e", "a", "the"]
    first = "".join(generator.stream([5, 6], HOT, 60, seed=4, banned_strings=banned, logprobs=1))
    assert len(generator.logprobs[0]) == generator.stats.new_tokens == 60
    again = generator.generate_simple(
        [5, 6], HOT, 60, seed=4, completion_only=True, banned_strings=banned
    )
    assert first == again and not set("aeAE") & set(first)


def test_grammar_is_rolled_back_too(tiny_model, tiny_tokenizer):
    generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer)
    grammar = Grammar.choice(["the key", "the lamp", "a ball"])
    for banned in (["key"], ["the"], ["KEY", "lamp"]):
        text = generator.generate_simple(
            [5, 6], HOT, 20, 1, grammar=grammar, completion_only=True, banned_strings=banned
        )
        assert (
            text
            in {"key": ("the lamp", "a ball"), "the": ("a ball",), "KEY": ("a ball",)}[banned[0]]
        )


def test_invalid_banned_strings_are_refused(tiny_model, tiny_tokenizer):
    generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer)
    with pytest.raises(TypeError, match="banned_strings is 'text'"):
        generator.generate_simple([5], banned_strings="text")
    with pytest.raises(ValueError, match="empty text in banned_strings"):
        generator.generate_simple([5], banned_strings=[""])


@pytest.mark.parametrize("many", [False, True])
def test_proposed_tokens_are_rolled_back_too(tiny_model, tiny_tokenizer, many):
    """Texts are the same with n-grams and without, for several jobs and in a Generator."""
    prompt, banned = [5, 6, 7, 8] * 4, ["a", "the", "in the", "is w"]
    jobs = [
        Job(prompt=prompt[row:], settings=way, max_new_tokens=40, seed=row, banned_strings=banned)
        for row, way in enumerate((GREEDY, HOT, GREEDY))
    ]

    def run(ngrams):
        if many:
            cache = PagedCache(tiny_model, 256, page=16)
            with Engine(tiny_model, cache, tiny_tokenizer, ngrams=ngrams) as engine:
                return engine.run(jobs), engine.stats.proposed_tokens
        generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer, ngrams=ngrams)
        text = generator.generate_simple(prompt, GREEDY, 60, banned_strings=banned)
        return text, generator.stats.proposed_tokens

    plain, _ = run(None)
    speculated, proposed = run(3)
    assert speculated == plain and proposed > 10

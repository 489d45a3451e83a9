"""Log-probabilities of chosen tokens and of the likeliest ones, against torch's log_softmax."""

from __future__ import annotations

import pytest
import torch

from exkv import Cache, Engine, Generator, Job, PagedCache, SamplingParams

SAMPLED = SamplingParams(temperature=2.0, top_k=40, top_p=0.9, token_repetition_penalty=1.3)


@pytest.fixture
def model(tiny_model):
    return tiny_model


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


def expected(model, ids, first):
    """log_softmax of one forward over all tokens, at the position before each new one."""
    logits = model.forward(torch.tensor([ids]), Cache(model, 128))
    return torch.log_softmax(logits[0, first - 1 : -1].float(), -1)


def check(model, prompt, tokens, found, most):
    scores = expected(model, [*prompt, *tokens], len(prompt))
    assert [each.token for each in found] == tokens
    for row, each in zip(scores, found, strict=True):
        assert each.logprob == pytest.approx(row[each.token].item(), abs=1e-4)
        values = row.topk(most).values
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)
        for token, value in each.top:
            assert value == pytest.approx(row[token].item(), abs=1e-4)


def test_job_logprobs_are_before_temperature_and_truncation(model, tokenizer):
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    with Engine(model, PagedCache(model, 256, page=16), tokenizer) as engine:
        handles = [
            engine.submit(
                Job(prompt=p, settings=SAMPLED, max_new_tokens=6, seed=i, logprobs=(4, 0, None)[i])
            )
            for i, p in enumerate(prompts)
        ]
        seen = [event.logprobs for event in handles[0]]
        for handle in handles:
            handle.result()
    assert seen == handles[0].logprobs and handles[2].logprobs == []
    check(model, prompts[0], handles[0].tokens, handles[0].logprobs, 4)
    check(model, prompts[1], handles[1].tokens, handles[1].logprobs, 0)


def test_generator_has_logprobs_of_its_last_run(model, tokenizer):
    generator = Generator(model, Cache(model, 64, 2), tokenizer)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    generator.generate_simple(prompts, SAMPLED, 5, seed=3, logprobs=2)
    for row, prompt in enumerate(prompts):
        tokens = [each.token for each in generator.logprobs[row]]
        assert len(tokens) == 5
        check(model, prompt, tokens, generator.logprobs[row], 2)
    generator.generate_simple(prompts, SAMPLED, 2)
    assert generator.logprobs == [[], []]
    with pytest.raises(ValueError, match="logprobs is -1"):
        generator.generate_simple(prompts, logprobs=-1)
    with pytest.raises(TypeError, match="has no argument 'logprob'"):
        generator.generate_simple(prompts, logprob=2)


def test_prompt_logprobs_do_not_depend_on_cached_pages(counted, model):
    prompt = [5 + i % 90 for i in range(70)]
    engine = counted(12, max_running=3, chunk=32)
    for found in (0, 64):  # pages of a scored prompt aren't found; a plain one's are
        engine.submit(Job(prompt=[9] * 20, settings=SAMPLED, max_new_tokens=30))
        job = Job(prompt=prompt, settings=SAMPLED, seed=1, max_new_tokens=4, prompt_logprobs=3)
        handle = engine.submit(job)
        handle.result()
        assert handle.cached_tokens == 0
        check(model, prompt[:1], prompt[1:], handle.prompt_logprobs, 3)
        plain = engine.submit(Job(prompt=prompt, settings=SAMPLED, seed=1, max_new_tokens=4))
        plain.result()
        assert plain.tokens == handle.tokens and plain.prompt_logprobs == []
        assert plain.cached_tokens == found
    lonely = engine.submit(Job(prompt=[7], max_new_tokens=1, prompt_logprobs=0))
    lonely.result()
    assert lonely.prompt_logprobs == []


def test_a_scored_prompt_that_is_preempted_and_run_again_is_scored_whole(counted, model):
    prompt = [5 + i % 90 for i in range(70)]
    engine = counted(12, max_running=3, chunk=32)
    handle = engine.submit(Job(prompt=prompt, max_new_tokens=4, seed=1, prompt_logprobs=1))
    while len(handle.prompt_logprobs) < 20:
        engine.iterate()
    engine._scheduler._preempt(max(engine._running.jobs))
    while len(handle.prompt_logprobs) < 40:
        engine.iterate()
    engine.pool.lost = True
    handle.result()
    check(model, prompt[:1], prompt[1:], handle.prompt_logprobs, 1)

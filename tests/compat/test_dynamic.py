"""ExLlamaV2's dynamic generator: its results, and its texts compared with the base generator's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from exkv import Job, SamplingParams
from exkv.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exkv.compat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
)
from exkv.compat.exllamav2.generator.filters import (
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
)
from exkv.errors import CacheUseError

DEMO = str(Path(__file__).resolve().parents[2] / "examples" / "demo-model")
PROMPTS = ["Anna put the key in the", "Ben is in the garden. Ben", "The colour of the bag is"]
GREEDY = ExLlamaV2Sampler.Settings.greedy()
CHAT = "<|user|> Anna put the key in the kitchen. Where is the key?<|end|><|assistant|>"


@pytest.fixture(scope="module")
def parts():
    config = ExLlamaV2Config(DEMO)
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


@pytest.fixture(scope="module")
def texts(parts):
    """The base generator's texts of up to twelve tokens."""
    model, tokenizer = parts
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    return [base.generate_simple(each, GREEDY, 12, completion_only=True) for each in PROMPTS]


@pytest.fixture
def generator(parts):
    model, tokenizer = parts
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)
    yield made
    made.exkv.close()


def asynchronous(parts):
    model, tokenizer = parts
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    return ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)


def job(parts, prompt=PROMPTS[0], most=12, **options):
    options = {"gen_settings": GREEDY, **options}
    return ExLlamaV2DynamicJob(parts[1].encode(prompt), most, **options)


def run(generator, *jobs):
    """Run jobs to their end -> the results of each."""
    generator.enqueue(list(jobs))
    found = {each: [] for each in jobs}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            found[result["job"]].append(result)
    return [found[each] for each in jobs]


def test_texts_match_the_base_generator(generator, texts):
    call = {"max_new_tokens": 12, "gen_settings": GREEDY}
    assert generator.generate(PROMPTS, **call, completion_only=True) == texts
    shown, last = generator.generate(PROMPTS[0], **call, return_last_results=True)
    assert shown == PROMPTS[0] + texts[0] and last["full_completion"] == texts[0]


@pytest.mark.parametrize("proposing", ["draft_model", "use_ngram_draft"])
def test_speculation_changes_no_text(parts, texts, proposing):
    model, tokenizer = parts
    options = {"use_ngram_draft": True}
    if proposing == "draft_model":
        draft = ExLlamaV2(ExLlamaV2Config(DEMO))
        draft.load()
        cache = ExLlamaV2Cache(draft, max_seq_len=256)
        options = {"draft_model": draft, "draft_cache": cache, "num_draft_tokens": 3}
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    made = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **options)
    call = {"max_new_tokens": 12, "gen_settings": GREEDY, "completion_only": True}
    assert made.generate(PROMPTS, **call) == texts
    if proposing == "draft_model":
        _, last = made.generate(PROMPTS, **call, return_last_results=True)
        assert all(each["accepted_draft_tokens"] > 0 for each in last)
        counted = [each["accepted_draft_tokens"] + each["rejected_draft_tokens"] for each in last]
        assert 2 * sum(counted) == made.exkv.stats.proposed_tokens
        assert last[0]["job"].accepted_draft_tokens == last[0]["accepted_draft_tokens"]


def test_results_have_exllamav2s_format(parts, generator, texts):
    jobs = [
        job(parts, prompt, identifier=name, return_probs=True, return_top_tokens=3)
        for name, prompt in enumerate(PROMPTS)
    ]
    for name, (results, text) in enumerate(zip(run(generator, *jobs), texts, strict=True)):
        assert [each["stage"] for each in results[:2]] == ["started", "streaming"]
        assert {each["identifier"] for each in results} == {name}
        assert {each["serial"] for each in results} == {jobs[name].serial_number}
        assert "".join(each.get("text", "") for each in results) == text
        *going, last = results
        assert last["eos"] and not any(each["eos"] for each in going)
        assert last["full_completion"] == text and last["prompt_tokens"] == len(
            jobs[name].input_ids
        )
        tokens = [each for each in results if "token_ids" in each]
        assert last["new_tokens"] == len(tokens)
        for each in tokens:
            assert 0 < float(each["token_probs"]) <= 1
            assert each["top_k_tokens"].shape == each["top_k_probs"].shape == (1, 1, 3)
            assert torch.equal(each["top_k_tokens"][0, :, 0], each["token_ids"][0])  # greedy


def test_jobs_report_the_condition_that_ended_them(parts, generator, texts):
    word = texts[0].split()[0]
    stopped, short = run(generator, job(parts, stop_conditions=[word[2:]]), job(parts, most=1))
    assert stopped[-1]["eos_reason"] == "stop_string"
    assert stopped[-1]["eos_triggering_string"] == word[2:]
    assert stopped[-1]["full_completion"] == texts[0].split(word[2:])[0]
    assert short[-1]["eos_reason"] == "max_new_tokens"
    tokenizer = parts[1]
    first = int(short[-1]["token_ids"])
    (by_token,) = run(generator, job(parts, stop_conditions=[first]))
    assert by_token[-1]["eos_reason"] == "stop_token"
    assert by_token[-1]["eos_triggering_token_id"] == first
    assert by_token[-1]["new_tokens"] == 0 and by_token[-1]["full_completion"] == ""
    assert by_token[-1]["eos_triggering_token_str"] == tokenizer.exkv.piece_of(first)


def test_filters_are_enforced(parts, generator):
    model, tokenizer = parts
    select = ExLlamaV2SelectFilter(model, tokenizer, ["hall", "garden"])
    any_case = ExLlamaV2SelectFilter(model, tokenizer, ["HALL"], case_insensitive=True)
    prefix = ExLlamaV2PrefixFilter(model, tokenizer, ["In (a", "In (b"])
    call = {"max_new_tokens": 10, "gen_settings": GREEDY, "completion_only": True}
    filters = [[select], [any_case], [prefix]]
    found = generator.generate(["Where is the key?"] * 3, **call, filters=filters)
    for text, expected in zip(found, ["hall|garden", "(?i:hall)", r"In \([ab].*"], strict=True):
        assert re.fullmatch(expected, text), text
    both = [ExLlamaV2SelectFilter(model, tokenizer, ["Inside", "Outside"])]
    both.append(ExLlamaV2PrefixFilter(model, tokenizer, "Out"))
    assert generator.generate("Where?", 10, gen_settings=GREEDY, filters=both)[6:] == "Outside"


def test_banned_strings_and_token_healing(parts, generator, texts):
    word = texts[0].split()[0]
    banned, cut, whole = run(
        generator,
        job(parts, banned_strings=[word]),
        job(parts, "Anna put the key in the kit", token_healing=True, most=3),
        job(parts, "Anna put the key in the kit", most=3),
    )
    assert word not in banned[-1]["full_completion"]
    assert banned[-1]["full_completion"] == "".join(each.get("text", "") for each in banned)
    prompt = parts[1].encode("Anna put the key in the kit")[0].tolist()
    settings = SamplingParams.greedy()
    same = Job(prompt=prompt, settings=settings, max_new_tokens=3, token_healing=True)
    assert [cut[-1]["full_completion"]] == generator.exkv.run([same])
    assert cut[-1]["full_completion"] != whole[-1]["full_completion"]


def test_bias_bans_tokens(parts, generator, texts):
    (results,) = run(generator, job(parts))
    settings = GREEDY.clone()
    settings.disallow_tokens(parts[1], [int(results[1]["token_ids"])])
    (other,) = run(generator, job(parts, gen_settings=settings))
    assert other[-1]["full_completion"] != texts[0]


def test_cancelled_jobs_have_no_more_results(parts, generator, texts):
    jobs = [job(parts), job(parts)]
    generator.enqueue(jobs)
    results = generator.iterate()
    generator.cancel(jobs[0])
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert jobs[1].full_completion == texts[0]
    assert not any(each["eos"] for each in results if each["job"] is jobs[0])
    generator.enqueue([job(parts), job(parts)])
    generator.clear_queue()
    assert generator.num_remaining_jobs() == 0 and not generator.exkv.busy


def test_cache_becomes_pages_of_its_kind(parts):
    model, tokenizer = parts
    cache = ExLlamaV2Cache_Q8(model, batch_size=2, max_seq_len=256)
    before = sum(cache.exkv.nbytes().values())
    ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    assert cache.exkv.layers[0].spec.storage.keys == "int8"
    assert sum(cache.exkv.nbytes().values()) == before
    assert cache.exkv.pages.pool.pages == 2
    small = ExLlamaV2Cache(model, max_seq_len=128)
    with pytest.raises(ValueError, match="room for 128 tokens: .* needs at least 256"):
        ExLlamaV2DynamicGenerator(model, small, tokenizer)
    assert small.exkv.pages is None


def test_jobs_run_in_an_event_loop(parts, texts):
    model, tokenizer = parts

    async def all_texts():
        made = asynchronous(parts)

        async def text(prompt, most):
            ids, found = tokenizer.encode(prompt), ""
            one = ExLlamaV2DynamicJobAsync(made, ids, 12, gen_settings=GREEDY)
            async for result in one:
                found += result.get("text", "")
                if len(found) > most:
                    await one.cancel()
            return found

        mosts = [99, 99, 3]
        found = await asyncio.gather(*map(text, PROMPTS, mosts))
        await made.close()
        return found

    found = asyncio.run(all_texts())
    assert found[:2] == texts[:2] and texts[2].startswith(found[2]) and len(found[2]) > 3


@pytest.mark.parametrize("results", [0, 1, 3])
def test_cancel_from_another_task_ends_the_loop_and_frees_pages(parts, results):
    """Before the first result, between two, and while a step runs."""
    model, tokenizer = parts

    async def cancelled():
        made = asynchronous(parts)
        ids, seen = tokenizer.encode(PROMPTS[0]), []
        one = ExLlamaV2DynamicJobAsync(made, ids, 200, gen_settings=GREEDY)
        step = made.generator.iterate

        def iterate():  # after that, no results until the job is cancelled
            return step() if len(seen) < results or one.cancelled else []

        made.generator.iterate = iterate

        async def read():
            async for result in one:
                seen.append(result)

        reading = asyncio.create_task(read())
        while len(seen) < results:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it now waits for the next result
        await one.cancel()
        await asyncio.wait_for(reading, 60)
        await asyncio.wait_for(made.close(), 60)
        pool = made.generator.exkv.pool
        assert (pool.available, made.generator.exkv.busy) == (pool.pages, False)
        assert not made.jobs and not any(each["eos"] for each in seen)
        made.generator.exkv.close()

    asyncio.run(cancelled())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"embeddings": [1]}, "doesn't take embeddings"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"most": 3000}, "and max_new_tokens 3000, but max_seq_len is"),
    ],
)
def test_invalid_jobs_are_refused(parts, generator, options, error):
    with pytest.raises(ValueError, match=error):
        generator.enqueue(job(parts, **options))
    assert generator.num_remaining_jobs() == 0
    with pytest.raises(TypeError, match="stop_condition"):
        job(parts, stop_condition=[])
    with pytest.raises(ValueError, match="a job of 2 prompts"):
        ExLlamaV2DynamicJob([torch.tensor([[3]])] * 2, 4)
    with pytest.raises(ValueError, match="a job of 1 prompts with settings.cfg_scale 2"):
        job(parts, gen_settings=ExLlamaV2Sampler.Settings.greedy(cfg_scale=2.0))


@pytest.mark.parametrize("scale", [1.7, 1.0])
def test_guidance_matches_exkvs_generate(parts, generator, scale):
    model, tokenizer = parts
    settings = ExLlamaV2Sampler.Settings.greedy(cfg_scale=scale)
    ids = [tokenizer.encode(each) for each in PROMPTS[:2]]
    guided = ExLlamaV2DynamicJob(ids, 6, gen_settings=settings, stop_conditions=[])
    run(generator, guided)
    expected = model.exkv.generate(
        ids[0],
        **({} if scale == 1 else {"negative_prompt_ids": ids[1], "guidance_scale": scale}),
        max_new_tokens=6,
        do_sample=False,
    )
    assert guided.handle.tokens == expected[0, ids[0].shape[1] :].tolist()


def test_generate_takes_pairs_of_prompts(parts, generator):
    tokenizer, scales = parts[1], [-1.0, 0.0, 0.5, 1.0, 2.0]
    settings = [ExLlamaV2Sampler.Settings.greedy(cfg_scale=scale) for scale in scales]
    pair = (PROMPTS[0], PROMPTS[1])
    texts = generator.generate([pair] * 5, 6, gen_settings=settings, completion_only=True)
    ids = [tokenizer.encode(each) for each in pair]
    for text, each in zip(texts, settings, strict=True):
        (results,) = run(generator, ExLlamaV2DynamicJob(ids, 6, gen_settings=each))
        assert results[-1]["full_completion"] == text
    assert len(set(texts)) > 1
    assert generator.generate(pair, 6, gen_settings=settings[3]) == PROMPTS[0] + texts[3]


# Ends of jobs ---------------------------------------------------------------------------------


def chat(parts, **options):
    ids = parts[1].encode(CHAT, encode_special_tokens=True)
    return ExLlamaV2DynamicJob(ids, 30, **{"gen_settings": GREEDY, **options})


def test_only_stop_conditions_end_a_job(parts, generator):
    end = parts[1].eos_token_id
    on, ended = run(generator, chat(parts), chat(parts, stop_conditions=[end, None]))
    assert on[-1]["eos_reason"] == "max_new_tokens" and on[-1]["new_tokens"] == 30
    assert ended[-1]["eos_reason"] == "stop_token" and ended[-1]["new_tokens"] < 30
    tokens = [int(each["token_ids"]) for each in on if "token_ids" in each]
    assert tokens[ended[-1]["new_tokens"]] == end


@pytest.mark.parametrize("least", [1, 9, 20])
def test_min_new_tokens_is_enforced(parts, generator, least):
    options = {"stop_conditions": [parts[1].eos_token_id], "min_new_tokens": least}
    short, long = run(
        generator, chat(parts, **{**options, "min_new_tokens": 0}), chat(parts, **options)
    )
    assert long[-1]["new_tokens"] == max(least, short[-1]["new_tokens"]) or least > 8
    assert long[-1]["new_tokens"] >= least
    assert all(
        int(each["token_ids"]) != options["stop_conditions"][0]
        for each in long
        if "token_ids" in each
    )


# Further entries of results -------------------------------------------------------------------


def test_results_have_the_models_logits(parts, generator):
    model, tokenizer = parts
    (results,) = run(generator, job(parts, return_logits=True))
    ids = tokenizer.encode(PROMPTS[0])
    for result in (each for each in results if "token_ids" in each):
        assert result["logits"].shape == (1, 1, tokenizer.config.vocab_size)
        expected = model.forward(ids, last_id_only=True).float()
        torch.testing.assert_close(result["logits"], expected, rtol=0.05, atol=0.05)
        ids = torch.cat((ids, result["token_ids"]), 1)
    assert all(each.logits is None for each in results[-1]["job"].handle.logprobs)


def test_results_report_suppressed_text(parts, generator, texts):
    word = texts[0].split()[0]
    (results,) = run(generator, job(parts, banned_strings=[word.upper()]))
    taken = [each["suppressed_text"] for each in results if "suppressed_text" in each]
    assert taken and all(word in each for each in taken)
    assert word not in results[-1]["full_completion"]


def test_changed_settings_apply_from_the_next_token(parts, generator, texts):
    settings = GREEDY.clone()
    (first,) = run(generator, job(parts))
    tokens = [int(each["token_ids"]) for each in first if "token_ids" in each]
    one = job(parts, gen_settings=settings)
    generator.enqueue(one)
    while one.new_tokens < 3:
        generator.iterate()
    settings.disallow_tokens(parts[1], [tokens[3]])
    while generator.num_remaining_jobs():
        generator.iterate()
    assert one.handle.tokens[:3] == tokens[:3] and tokens[3] not in one.handle.tokens[3:]


# Filters --------------------------------------------------------------------------------------


class Alternating(ExLlamaV2Filter):
    """Allows two tokens alternately, and ends after ``most``."""

    def __init__(self, model, tokenizer, tokens, most):
        super().__init__(model, tokenizer)
        self.tokens, self.most = tokens, most

    def begin(self, prefix_str):
        self.fed = []

    def feed(self, token):
        assert token.shape == (1, 1)
        self.fed.append(int(token))

    def next(self):
        token = self.tokens[len(self.fed) % 2]
        return {token}, {token} if len(self.fed) + 1 == self.most else set()


def test_python_filters_are_called_for_each_token(parts, generator):
    model, tokenizer = parts
    words = [tokenizer.encode("the")[0, -1].item(), tokenizer.encode(" hall")[0, -1].item()]
    mine = Alternating(model, tokenizer, words, 5)
    (results,) = run(generator, job(parts, filters=[mine]))
    assert [int(each["token_ids"]) for each in results if "token_ids" in each] == [
        *words,
        *words,
        words[0],
    ]
    assert results[-1]["eos_reason"] == "end_filter"
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    text = base.generate_simple(PROMPTS[0], GREEDY, 12, completion_only=True, filters=[mine])
    assert text == results[-1]["full_completion"]


def test_filters_go_back_with_banned_texts(parts, generator):
    model, tokenizer = parts

    class Anything(Alternating):
        def next(self):
            return None, None

    mine = Anything(model, tokenizer, [], 0)
    plain, other = (job(parts, banned_strings=["kitchen", "hall"], filters=f) for f in ([], [mine]))
    one, two = run(generator, plain), run(generator, other)
    assert one[0][-1]["full_completion"] == two[0][-1]["full_completion"]
    assert mine.fed == other.handle.tokens[: len(mine.fed)]


def test_filter_prefer_eos(parts, generator):
    model, tokenizer = parts
    prefix = ExLlamaV2PrefixFilter(model, tokenizer, ["The"])
    options = {"filters": [prefix], "stop_conditions": [tokenizer.eos_token_id]}
    long, short = (chat(parts, **options, filter_prefer_eos=each) for each in (False, True))
    run(generator, long, short)
    assert short.full_completion == "The" and len(long.full_completion) > 9
    (ignored,) = run(generator, chat(parts, filter_prefer_eos=True))
    assert ignored[-1]["new_tokens"] == 30


# Several generators ---------------------------------------------------------------------------


def test_second_generator_takes_over_an_idle_cache(parts, texts):
    model, tokenizer = parts
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    first = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    first.enqueue(one := job(parts))
    with pytest.raises(CacheUseError, match="which an Engine is using"):
        ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    while first.num_remaining_jobs():
        first.iterate()
    with pytest.raises(TypeError, match="draft_cache is a NoneType") as failed:
        ExLlamaV2DynamicGenerator(model, cache, tokenizer, draft_model=model)
    second = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    assert failed.tb is not None  # which keeps the failed generator alive
    call = {"max_new_tokens": 12, "gen_settings": GREEDY, "completion_only": True}
    assert second.generate(PROMPTS[0], **call) == texts[0] == one.full_completion
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    assert base.generate_simple(PROMPTS[0], GREEDY, 12, completion_only=True) == texts[0]
    with pytest.raises(CacheUseError, match="closed"):
        second.enqueue(job(parts))


# In an event loop -----------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 0.002, 0.005, 0.01, 0.02])
def test_unload_waits_for_the_step_in_another_thread(delay):
    """As TabbyAPI does after a dropped stream: cancel, unload, close."""
    config = ExLlamaV2Config(DEMO)
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    model.load_autosplit(cache)
    tokenizer = ExLlamaV2Tokenizer(config)

    async def dropped():
        made = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)
        ids = tokenizer.encode(PROMPTS[0])
        one = ExLlamaV2DynamicJobAsync(made, ids, 200, gen_settings=GREEDY)
        await asyncio.sleep(delay)
        await one.cancel()
        model.unload()
        await asyncio.wait_for(made.close(), 20)

    asyncio.run(dropped())
    assert not model.loaded


def test_failed_job_does_not_affect_others(parts, texts):
    model, tokenizer = parts

    class Broken(Alternating):
        def next(self):
            return set(), set()

    async def both():
        made = asynchronous(parts)
        ids = tokenizer.encode(PROMPTS[0])
        options = {"gen_settings": GREEDY, "filters": [Broken(model, tokenizer, [], 0)]}
        broken = ExLlamaV2DynamicJobAsync(made, ids, 12, **options)
        whole = ExLlamaV2DynamicJobAsync(made, ids, 12, gen_settings=GREEDY)
        with pytest.raises(ValueError, match="no token is left"):
            async for _ in broken:
                pass
        text = "".join([each.get("text", "") async for each in whole])
        await made.close()
        return text

    assert asyncio.run(both()) == texts[0]

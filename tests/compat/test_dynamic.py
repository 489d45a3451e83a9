"""The dynamic generator of ExLlamaV2's name: its texts beside the base generator's, its results."""

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
from exkv.compat.exllamav2.generator.filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

DEMO = str(Path(__file__).resolve().parents[2] / "examples" / "demo-model")
PROMPTS = ["Anna put the key in the", "Ben is in the garden. Ben", "The colour of the bag is"]
GREEDY = ExLlamaV2Sampler.Settings.greedy()


@pytest.fixture(scope="module")
def parts():
    config = ExLlamaV2Config(DEMO)
    model = ExLlamaV2(config)
    model.load()
    return model, ExLlamaV2Tokenizer(config)


@pytest.fixture(scope="module")
def texts(parts):
    """What the base generator says, to its end or twelve tokens."""
    model, tokenizer = parts
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    return [base.generate_simple(each, GREEDY, 12, completion_only=True) for each in PROMPTS]


@pytest.fixture
def generator(parts):
    model, tokenizer = parts
    made = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)
    yield made
    made.exkv.close()


def job(parts, prompt=PROMPTS[0], most=12, **options):
    options = {"gen_settings": GREEDY, **options}
    return ExLlamaV2DynamicJob(parts[1].encode(prompt), most, **options)


def run(generator, *jobs):
    """All results by job."""
    generator.enqueue(list(jobs))
    found = {each: [] for each in jobs}
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            found[result["job"]].append(result)
    return [found[each] for each in jobs]


def test_texts_are_those_of_the_base_generator(generator, texts):
    call = {"max_new_tokens": 12, "gen_settings": GREEDY}
    assert generator.generate(PROMPTS, **call, completion_only=True) == texts
    shown, last = generator.generate(PROMPTS[0], **call, return_last_results=True)
    assert shown == PROMPTS[0] + texts[0] and last["full_completion"] == texts[0]


@pytest.mark.parametrize("proposing", ["draft_model", "use_ngram_draft"])
def test_what_proposes_tokens_changes_none(parts, texts, proposing):
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
    assert proposing != "draft_model" or made.exkv.stats.accepted_tokens > 0


def test_results_have_exllamav2s_shape(parts, generator, texts):
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


def test_a_job_ends_by_its_conditions_and_says_by_which(parts, generator, texts):
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


def test_filters_are_grammars(parts, generator):
    model, tokenizer = parts
    select = ExLlamaV2SelectFilter(model, tokenizer, ["hall", "garden"])
    any_case = ExLlamaV2SelectFilter(model, tokenizer, ["HALL"], case_insensitive=True)
    prefix = ExLlamaV2PrefixFilter(model, tokenizer, ["In (a", "In (b"])
    call = {"max_new_tokens": 10, "gen_settings": GREEDY, "completion_only": True}
    filters = [[select], [any_case], [prefix]]
    found = generator.generate(["Where is the key?"] * 3, **call, filters=filters)
    for text, expected in zip(found, ["hall|garden", "(?i:hall)", r"In \([ab].*"], strict=True):
        assert re.fullmatch(expected, text), text
    with pytest.raises(ValueError, match="got 2 filters, and takes one"):
        run(generator, job(parts, filters=[select, prefix]))


def test_banned_strings_do_not_appear_and_prompts_are_healed(parts, generator, texts):
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


def test_a_settings_bias_forbids_tokens(parts, generator, texts):
    (results,) = run(generator, job(parts))
    settings = GREEDY.clone()
    settings.disallow_tokens(parts[1], [int(results[1]["token_ids"])])
    (other,) = run(generator, job(parts, gen_settings=settings))
    assert other[-1]["full_completion"] != texts[0]


def test_cancelled_jobs_say_nothing_more(parts, generator, texts):
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


def test_a_cache_becomes_pages_of_its_own_kind(parts):
    model, tokenizer = parts
    cache = ExLlamaV2Cache_Q8(model, batch_size=2, max_seq_len=256)
    before = sum(cache.exkv.nbytes().values())
    ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    assert cache.exkv.layers[0].spec.storage.keys == "int8"
    assert sum(cache.exkv.nbytes().values()) == before
    assert cache.exkv.pages.pool.pages == 2
    small = ExLlamaV2Cache(model, max_seq_len=128)
    with pytest.raises(ValueError, match="room for 128 tokens: the dynamic generator needs 256"):
        ExLlamaV2DynamicGenerator(model, small, tokenizer)
    assert small.exkv.pages is None


def test_jobs_run_in_an_event_loop(parts, texts):
    model, tokenizer = parts

    async def all_texts():
        cache = ExLlamaV2Cache(model, max_seq_len=512)
        made = ExLlamaV2DynamicGeneratorAsync(model, cache, tokenizer)

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_new_tokens": 3}, "takes no min_new_tokens here: exkv's generate"),
        ({"return_logits": True}, "takes no return_logits here: begin_stream_ex"),
        ({"embeddings": [1]}, "takes no embeddings here"),
        ({"filter_prefer_eos": True}, "takes no filter_prefer_eos here"),
        ({"most": 3000}, "and max_new_tokens 3000, and max_seq_len is"),
    ],
)
def test_what_jobs_do_not_take_is_refused(parts, generator, options, said):
    with pytest.raises(ValueError, match=said):
        generator.enqueue(job(parts, **options))
    assert generator.num_remaining_jobs() == 0
    with pytest.raises(TypeError, match="stop_condition"):
        job(parts, stop_condition=[])
    with pytest.raises(ValueError, match="a job of 2 prompts"):
        ExLlamaV2DynamicJob([torch.tensor([[3]])] * 2, 4)
    with pytest.raises(ValueError, match="a job of 1 prompts, and settings.cfg_scale 2"):
        job(parts, gen_settings=ExLlamaV2Sampler.Settings.greedy(cfg_scale=2.0))


@pytest.mark.parametrize("scale", [1.7, 1.0])
def test_pairs_of_prompts_are_guided(parts, generator, scale):
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

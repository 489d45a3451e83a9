"""Jobs with different adapters in one engine: each gives the tokens that it gives alone, and reuses
no page or row of a cache that was computed with another adapter."""

from __future__ import annotations

import pytest
import torch
from adapters import linears_of, merged, write_adapter
from on_cpu import on_cpu
from tiny import llama, reference, save, save_tokenizer

from exkv import Cache, Engine, Generator, Job, PagedCache, SamplingParams, Tokenizer
from exkv.cache.rows import MIXED

GREEDY = SamplingParams.greedy()
PROMPT = list(range(20, 60))
NAMES = ("one", "two", None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    whole = reference(llama(num_hidden_layers=2, eos_token_id=None))
    folder = save_tokenizer(save(whole, tmp_path_factory.mktemp("model")))
    layers = linears_of(whole, ("q_proj", "k_proj", "v_proj", "down_proj"))
    model = on_cpu(folder, max_input_len=64)
    texts = {None: whole}
    for seed, name in enumerate(("one", "two")):
        adapter = write_adapter(tmp_path_factory.mktemp(name), layers, seed=seed)
        model.load_adapter(adapter, name)
        texts[name] = merged(whole, adapter)
    for name, each in texts.items():
        ids = each.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
        texts[name] = ids[0, len(PROMPT) :].tolist()
    assert len(set(map(tuple, texts.values()))) == 3
    return model, Tokenizer(folder), texts


def job(adapter: str | None, **options) -> Job:
    return Job(prompt=PROMPT, settings=GREEDY, max_new_tokens=12, adapter=adapter, **options)


def test_jobs_with_different_adapters_match_merged_models(made):
    model, tokenizer, texts = made
    cache = PagedCache(model, max_seq_len=512, page=16)
    with Engine(model, cache, tokenizer) as engine:
        handles = [engine.submit(job(name)) for name in (*NAMES, *NAMES)]
        with pytest.raises(ValueError, match="2 jobs use adapter 'two'"):
            model.unload_adapter("two")
        for handle in handles:
            handle.result()
        assert [handle.tokens for handle in handles] == [texts[n] for n in (*NAMES, *NAMES)]
        # Two whole pages of the prompt, of the job before with the same adapter only.
        assert [handle.cached_tokens for handle in handles] == [0, 0, 0, 32, 32, 32]
        # What guides is the same model: away from the prompt itself leads nowhere.
        guided = engine.submit(job("two", guidance_scale=1.5, negative_prompt=PROMPT))
        guided.result()
        assert guided.tokens == texts["two"]
        with pytest.raises(ValueError, match="there is no adapter 'three'"):
            engine.submit(job("three"))


def test_preempted_jobs_with_adapters_are_readmitted(made):
    model, tokenizer, texts = made
    cache = PagedCache(model, max_seq_len=64, page=16)
    with Engine(model, cache, tokenizer) as engine:
        first = engine.submit(job("one"))
        for _ in range(6):
            engine.iterate()
        second = engine.submit(job("two", priority=1))
        second.result()
        first.result()
        assert engine.stats.put_away == 1
        assert [first.tokens, second.tokens] == [texts["one"], texts["two"]]


def test_generator_reuses_tokens_of_the_same_adapter_only(made):
    model, tokenizer, texts = made
    cache = Cache(model, 128, 1)
    generator = Generator(model, cache, tokenizer)
    kept = []
    for name in ("one", "one", "two", None, None):
        generator.generate_simple(PROMPT, GREEDY, 12, adapter=name)
        kept.append(generator.stats.cached_tokens)
        assert cache.sequences[0][len(PROMPT) :] == texts[name][:11]
    assert kept == [0, 39, 0, 0, 39]
    with pytest.raises(ValueError, match="there is no adapter 'three'"):
        generator.generate_simple(PROMPT, GREEDY, 4, adapter="three")


def test_generate_and_beams_with_an_adapter(made):
    model, _, texts = made
    ids = torch.tensor([PROMPT])
    for name in NAMES:
        found = model.generate(ids, adapter=name, max_new_tokens=12, do_sample=False)
        assert found[0, len(PROMPT) :].tolist() == texts[name]
        again = model.generate(
            ids, adapter=name, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3
        )
        assert torch.equal(found, again)
    # What guides is the same model: away from the prompt itself leads nowhere.
    guided = {"guidance_scale": 1.5, "negative_prompt_ids": ids}
    again = model.generate(ids, adapter="two", max_new_tokens=12, do_sample=False, **guided)
    assert again[0, len(PROMPT) :].tolist() == texts["two"]
    with pytest.raises(ValueError, match="there is no adapter 'three'"):
        model.generate(ids, adapter="three")


def test_rows_know_which_adapter_made_them(made, tmp_path):
    model, _, _ = made
    cache = Cache(model, 64, 3)
    ids = torch.tensor([PROMPT[:8]] * 3)
    model.forward(ids, cache, adapter=["one", None, "one"])
    one = model.adapters["one"].key
    assert cache.made_with == [one, None, one]
    stored = [layer.tensors["k"].clone() for layer in cache.layers]
    cache.reorder([1, 0, 2])  # equal tokens, and other keys
    assert cache.made_with == [None, one, one]
    for layer, before in zip(cache.layers, stored, strict=True):
        assert torch.equal(layer.tensors["k"][:2, :8], before[[1, 0], :8])
    cache.save(tmp_path / "cache")
    cache.reset()
    assert cache.made_with == [None] * 3
    cache.load(tmp_path / "cache")
    assert cache.made_with == [None, one, one] == cache.clone().made_with
    model.forward(ids[:, :1], cache, adapter="two")
    assert cache.made_with == [MIXED] * 3
    cache.crop(0)
    assert cache.made_with == [None] * 3

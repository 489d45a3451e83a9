"""Static caches inside of compiled models.

Graphs are traced with ``fullgraph=True`` and run by torch itself (backend "eager"): a break is an
error, and what differs from a call outside of graphs is the cache's doing.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import given
from tiny import TINY, llama, reference
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import Cache

from exkv.integrations.transformers import HFCache, disable, enable
from exkv.integrations.transformers.versions import SINCE_5

NEW = 9
LENGTH = 40
IDS = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def compiled(function):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend="eager", fullgraph=True)


def model_of(name):
    """One layer, with a window of 9 if it slides, which the second step outgrows."""
    window = {"sliding_window": 9} if name == "MistralForCausalLM" else {}
    return reference(TINY[name](eos_token_id=None, num_hidden_layers=1, **window))


def steps(model, cache, step):
    """The guide's loop: the prompt outside of graphs, then decode steps in a graph."""
    ids = IDS
    with torch.no_grad():
        logits = model(ids, **given(model, cache)).logits
        for _ in range(NEW):
            at = {} if SINCE_5 else {"cache_position": torch.tensor([ids.shape[1]])}
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
            logits = step(ids[:, -1:].clone(), **given(model, cache), **at).logits
    return ids


@pytest.mark.older
@pytest.mark.parametrize(
    "name, attention", [("LlamaForCausalLM", "sdpa"), ("MistralForCausalLM", "exkv")]
)
def test_static_cache_steps_are_whole_graphs(name, attention):
    model = model_of(name)
    expected = model.generate(IDS, **GREEDY)
    model.set_attn_implementation(attention)
    ours, graphs = HFCache(model.config, "static", max_seq_len=LENGTH), []
    for cache in (StaticCache(model.config, LENGTH), ours):
        step = compiled(model.forward)
        assert torch.equal(steps(model, cache, step), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] <= graphs[0]
    assert ours.get_seq_length() == int(ours.layers[0].cumulative_length) == 8 + NEW
    eager = HFCache(model.config, "static", max_seq_len=LENGTH)
    steps(model, eager, model)
    assert torch.equal(ours.layers[0].keys, eager.layers[0].keys)
    with torch.no_grad():  # continue outside of graphs, then in one
        for run in (model, step if SINCE_5 else model):
            found = run(IDS[:, :1], **given(model, ours))
            wanted = model(IDS[:, :1], **given(model, eager))
            torch.testing.assert_close(found.logits, wanted.logits)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("window", [None, 4, 7, 40])
def test_buffers_in_graphs_match_stock_static_caches(window, allocated):
    """With calls of any length, alternately in graphs and outside."""
    config = llama(num_hidden_layers=1, **({"sliding_window": window} if window else {}))
    config.layer_types = ["sliding_attention" if window else "full_attention"]
    ours, theirs = HFCache(config, "static", max_seq_len=24), StaticCache(config, 24)
    if allocated:
        ours.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    update = compiled(lambda keys, values: ours.update(keys, values, 0))
    for step, tokens in enumerate((2, 1, 3, 1, 1, 1, 9, 1, 2)):
        new = torch.randn((2, 2, 2, tokens, 16), generator=torch.Generator().manual_seed(step))
        expected = theirs.update(*new, 0)
        found = ours.update(*new, 0) if step == 4 else update(*new)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if step % 3 == 2:
            assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
            assert ours.get_seq_length() == int(theirs.get_seq_length())
    ours.reset()
    theirs.reset()
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)


@pytest.mark.parametrize("padding", [0, 3])
def test_prompt_in_a_graph_allocates_the_cache(padding):
    """Nothing of a model runs outside of graphs, and rows are as they are without one: they can be
    copied, selected and reset."""
    model = model_of("LlamaForCausalLM")
    mask = torch.ones_like(IDS)
    mask[1, :padding] = 0
    call = {**GREEDY, "attention_mask": mask}
    expected = model.generate(IDS, **call)
    eager = HFCache(model.config, "static", max_seq_len=LENGTH)
    model.generate(IDS, **call, cache=eager)
    model.forward = compiled(model.forward)
    cache = HFCache(model.config, "static", max_seq_len=LENGTH)
    assert torch.equal(model.generate(IDS, **call, cache=cache), expected)
    assert cache.nbytes() == eager.nbytes() and cache.batch_size == 2
    torch.testing.assert_close(cache.layers[0].keys.clone(), eager.layers[0].keys.clone())
    copied = copy.deepcopy(cache)
    copied.batch_select_indices(torch.tensor([1]))
    assert torch.equal(copied.layers[0].keys, cache.layers[0].keys[1:])
    copied.crop(-3)
    assert int(cache.layers[0].cumulative_length) == cache.get_seq_length() == 8 + NEW - 1
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.layers[0].keys.any()
    assert torch.equal(model.generate(IDS, **call, cache=cache), expected)


def test_fullgraph_refuses_other_kinds():
    """More tokens than fit, and rows that were stored without their padding."""
    model = model_of("LlamaForCausalLM")
    cache = HFCache(model.config, "static", max_seq_len=8)
    with torch.no_grad():
        model(IDS, cache=cache)
        with pytest.raises(IndexError):
            compiled(model.forward)(IDS[:, :1], cache=cache)
        assert cache.get_seq_length() == int(cache.layers[0].cumulative_length) == 8
        model.set_attn_implementation("exkv")
        mask = torch.ones((2, 8), dtype=torch.int64)
        mask[1, :3] = 0
        cache = HFCache(model.config, "static", max_seq_len=LENGTH)
        model(IDS, attention_mask=mask, cache=cache)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
            compiled(model.forward)(IDS[:, :1], cache=cache)


def test_generate_compiles_the_model_as_on_gpus():
    model = model_of("LlamaForCausalLM")
    expected = model.generate(IDS, **GREEDY)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    cache = HFCache(model.config, "static", max_seq_len=LENGTH)
    assert torch.equal(model.generate(IDS, cache=cache, compile_config=config, **GREEDY), expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("how", ["at once", "in chunks", "compiled by hand"])
def test_named_cache_is_allocated_before_a_graph(how, monkeypatch):
    """As often as in transformers, for as many rows; also if the user compiled the model."""
    model, taken = model_of("LlamaForCausalLM"), []
    stock = Cache.early_initialization

    def counted(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        taken.append((type(self).__name__, self.layers[0].keys.shape[0]))

    monkeypatch.setattr(Cache, "early_initialization", counted)
    call = {**GREEDY, "cache_implementation": "static", "num_beams": 2}
    call |= {"prefill_chunk_size": 4} if how == "in chunks" else {}
    expected = model.generate(IDS, **call)
    assert taken == ([("StaticCache", 4)] if how == "in chunks" else [])
    taken.clear()
    if how == "compiled by hand":
        model.forward = compiled(model.forward)
    enable(every_name=True)
    try:
        assert torch.equal(model.generate(IDS, **call), expected)
    finally:
        disable()
    assert taken == ([] if how == "at once" else [("HFStaticCache", 4)])

"""``isinstance`` of an ``HFCache``'s layers, and whether they honour what it implies."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_families import WITH_STATES
from tiny import TINY, reference
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from exkv.integrations.transformers import HFCache
from exkv.integrations.transformers.versions import SINCE_5, BaseQuantizedLayer

LENGTH, WINDOW = 30, 24
#: (Model class, kind) -> the most specific stock class of its layers.
STANDS_FOR = {
    ("LlamaForCausalLM", "dynamic"): DynamicLayer,
    ("LlamaForCausalLM", "sink"): DynamicLayer,
    ("LlamaForCausalLM", "8bit"): BaseQuantizedLayer,
    ("LlamaForCausalLM", "static"): StaticLayer,
    ("LlamaForCausalLM", "offloaded_static"): StaticLayer,
    ("MistralForCausalLM", "dynamic"): DynamicLayer,  # keeps every token
    ("MistralForCausalLM", "hybrid"): DynamicSlidingWindowLayer,
    ("MistralForCausalLM", "static"): StaticSlidingWindowLayer,
}
STOCK = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
#: Public attributes of stock layers that differ: whether it evicts, which stock ones never say,
#: and settings of one format.
OTHERWISE = {"is_croppable", "fp8_dtype", "fp8_max"}


@pytest.mark.older
@pytest.mark.parametrize("name, kind", STANDS_FOR)
def test_layers_are_instances_of_their_stock_class_only(name, kind):
    stands_for = STANDS_FOR[name, kind]
    for layer in HFCache(TINY[name](), kind, max_seq_len=LENGTH).layers:
        for stock in (*STOCK, BaseQuantizedLayer):
            assert isinstance(layer, stock) == issubclass(stands_for, stock)


@pytest.mark.older
def test_layer_classes_follow_the_model():
    config = TINY["Gemma2ForCausalLM"]()
    for kind, stock in (("hybrid", DynamicCache), ("static", StaticCache)):
        given = {"max_cache_len": LENGTH} if stock is StaticCache else {}
        theirs = stock(config=config, **given).layers
        ours = HFCache(config, kind, max_seq_len=LENGTH).layers
        assert all(isinstance(a, type(b)) for a, b in zip(ours, theirs, strict=True))
        assert len({type(layer) for layer in ours}) == 2


@pytest.mark.skipif(not SINCE_5, reason="4.57 has no layers with states")
def test_hybrid_layers_are_instances_of_stock_ones():
    for make in WITH_STATES.values():
        config = make()
        for kind, theirs in (
            ("dynamic", DynamicCache(config=config)),
            ("static", StaticCache(config, LENGTH)),
        ):
            ours = HFCache(config, kind, max_seq_len=LENGTH)
            pairs = zip(ours.layers, theirs.layers, strict=True)
            assert all(isinstance(a, type(b)) for a, b in pairs), (config.model_type, kind)


def layers_with_tokens(name, kind):
    """A layer of exkv's and the stock one that it replaces, with three tokens."""
    pair = torch.randn((2, 2, 2, 3, 16), generator=torch.Generator().manual_seed(0))
    if kind == "8bit":
        theirs = cache_utils.Fp8QuantizedLayer()
    else:
        config = TINY[name](sliding_window=WINDOW) if "Mistral" in name else TINY[name]()
        stock = StaticCache(config, LENGTH) if "static" in kind else DynamicCache(config=config)
        theirs = stock.layers[0]
    ours = HFCache(TINY[name](), kind, max_cache_len=LENGTH).layers[0]
    theirs.update(*pair)
    ours.update(*pair)
    return ours, theirs


ALIKE = [pair for pair in STANDS_FOR if pair not in {("MistralForCausalLM", "dynamic")}]


@pytest.mark.parametrize("name, kind", ALIKE)
def test_layers_have_every_public_name_of_stock_ones(name, kind):
    ours, theirs = layers_with_tokens(name, kind)
    for attribute in {*dir(theirs)} - OTHERWISE:
        if attribute.startswith("_"):
            continue
        found, expected = getattr(ours, attribute), getattr(theirs, attribute)
        if callable(expected):
            assert found.__func__.__module__.startswith("exkv."), attribute  # nothing is inherited
        elif not isinstance(expected, torch.Tensor):
            assert found == expected, attribute
        elif kind != "8bit":
            assert torch.equal(found, expected), attribute
    assert ours.get_mask_sizes(2) == theirs.get_mask_sizes(2)


@pytest.mark.parametrize("layer", ["sliding_attention", "chunked_attention"])
def test_models_window_returns_the_same_as_a_stock_one(layer):
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    config = TINY["LlamaForCausalLM"](num_hidden_layers=1, **{sizes[layer]: 4})
    config.layer_types = [layer]
    ours, theirs = HFCache(config, "hybrid"), DynamicCache(config=config)
    assert isinstance(ours.layers[0], DynamicSlidingWindowLayer)
    assert ours.layers[0].sliding_window == theirs.layers[0].sliding_window == 4
    for step, tokens in enumerate((3, 1, 1, 9, 1)):
        pair = torch.randn((2, 2, 2, tokens, 16), generator=torch.Generator().manual_seed(step))
        assert ours.get_mask_sizes(tokens, 0) == theirs.get_mask_sizes(tokens, 0)
        found, expected = (cache.update(*pair, 0) for cache in (ours, theirs))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "exkv"])
def test_chunked_model_matches_with_sliding_layers(attention):
    model = reference(
        transformers.Llama4TextConfig(
            vocab_size=320, hidden_size=64, intermediate_size=96, intermediate_size_mlp=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=8, pad_token_id=0,
            eos_token_id=None, no_rope_layers=[1, 0],
        )
    )  # fmt: skip
    ids = torch.randint(3, 300, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    call = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    expected = model.generate(ids, **call)
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, "hybrid")
    assert "chunked_attention" in model.config.layer_types and any(cache.is_sliding)
    assert torch.equal(model.generate(ids, cache=cache, **call), expected)

"""``HFCache("static")`` compared with transformers' ``StaticCache``: shapes, values, tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_families import ENCODER_DECODERS, given
from tiny import TINY, llama, reference
from transformers import GenerationConfig, StaticCache

from exkv.integrations.transformers import HFCache, disable, enable
from exkv.integrations.transformers.named import OffloadedStaticCache

LENGTH = 24
CONFIG = llama(eos_token_id=None)


def pairs(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, 2, 2, tokens, 16), generator=generator)


def config_of(kind, window):
    """A config with one layer of this kind, with windows or chunks of this length."""
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    config = llama(num_hidden_layers=1, **({sizes[kind]: window} if kind in sizes else {}))
    config.layer_types = [kind]
    return config


@pytest.mark.parametrize("read_first", ["returned", "stored"])
@pytest.mark.parametrize("window", [4, 7, 40])
@pytest.mark.parametrize("layer", ["full_attention", "sliding_attention", "chunked_attention"])
@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_buffers_match_stock_static_caches(kind, layer, window, read_first):
    """Whether the update's result or the stored tensors are read first."""
    config = config_of(layer, window)
    ours, theirs = HFCache(config, kind, max_cache_len=LENGTH), StaticCache(config, LENGTH)
    for step, tokens in enumerate((5, 1, 3, 1, 9, 1)):
        assert ours.get_mask_sizes(tokens, 0) == theirs.get_mask_sizes(tokens, 0)
        found, expected = (cache.update(*pairs(tokens, step), 0) for cache in (ours, theirs))
        assert found[0].shape == expected[0].shape
        if read_first == "stored":
            assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(ours.layers[0].values, theirs.layers[0].values)
        assert ours.get_seq_length() == int(theirs.get_seq_length())


def test_legacy_pairs_end_at_the_last_token():
    cache = HFCache(CONFIG, "static", max_cache_len=LENGTH)
    cache.update(*pairs(9, 0), 0)
    assert cache.to_legacy_cache()[0][0].shape == (2, 2, 9, 16)


def test_full_layer_is_limited_and_window_slides_on():
    for layer, is_full in (("full_attention", True), ("sliding_attention", False)):
        cache = HFCache(config_of(layer, 4), "static", max_cache_len=6)
        cache.update(*pairs(6, 0), 0)
        if is_full:
            with pytest.raises(IndexError, match="made for 6: make it with a larger max_seq_len"):
                cache.update(*pairs(1, 1), 0)
        else:
            assert cache.update(*pairs(1, 1), 0)[0].shape[2] == 4


def test_window_before_a_full_layer_is_limited_too():
    model = reference(TINY["Gemma2ForCausalLM"](eos_token_id=None))
    assert model.config.layer_types[0] == "sliding_attention"
    cache = HFCache(model.config, "static", max_seq_len=LENGTH)
    ids = torch.randint(3, 300, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, **given(model, cache))
        with pytest.raises(ValueError, match=f"holds {LENGTH} tokens and the call adds 1"):
            model(ids[:, :1], **given(model, cache))
    assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH}


@pytest.mark.parametrize(
    "call, length",
    [
        ({"max_new_tokens": 5}, 12),
        ({"max_length": 20}, 19),
        ({"max_new_tokens": 5, "max_cache_len": 70}, 70),
        ({"generation_config": GenerationConfig(max_new_tokens=9)}, 16),
        ({"max_new_tokens": 5, "cache_config": {"max_cache_len": 30}}, 30),
    ],
)
def test_named_cache_has_the_required_length(call, length):
    model = reference(CONFIG)
    ids = torch.arange(3, 11).view(1, -1)
    enable(every_name=True)
    try:
        for prompt in ((ids,), ()):
            named = {} if prompt else {"input_ids": ids}
            out = model.generate(
                *prompt,
                **{**named, **call},
                cache_implementation="static",
                return_dict_in_generate=True,
                do_sample=False,
                pad_token_id=0,
            )
            assert out.past_key_values.get_max_length() == length
            assert out.past_key_values.layers[0].keys.shape[2] == length
    finally:
        disable()


def test_named_cache_works_for_encoder_decoders():
    model = transformers.T5ForConditionalGeneration(
        ENCODER_DECODERS["T5ForConditionalGeneration"]()
    )
    ids = torch.arange(3, 11).view(1, -1)
    call = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    expected = model.eval().generate(ids, **call)
    enable(every_name=True)
    try:
        out = model.generate(ids, cache_implementation="static", **call)
    finally:
        disable()
    assert torch.equal(out.sequences, expected.sequences)
    assert isinstance(out.past_key_values.self_attention_cache, StaticCache)
    assert out.past_key_values.self_attention_cache.get_max_length() == 5


def test_static_cache_is_an_instance_of_the_stock_class():
    assert isinstance(HFCache(CONFIG, "static", max_seq_len=LENGTH), StaticCache)
    assert isinstance(OffloadedStaticCache(CONFIG, max_cache_len=LENGTH), StaticCache)
    assert not isinstance(HFCache(CONFIG, "dynamic"), StaticCache)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "exkv"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_padding_after_the_last_token_is_not_attended_to(name, attention):
    """With ``generate``, and in a loop without a mask, one token per call."""
    model = reference(TINY[name](eos_token_id=None))
    ids = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, "static", max_seq_len=LENGTH)
    call = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **call, **given(model, cache)), expected)
    cache.reset()
    for at in range(15):
        with torch.no_grad():
            logits = model(expected[:, at : at + 1], **given(model, cache)).logits
    assert torch.equal(logits[:, -1].argmax(-1), expected[:, 15])


def test_padded_rows_keep_their_left_padding():
    model = reference(CONFIG)
    model.set_attn_implementation("exkv")
    ids, mask = torch.arange(3, 13).view(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    caches = [HFCache(CONFIG, "static", max_seq_len=LENGTH), HFCache(CONFIG)]
    with torch.no_grad():
        for cache in caches:
            model(ids, attention_mask=mask, **given(model, cache))
    static, dynamic = (cache.layers[0].keys for cache in caches)
    assert torch.equal(static[:, :, :5], dynamic)
    assert not dynamic[0, :, 0].any() and dynamic[0, :, 4].any()
    assert not static[:, :, 5:].any()

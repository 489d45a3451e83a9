"""``HFCache("static")`` beside transformers' ``StaticCache``: same shapes, values and tokens."""

from __future__ import annotations

import pytest
import torch
from hf_families import given
from tiny import TINY, llama, reference
from transformers import StaticCache

from exkv.integrations.transformers import HFCache
from exkv.integrations.transformers.named import OffloadedStaticCache

LENGTH = 24
CONFIG = llama(eos_token_id=None)


def pairs(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, 2, 2, tokens, 16), generator=generator)


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_buffers_are_padded_to_the_capacity_as_stock_ones_are(kind):
    ours, theirs = HFCache(CONFIG, kind, max_cache_len=LENGTH), StaticCache(CONFIG, LENGTH)
    for step, tokens in enumerate((5, 1, 3)):
        found, expected = (cache.update(*pairs(tokens, step), 0) for cache in (ours, theirs))
        assert found[0].shape == (2, 2, LENGTH, 16)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert ours.get_mask_sizes(4, 0) == theirs.get_mask_sizes(4, 0)
        assert ours.get_seq_length() == int(theirs.get_seq_length())
    legacy = ours.to_legacy_cache()
    assert legacy[0][0].shape == (2, 2, 9, 16)


def test_it_is_a_static_cache_to_those_who_check():
    assert isinstance(HFCache(CONFIG, "static", max_seq_len=LENGTH), StaticCache)
    assert isinstance(OffloadedStaticCache(CONFIG, max_cache_len=LENGTH), StaticCache)
    assert not isinstance(HFCache(CONFIG, "dynamic"), StaticCache)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "exkv"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_a_model_sees_nothing_behind_the_last_token(name, attention):
    """By ``generate``, and by a loop without a mask, of one token a call from the first one on."""
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


def test_padded_rows_keep_their_padding_on_the_left():
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

"""``torch.export`` of stock models with any kind of ``HFCache`` among their inputs."""

from __future__ import annotations

import pytest
import torch
from hf_families import WITH_STATES
from tiny import TINY, reference
from transformers import DynamicCache

from exkv.integrations.transformers import HFCache, plan_device_map, register_export_support

IDS = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))


def model_of(name):
    """One layer, with a window of 12 if it slides."""
    window = {"sliding_window": 12} if name == "MistralForCausalLM" else {}
    return reference(TINY[name](eos_token_id=None, num_hidden_layers=1, **window))


def exported(model, cache, **how):
    call = {"input_ids": IDS, "cache": cache, "use_cache": True}
    with torch.no_grad():
        return torch.export.export(model, (), call, strict=False, **how).module()


@pytest.mark.parametrize(
    "name, kind",
    [
        ("LlamaForCausalLM", "dynamic"),
        ("LlamaForCausalLM", "4bit"),
        ("MistralForCausalLM", "hybrid"),
    ],
)
def test_exported_program_takes_and_returns_caches(name, kind):
    """With and without tokens, whose number may differ between calls."""
    register_export_support()
    model = model_of(name)
    stock, call = DynamicCache(config=model.config), {"input_ids": IDS, "use_cache": True}
    with torch.no_grad():
        expected = [model(IDS, cache=stock).logits for _ in range(3)]
    first = exported(model, HFCache(model.config, kind))(**call, cache=HFCache(model.config, kind))
    assert isinstance(first.cache, HFCache)
    torch.testing.assert_close(first.logits, expected[0])
    if kind == "hybrid":
        return  # a window's graph is for one length, also with stock caches
    shapes = torch.export.ShapesCollection()
    for layer in first.cache.layers:
        for tensor in (layer.keys, layer.values):
            shapes[tensor] = {2: torch.export.Dim.AUTO}
    program = exported(model, first.cache, dynamic_shapes=shapes)
    second = program(**call, cache=first.cache)
    third = program(**call, cache=second.cache)
    torch.testing.assert_close([second.logits, third.logits], expected[1:])
    ours = HFCache(model.config, kind)
    with torch.no_grad():
        model(IDS, cache=ours)
    last = program(**call, cache=ours)
    error = (last.logits - expected[1]).abs().max()
    assert error < 1e-5 if kind == "dynamic" else 0 < error < 1
    assert ours.get_seq_length() == IDS.shape[1] and last.cache.get_seq_length() == 2 * IDS.shape[1]
    back = HFCache.from_legacy_cache(list(third.cache), model.config, kind)
    assert back.get_seq_length() == 3 * IDS.shape[1]


def test_unsuitable_caches_are_not_exported():
    register_export_support()
    model = model_of("MistralForCausalLM")
    cache = HFCache(model.config, "hybrid")
    with torch.no_grad():
        model(torch.cat((IDS, IDS), 1), cache=cache)
    with pytest.raises(ValueError, match="layer 0 of this cache has 12 of 16 tokens"):
        exported(model, cache)
    states = HFCache(WITH_STATES["JambaForCausalLM"]())
    with pytest.raises(ValueError, match="whose states aren't keys and values"):
        exported(model, states)


def test_plans_work_after_export_registration():
    register_export_support()
    config = WITH_STATES["JambaForCausalLM"]()
    found = plan_device_map(config, max_seq_len=48, devices="9T", dtype=torch.float32)
    assert set(found.values()) == {"cuda:0"}

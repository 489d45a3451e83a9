"""Low-rank adapters beside the merged model, which is their oracle: every kind of layer, every
format of weights, rows of one call with unlike adapters, bound and unit by unit."""

from __future__ import annotations

import pytest
import tiny
import torch
from adapters import linears_of, merged, write_adapter
from native import needs_kernels
from on_cpu import on_cpu
from runs import Readable, bound_runs

from exkv import Cache, Cache4bit, Model, PagedCache
from exkv.ops import has_kernel

IDS = torch.randint(3, 320, (3, 20), generator=torch.Generator().manual_seed(1))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
#: Architecture -> what is changed: layers of every style, and both ends.
TARGETS = {
    "LlamaForCausalLM": (*ATTENTION, *GATED, "lm_head"),
    "Phi3ForCausalLM": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "GPTNeoXForCausalLM": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "Gemma2ForCausalLM": ("embed_tokens", *ATTENTION, *GATED),
    "Qwen2MoeForCausalLM": (*ATTENTION,),
    "CohereForCausalLM": (*ATTENTION, *GATED),
}


@pytest.fixture(scope="module")
def references():
    made = {}
    for name in TARGETS:
        changes = {"tie_word_embeddings": False} if name == "Gemma2ForCausalLM" else {}
        config = tiny.TINY[name](**changes)
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        made[name] = tiny.reference(config)
    return made


@pytest.fixture(scope="module")
def folders(references, tmp_path_factory):
    return {name: tiny.save(m, tmp_path_factory.mktemp(name)) for name, m in references.items()}


def logits_of(reference, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        return reference(ids).logits


def steps(model: Model, cache, **options) -> torch.Tensor:
    """Logits of IDS: a prompt, then token by token."""
    parts = [model.forward(IDS[:, :17], cache, **options)]
    parts += [model.forward(IDS[:, at : at + 1], cache, **options) for at in range(17, 20)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_merged_model(name, references, folders, tmp_path):
    reference = references[name]
    layers = linears_of(reference, TARGETS[name])
    layers = {path: layer for path, layer in layers.items() if "expert" not in path}
    one = write_adapter(tmp_path / "one", layers, rank=4)
    two = write_adapter(tmp_path / "two", layers, rank=6, seed=1)
    model = on_cpu(folders[name])
    model.load_adapter(one)
    model.load_adapter(two, name="other")
    expected = [logits_of(merged(reference, folder)) for folder in (one, two)]
    plain = logits_of(reference)
    assert (expected[0] - plain).abs().max() > 0.1
    with bound_runs() as runs:
        found = steps(model, Cache(model, 64, 3), adapter="one")
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    assert runs or not has_kernel("bound_run", "cpu")
    mixed = steps(model, Cache(model, 64, 3), adapter=["other", None, "one"])
    rows = torch.stack([expected[1][0], plain[1], expected[0][2]])
    torch.testing.assert_close(mixed, rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(steps(model, Cache(model, 64, 3)), plain, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_bound_runs_have_the_readable_ways_bits_with_adapters(folders, references, tmp_path):
    layers = linears_of(references["LlamaForCausalLM"], TARGETS["LlamaForCausalLM"])
    ways = [{"dtype": torch.bfloat16}, {"weights": "int8"}, {"weights": "int4"}]
    ways.append({"weights": "int4", "transform": "hadamard"})
    one = write_adapter(tmp_path / "one", layers, rank=5)
    two = write_adapter(tmp_path / "two", linears_of(references["LlamaForCausalLM"], ("up_proj",)))
    for way in ways:
        model = on_cpu(folders["LlamaForCausalLM"], **way)
        for folder in (one, two):
            model.load_adapter(folder)
        for adapter, kind in (("one", Cache4bit), (["two", "one", None], PagedCache)):
            with bound_runs() as runs:
                found = steps(model, kind(model, 64, 3), adapter=adapter)
            assert runs == [4] * 3, (way, kind)
            with Readable():
                expected = steps(model, kind(model, 64, 3), adapter=adapter)
            assert torch.equal(found, expected), (way, kind, adapter)

"""How often experts are chosen: counted as transformers' routers choose, kept in a file."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import TINY, llama, mixtral, reference, save, save_tokenizer

from exkv import DynamicCache, Model, Tokenizer
from exkv.checkpoint import Checkpoint
from exkv.cli import main
from exkv.loading import usage
from exkv.loading.usage import add_served, usage_of
from exkv.models.expert_usage import ExpertUsage, UsageCounter

TEXT = "one two three Once upon a time " * 40
FAMILIES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
LAYER = "model.layers.1"


@pytest.fixture(scope="module", params=FAMILIES)
def theirs(request, tmp_path_factory):
    """A model of transformers, and its folder."""
    model = reference(TINY[request.param]())
    return model, save_tokenizer(save(model, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save(reference(mixtral(num_hidden_layers=2)), tmp_path / "model")
    return save_tokenizer(folder)


@pytest.fixture(autouse=True)
def without_prior(monkeypatch):
    """Make shares those of the counts alone."""
    monkeypatch.setattr(usage, "PRIOR", 0)


def test_few_tokens_count_little_and_many_nearly_fully(folder, monkeypatch):
    monkeypatch.setattr(usage, "PRIOR", 256)
    model = Model(folder)
    add_served(model, {LAYER: ExpertUsage(16.0, (16.0, 16.0, 0.0, 0.0))})
    hot, *_, cold = usage_of(model)[LAYER]
    assert (hot, cold) == pytest.approx(((16 + 128) / 272, 128 / 272))
    add_served(model, {LAYER: ExpertUsage(1e5, (1e5, 1e5, 0.0, 0.0))})
    hot, *_, cold = usage_of(model)[LAYER]
    assert hot + cold == pytest.approx(1) and 0 < cold < 0.002


def shares(model, ids: torch.Tensor) -> list[tuple[float, ...]]:
    """Shares by transformers' routers, for each layer with experts."""
    config, found = model.config, []
    top_k = config.num_experts_per_tok
    with torch.no_grad():
        layers = model(ids, output_router_logits=True).router_logits
    for logits in layers:
        chosen = logits.view(ids.numel(), -1).topk(top_k).indices.flatten()
        found.append(tuple((chosen.bincount(minlength=logits.shape[-1]) / ids.numel()).tolist()))
    return found


def test_a_text_chooses_what_transformers_routers_choose(theirs):
    model, folder = theirs
    ids = torch.tensor(Tokenizer(folder).encode(TEXT)[:1024]).view(2, 512)
    expected = shares(model, ids)
    assert len({*expected}) == len(expected), "layers are told apart"
    found = usage_of(Model(folder), TEXT)
    assert list(found) == [unit.name for unit in Model(folder).units if unit.expert_bytes]
    for layer, of_layer in zip(found.values(), expected, strict=True):
        assert layer == pytest.approx(of_layer, abs=1.5 / ids.numel())  # one near tie
    assert Model(folder, calibration=TEXT).usage() == usage_of(Model(folder)) == found


def test_tokens_of_a_loaded_model_are_counted_by_expert(theirs):
    theirs, folder = theirs
    model = Model(folder, dtype=torch.float32)
    model.load(devices=["cpu"])
    ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    with UsageCounter({unit.name: unit.module for unit in model.units}) as counter:
        cache = DynamicCache()
        model.forward(ids[:, :20], cache)
        for index in range(20, 24):
            model.forward(ids[:, index : index + 1], cache)
        found = counter.take()
        assert counter.take() == {}
    model.forward(ids)
    assert [each.tokens for each in found.values()] == [24] * len(found)
    expected = shares(theirs, ids)
    assert [of.shares for of in found.values()] == [pytest.approx(each) for each in expected]


def test_served_counts_decay_and_add_to_those_of_texts(folder):
    model = Model(folder)
    assert usage_of(model) is None
    served = {LAYER: ExpertUsage(100.0, (100.0, 60.0, 40.0, 0.0))}
    add_served(model, served)
    assert usage_of(model) == {LAYER: (1.0, 0.6, 0.4, 0.0)}
    much = {LAYER: ExpertUsage(usage.HALF_LIFE, (0.0, usage.HALF_LIFE, 0.0, usage.HALF_LIFE))}
    add_served(model, much)
    whole = usage.HALF_LIFE + 50
    expected = [50 / whole, (usage.HALF_LIFE + 30) / whole, 20 / whole, usage.HALF_LIFE / whole]
    assert usage_of(model)[LAYER] == pytest.approx(expected, rel=1e-12)
    by_text = usage_of(Model(folder), TEXT)
    assert by_text[LAYER][3] == pytest.approx(1, abs=1e-2), "served counts weigh more"
    assert by_text["model.layers.0"] != (0.5,) * 4


def test_another_text_is_measured_by_itself(folder, monkeypatch):
    first = usage_of(Model(folder), TEXT)
    other = usage_of(Model(folder), "three two one " * 90)
    assert first != other
    both = usage_of(Model(folder))
    assert all(
        min(a, b) <= n <= max(a, b)
        for a, b, n in zip(first[LAYER], other[LAYER], both[LAYER], strict=True)
    )
    monkeypatch.setattr(usage, "usage_of_tokens", None)
    assert usage_of(Model(folder), TEXT) == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: b"{",
        lambda values: json.dumps(values | {"fingerprint": "another"}).encode(),
        lambda values: json.dumps(values).replace('"counts": [', '"counts": [-', 1).encode(),
        lambda values: json.dumps(values).replace('"counts": [', '"counts": [9, ', 1).encode(),
        lambda values: json.dumps(values).replace("layers.1", "layers.7").encode(),
        lambda values: json.dumps(values).replace('"tokens": ', '"tokens": 1e-9', 1).encode(),
    ],
)
def test_invalid_counts_file_is_ignored_and_measured_anew(folder, damage):
    expected, file = usage_of(Model(folder), TEXT), folder / usage.FILE
    values = json.loads(file.read_bytes())
    file.write_bytes(damage(values))
    assert usage_of(Model(folder)) is None
    assert usage_of(Model(folder), TEXT) == expected
    assert json.loads(file.read_bytes()) == values


def test_counts_of_a_read_only_folder_are_in_the_cache_folder(folder, tmp_path):
    (folder / usage.FILE).mkdir()  # in the way of a file, for root too
    found = usage_of(Model(folder), TEXT)
    assert [file.name.partition("-")[0] for file in (tmp_path / "cache/exkv").iterdir()] == [
        "experts"
    ]
    assert usage_of(Model(folder)) == found


def test_quantizing_stores_counts_beside_the_integers(folder, tmp_path):
    text = tmp_path / "text"
    text.write_text(TEXT * 4)
    out = tmp_path / "out"
    options = ["--weights", "int8", "--calibration", str(text)]
    assert main(["quantize", str(folder), str(out), *options]) == 0
    ids = torch.tensor(Tokenizer(folder).encode(TEXT * 4))
    ids = ids[: len(ids) // 512 * 512].view(-1, 512)
    with Checkpoint(folder) as checkpoint:
        floats = usage.usage_of_tokens(Model(folder).config, checkpoint, ids)
    assert usage_of(Model(out)) == {name: each.shares for name, each in floats.items()}


def test_a_model_without_experts_has_no_usage(tmp_path):
    folder = save(reference(llama()), tmp_path)
    assert usage_of(Model(folder), TEXT) is None
    assert Model(folder, calibration=TEXT).usage() is None

"""Caches with a bit width per layer for keys and for values: storage, every cache operation, and
how a plan chooses the widths."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM

from exkv import (
    Cache,
    Generator,
    Job,
    Model,
    ModelConfig,
    PagedCache,
    QuantizedCache,
    Tokenizer,
    place,
    sim,
)
from exkv.cache.stored_bits import EXACT, PAIRS, bits_of, described, storage_of
from exkv.cli import main
from exkv.cli.flags import add_loading_flags
from exkv.cli.loading import prepare
from exkv.devices import CPU
from exkv.loading import cache_losses, losses
from exkv.loading.report import LINES
from exkv.planning import Budget, CacheShape, Scenario, Workload
from exkv.planning.best import settled, weights_loss
from exkv.planning.best_cache import best_bits, best_kind
from exkv.planning.solve import plans_for
from exkv.serve.hosting import Prepared, ServeOptions

TEXT = "one two three " * 40
KEYS, VALUES = [16, 8, 4, 8], [4, 8, 2, 16]
PAIRS_BY_LAYER = [f"{k}/{v}" for k, v in zip(KEYS, VALUES, strict=True)]
IDS = torch.randint(3, 320, (2, 44), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = llama(num_hidden_layers=4, max_position_embeddings=2048)
    return save_tokenizer(save(reference(config), tmp_path_factory.mktemp("bits")))


def logits(model: Model, cache: Cache, ids: torch.Tensor = IDS) -> torch.Tensor:
    cache.reset()
    return torch.cat([model.forward(part, cache).cpu() for part in ids.split([36, 8], 1)], 1)


# What such a cache does -------------------------------------------------------------------------


def test_each_layer_has_its_own_bits(folder):
    model = Model(folder)
    for kind in (QuantizedCache, PagedCache):
        cache = kind(model, 64, key_bits=KEYS, value_bits=VALUES)
        stored = [layer.spec.storage for layer in cache.layers]
        assert stored == [storage_of(pair) for pair in PAIRS_BY_LAYER]
    with pytest.raises(ValueError, match="key_bits has 3 numbers, and the model 4 layers"):
        QuantizedCache(model, 64, key_bits=KEYS[:3])
    with pytest.raises(ValueError, match="no format of 5 bits"):
        QuantizedCache(model, 64, value_bits=[5, 8, 8, 8])


def test_it_is_saved_forked_copied_cropped_and_converted(folder, tmp_path):
    model = on_cpu(ModelConfig.from_pretrained(folder))

    def made():
        return QuantizedCache(model, 64, 2, key_bits=KEYS, value_bits=VALUES)

    cache = made()
    expected = logits(model, cache)[:, 36:]
    cache.crop(36)
    cache.save(tmp_path / "cache")
    read = made()
    read.load(tmp_path / "cache")
    last = IDS[:, 36:]
    for other in (read, cache.clone()):
        assert torch.equal(model.forward(last, other).cpu(), expected)
    forked = model.forward(last.repeat_interleave(2, 0), cache.fork(2)).cpu()
    torch.testing.assert_close(forked[::2], expected, atol=1e-5, rtol=1e-4)
    cache.crop(36)
    cache.convert(storage=storage_of("2/2"))
    assert {layer.spec.storage for layer in cache.layers} == {storage_of("2/2")}
    assert not torch.equal(model.forward(last, cache).cpu(), expected)


def on_two_cards(folder: str) -> dict:
    model = Model(folder, max_input_len=16)
    cache = QuantizedCache(model, 64, 2, key_bits=KEYS, value_bits=VALUES)
    model.load_autosplit(cache, objective="balance")
    seen = {"devices": sorted({str(device) for device in cache.nbytes()})}
    seen["rows"] = [
        [getattr(row.ledger, line), row.measured.get(line, 0)]
        for row in model.report.devices
        for line in LINES
    ]
    seen["logits"] = logits(model, cache).tolist()
    return seen


def test_over_two_cards_it_takes_what_is_planned_and_answers_alike(folder):
    seen = run_sim(on_two_cards, "64M,64M", args=[str(folder)])
    assert seen["devices"] == ["sim:0", "sim:1"]
    assert all(predicted == found for predicted, found in seen["rows"])
    model = on_cpu(ModelConfig.from_pretrained(folder))
    expected = logits(model, QuantizedCache(model, 64, 2, key_bits=KEYS, value_bits=VALUES))
    torch.testing.assert_close(torch.tensor(seen["logits"]), expected, atol=1e-5, rtol=1e-4)


def test_pages_and_a_generator_answer_as_rows_do(folder):
    model = on_cpu(ModelConfig.from_pretrained(folder))
    bits = {"key_bits": KEYS, "value_bits": VALUES}
    found = [
        Generator(model, kind(model, 128, **bits), Tokenizer(folder)).generate_simple(
            "one two three", num_tokens=24, seed=1
        )
        for kind in (QuantizedCache, PagedCache)
    ]
    assert found[0] == found[1]


# What is lost, and what is chosen ---------------------------------------------------------------


def test_a_layers_loss_is_the_divergence_from_transformers_probabilities(folder):
    """The divergence with this layer alone in fewer bits, each token read through the cache."""
    model = Model(folder, calibration=TEXT)
    found = model.cache_losses()
    ids = torch.tensor([Tokenizer(folder).encode(TEXT)[: losses.MOST_TOKENS]])
    exact = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)(ids).logits.detach()
    loaded = on_cpu(ModelConfig.from_pretrained(folder), dtype=torch.float32)

    def divergence(layer: int, pair: str) -> float:
        pairs = [bits_of(pair if index == layer else EXACT) for index in range(4)]
        keys, values = zip(*pairs, strict=True)
        cache = QuantizedCache(loaded, 1024, key_bits=keys, value_bits=values)
        seen = loaded.forward(ids, cache).double().log_softmax(-1), exact.log_softmax(-1)
        return kl_div(*seen, log_target=True, reduction="sum").item() / ids.shape[1]

    for layer, (unit, lost) in enumerate(found.units.items()):
        expected = divergence(layer, "4/4")
        assert expected > 0
        assert lost["k4"] + lost["v4"] == pytest.approx(expected, rel=0.05), unit
        for side, pair in (("k2", "2/16"), ("v2", "16/2")):
            assert 1 / 3 < lost[side] / divergence(layer, pair) < 3, (unit, side)


def test_losses_of_caches_are_measured_once_for_each_text(folder, monkeypatch):
    found = Model(folder, calibration=TEXT).cache_losses()
    assert list(found.units) == [f"model.layers.{i}" for i in range(4)]
    monkeypatch.setattr(cache_losses, "CacheTextLosses", None)
    assert Model(folder, calibration=TEXT).cache_losses() == found
    assert Model(folder, weights="best").cache_losses() != found
    assert Model(folder).cache_losses() is None
    file = folder / losses.FILE
    values = json.loads(file.read_bytes())
    file.write_text(json.dumps(values).replace('"k4"', '"k5"'))
    with pytest.raises(TypeError):  # figures that cannot be are measured anew
        Model(folder, calibration=TEXT).cache_losses()
    file.write_text(json.dumps(values))


def scenario(model: Model, tokens: int = 512) -> Scenario:
    shape = CacheShape.planned(model, Cache, tokens, 4)
    budget = Budget(device=CPU, capacity=1 << 30)
    return Scenario(workloads=(Workload.of(model, [shape]),), budgets=(budget,))


def with_room(roomy: Scenario, share: float) -> Scenario:
    """The scenario on a device with room for this share of the cache's bytes."""
    (plan,) = plans_for(roomy)
    (ledger,) = plan.ledgers
    size = ledger.total - int(ledger.cache * (1 - share))
    return replace(roomy, budgets=(Budget(device=CPU, capacity=size),))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.45, 0.4])
def test_the_choice_by_layer_fits_and_loses_no_more_than_one_pair_for_all(folder, share):
    model = Model(folder, max_input_len=16, calibration=TEXT)
    roomy = scenario(model)
    small = with_room(roomy, share)
    best = best_kind(small)
    (plan,) = plans_for(best.scenario)
    assert plan.fits and best.kind == "fp16"
    lost = model.cache_losses()
    assert best.loss == pytest.approx(sum(map(lost.of, lost.units, best.pairs)))
    if share == 1.0:
        assert best.loss == 0 and str(best) == "fp16"
        return
    assert len({*best.pairs}) > 1 and str(best).startswith("by layer, keys/values of ")
    fitting = []
    for pair in PAIRS:
        stored = dict.fromkeys(range(4), pair)
        alike = replace(small, workloads=(small.workloads[0].stored(stored),))
        if alike.fits():
            fitting.append(lost.alike(pair))
    assert fitting and best.loss < min(fitting)


def test_bits_of_weights_and_of_the_cache_are_chosen_for_one_sum(folder):
    model = Model(folder, max_input_len=16, weights="best", calibration=TEXT)
    roomy = scenario(model)
    (plan,) = plans_for(roomy)
    ledger = plan.ledgers[0]
    size = ledger.total - (ledger.cache + ledger.weights) * 45 // 100
    small = replace(roomy, budgets=(Budget(device=CPU, capacity=size),))
    best = best_bits(small)
    (plan,) = plans_for(best.scenario)
    assert plan.fits
    kept = {unit.kept for unit in plan.units}
    assert len(kept) > 1 and len({*best.pairs}) > 1
    lost = model.cache_losses()
    of_cache = sum(map(lost.of, lost.units, best.pairs))
    assert best.loss == pytest.approx(of_cache + weights_loss(best.scenario))
    for pair in PAIRS:  # none of which, with the best of weights, loses less
        stored = small.workloads[0].stored(dict.fromkeys(range(4), pair))
        found = best_bits_of_weights(replace(small, workloads=(stored,)))
        if found is not None:
            assert best.loss <= lost.alike(pair) + found + 1e-12


def best_bits_of_weights(small: Scenario) -> float | None:
    tried = settled(small)
    return weights_loss(tried) if tried.fits() else None


def test_plan_command_prints_bits_that_rebuild_the_cache(folder, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text(TEXT)
    model = Model(folder, max_input_len=16)
    (ledger,) = place(model, Cache(model, 2048), "1G", margin=0, allocator="exact").ledgers
    room = ledger.total - ledger.cache // 2
    size = [str(folder), "--devices", str(room), "--margin", "0", "--allocator", "exact"]
    size += ["--chunk-size", "16"]
    command = ["plan", *size, "--max-seq-len", "2048", "--cache", "best", "--json"]
    assert main([*command, "--calibration", str(text)]) == 0
    found = json.loads(capsys.readouterr().out)
    bits = found["found"]
    assert bits["cache"] == "by layer" and "keys/values of" in found["answer"]
    cache = QuantizedCache(model, 2048, key_bits=bits["key_bits"], value_bits=bits["value_bits"])
    plan = place(model, cache, str(room), margin=0, allocator="exact")
    assert plan.ledgers[0].cache == found["plans"]["model"]["ledgers"][0]["cache"]
    assert main(command) == 0  # without a text all layers are alike
    assert json.loads(capsys.readouterr().out)["found"]["cache"] == "8bit"


def test_pairs_are_described_by_ranges_of_layers():
    assert described(["8/8", "8/8", "8/4", "", "8/8"]) == "8/8 (layers 0-1, 4), 8/4 (2)"


def served(folder: str) -> dict:
    """A server's pages and a chat's cache on a card that has no room for floats: what they
    store."""
    options = ServeOptions(
        max_seq_len=512, page=16, max_running=2, cache="best", calibration=TEXT, chunk_size=16
    )
    whole = Prepared(Path(folder), replace(options, cache="fp16"))
    (ledger,) = (led for led in whole.answer().plans[0].ledgers if led.units)
    sim.set_capacity(0, ledger.total - ledger.cache * 55 // 100)
    prepared = Prepared(Path(folder), options)
    for _ in prepared.load():
        pass
    seen = {"pages": [str(layer.spec.storage) for layer in prepared.cache.layers]}
    model = prepared.serve()
    rows = [row for row in prepared.model.report.devices if row.device.type != "cpu"]
    seen["planned"] = [[getattr(row.ledger, line) for line in row.measured] for row in rows]
    seen["measured"] = [[*row.measured.values()] for row in rows]
    seen["tokens"] = len(model.engine.run([Job(prompt="one two three", max_new_tokens=8)]))
    model.unload()
    parser = argparse.ArgumentParser()
    add_loading_flags(parser)
    flags = ["--cache", "best", "--max-seq-len", "2048", "--chunk-size", "16"]
    args = parser.parse_args(flags)
    args.model, args.calibration = folder, TEXT
    chat = prepare(args)
    chat.load()
    seen["chat"] = [str(layer.spec.storage) for layer in chat.cache.layers]
    seen["text"] = len(chat.generator().generate_simple("one two three", num_tokens=8))
    return seen


def test_servers_and_chats_have_the_best_cache_that_fits(folder):
    seen = run_sim(served, "64M", args=[str(folder)])
    for stored in (seen["pages"], seen["chat"]):
        assert len(set(stored)) > 1 and any("int8" in each for each in stored)
    assert seen["planned"] == seen["measured"] and seen["measured"][0]
    assert seen["tokens"] > 0 and seen["text"] > 0

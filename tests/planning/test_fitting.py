"""Defaults that a plan chooses so that a model fits: the chunk, slices of the head, and where the
embedding lies. On simulated devices, to the byte; no answer changes."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache, Model, PlacementError, place, sim
from exkv.cli.picture import draw_bars
from exkv.loading.report import LINES
from exkv.planning import Plan

IDS = torch.randint(3, 4000, (2, 1100), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A vocabulary with logits, and with an embedding, larger than all else."""
    config = llama(vocab_size=4000, num_hidden_layers=2, max_position_embeddings=2048)
    return str(save(reference(config), tmp_path_factory.mktemp("model")))


def loaded(model: Model, cache: Cache, expected: torch.Tensor) -> dict:
    """What was chosen, and whether it holds: bytes at the limit, and answers."""
    model.load_autosplit(cache)
    row = model.report.devices[0]
    seen = {
        "calls": [model.max_input_len, model.logits_len],
        "fitted": list(model.plan.fitted),
        "exact": [getattr(row.ledger, n) for n in LINES] == [row.measured.get(n, 0) for n in LINES],
        "surprises": model.report.surprises(),
        "in the report": all(words in str(model.report) for words in model.plan.fitted),
        "embedding": str(model.device_map["model.embed_tokens"]),
    }
    sim.set_capacity(0, row.ledger.total)  # as planned, and no more
    kept = model.forward(IDS, cache)
    seen["same"] = torch.allclose(kept.cpu(), expected, atol=1e-5)
    cache.reset()
    again = model.forward(IDS[:, :1], cache)
    seen["same"] &= torch.allclose(again[:, 0].cpu(), expected[:, 0], atol=1e-5)
    del kept, again
    model.unload()
    seen["after"] = [model.max_input_len, model.logits_len]
    return seen


def ever_smaller(folder: str) -> list[dict]:
    """Results on a card that is a byte smaller each time than what was used before."""
    model = Model(folder)
    cache = Cache(model, IDS.shape[1], 2)
    model.load(devices=["cpu"])
    expected = model.forward(IDS, cache)
    model.unload()
    found: list[dict] = []
    plan = place(model, cache, devices="sim:0")
    while True:
        sim.set_capacity(0, plan.ledgers[0].total)
        found.append(loaded(model, cache, expected))
        sim.set_capacity(0, plan.ledgers[0].total - 1)
        try:
            plan = place(model, cache, devices="sim:0")
        except PlacementError as error:
            return [*found, {"refused": str(error), "by": error.needed - error.available}]


def test_largest_fitting_calls_hold_to_the_byte(folder):
    *found, refused = run_sim(ever_smaller, "1G", args=[folder], timeout=900)
    assert found[0]["calls"] == [2048, 2048] and found[0]["fitted"] == []
    for each in found:
        assert each["exact"] and each["same"] and each["in the report"], each
        assert each["surprises"] == [] and each["after"] == [2048, 2048]
    calls = [each["calls"] for each in found]
    assert calls[1] == [2048, 1024], "slices of the head before smaller chunks"
    on_card = [each["calls"] for each in found if each["embedding"] == "sim:0"]
    assert on_card == sorted(on_card, reverse=True) and on_card[-1] == [128, 128]
    hosted = [each for each in found if each["embedding"] == "cpu"]
    assert calls == [*on_card, *(each["calls"] for each in hosted)]
    assert hosted and "the embedding in host memory" in hosted[0]["fitted"]
    assert "chunks of 128 tokens" in hosted[-1]["fitted"]
    assert ", even with chunks of 128 tokens, the embedding in host memory" in refused["refused"]
    assert refused["by"] == 1


def asked(folder: str, room: int) -> dict:
    """Settings that the caller gave are not changed."""
    seen = {}
    for name, options, load in (
        ("chunk", {"max_input_len": 2048}, {}),
        ("logits", {"max_input_len": 1024}, {"last_id_only": False}),
        ("embedding", {"embed_cpu": False}, {}),
    ):
        model = Model(folder, **options)
        cache = Cache(model, IDS.shape[1], 2)
        sim.set_capacity(0, room)
        try:
            model.load_autosplit(cache, **load)
            seen[name] = [model.max_input_len, model.logits_len, *map(str, model.plan.devices[:1])]
            model.unload()
        except PlacementError as error:
            seen[name] = str(error)
    return seen


def test_explicit_settings_are_kept(folder):
    seen = run_sim(asked, "1G", args=[folder, 24 << 20])
    assert seen["chunk"][0] == 2048 and seen["chunk"][1] < 2048
    assert re.search(r"chunks of \d+ tokens \(max_input_len=\d+\): the same", seen["logits"])
    assert seen["embedding"][2] == "sim:0" and seen["embedding"][1] < 2048


def by_plan(folder: str) -> dict:
    model = Model(folder)
    cache = Cache(model, IDS.shape[1], 2)
    sim.set_capacity(0, 24 << 20)
    plan = Plan.from_json(place(model, cache).to_json())
    other = Model(folder)
    kept = Cache(other, IDS.shape[1], 2)
    other.load(plan=plan)
    seen = {"calls": [other.max_input_len, other.logits_len], "same": other.plan == plan}
    Cache(other, 16)  # plans of later caches know how calls run, too
    seen["later"] = other.plan.logits_len == plan.logits_len
    try:
        other.forward(IDS[:, : other.logits_len + 1], kept, each_token=True)
    except ValueError as error:
        seen["each token"] = str(error)
    picture = io.StringIO()
    draw_bars(Console(file=picture, width=200), [plan], ["model"])
    seen["picture"] = picture.getvalue()
    return {**seen, "planned": [plan.max_input_len, plan.logits_len], "fitted": plan.fitted}


def test_plan_states_how_calls_run(folder):
    seen = run_sim(by_plan, "1G", args=[folder])
    assert seen["calls"] == seen["planned"] and seen["planned"][1] < 2048
    assert seen["same"] and seen["later"]
    assert seen["each token"].startswith(f"each_token takes {seen['planned'][1]} tokens per row")
    line = f"To fit, the model has {', '.join(seen['fitted'])}: the same answers."
    assert line in seen["picture"]

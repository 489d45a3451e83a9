"""``weights="best"`` and ``exkv quantize`` where some experts are chosen far more often than
others: losses are weighted by use, and bits and placement are chosen together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from simproc import run_sim
from tiny import TINY, reference, save, save_tokenizer

from exkv import Cache, Model, ModelConfig, PlacementError, devices, place, sim
from exkv.cli import main
from exkv.loading.report import LINES
from exkv.planning import Plan, expected_time
from exkv.weights.expert_groups import by_heat, groups_of, name_among, parsed
from exkv.weights.on_load import with_weights

TEXT = "the key is in the kitchen, anna put the red ball in the garden, and where is it now " * 24
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(41))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose routers choose three of sixteen experts far more often than the others."""
    config = TINY["Qwen3MoeForCausalLM"](
        num_hidden_layers=3, num_experts=16, decoder_sparse_step=1, mlp_only_layers=[]
    )
    model = reference(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[3:6] *= 8
    return save_tokenizer(save(model, tmp_path_factory.mktemp("hot")))


# Groups -----------------------------------------------------------------------------------------


def test_groups_span_a_factor_of_four_and_split_the_loss():
    shares = (0.9, 0.05, 0.06, 0.2, 0.05, 0.001, 0.24, 0.2)
    assert groups_of(shares) == [(0,), (3, 6, 7), (1, 2, 4), (5,)]
    losses = {"mlp.experts.up": {"int4": 1.7}, "attn.q": {"int4": 3.0}}
    apart = by_heat(losses, shares)
    assert apart.pop("attn.q") == losses["attn.q"]
    assert sum(each["int4"] for each in apart.values()) == pytest.approx(1.7)
    assert apart["mlp.experts.up[0]"]["int4"] == pytest.approx(1.7 * 0.9 / sum(shares))
    find = name_among(apart)
    names = [find("mlp.experts.up", f"model.layers.1.mlp.experts.{i}.up") for i in range(8)]
    hot, warm, cold, never = (names[i] for i in (0, 3, 1, 5))
    assert names == [hot, cold, cold, warm, cold, never, warm, warm] and set(names) == set(apart)
    assert parsed(never) == ("mlp.experts.up", (5,)) and find("attn.q", "attn.q") is None


def test_equally_frequent_experts_stay_together():
    losses = {"mlp.experts.up": {"int4": 1.0}}
    assert by_heat(losses, (0.3, 0.25, 0.2, 0.5)) == losses


# By a plan --------------------------------------------------------------------------------------


def heat_and_bits(model: Model) -> list[list[tuple[float, float]]]:
    """Of each layer with experts, how often each is chosen, and its bytes."""
    usage = model.usage()
    units = [unit for unit in model.units if unit.name in usage]
    return [list(zip(usage[unit.name], unit.expert_bytes, strict=True)) for unit in units]


def on_devices(folder: str) -> dict:
    """A choice by a text for a small card and little host memory: its bytes, and its answers beside
    those of the same choice on the host."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4
    model = Model(folder, max_input_len=16, weights="best", calibration=TEXT)
    cache = Cache(model, 64, 2)
    whole = place(model, cache, "sim:0").ledgers[0]
    sim.set_capacity(0, whole.total - whole.weights * 8 // 10)
    host = whole.weights * 15 // 100
    layers = place(model, cache, "sim:0", cpu=host, host_experts=False)
    plan = place(model, cache, "sim:0", cpu=host)
    model.load(plan=Plan.from_json(plan.to_json()))
    losses = model.losses()
    seen = {
        "apart": sum(len(unit.host_experts) for unit in plan.units),
        "read back": Plan.from_json(plan.to_json()) == plan,
        "held": whole.weights,
        "fit": [ledger.headroom for ledger in plan.ledgers],
        "heat": heat_and_bits(model),
        "loss": [sum(unit.loss for unit in each.units) for each in (layers, plan)],
    }
    names = [unit.name for unit in plan.units]
    kept = dict(zip(names, [unit.kept for unit in plan.units], strict=True))
    seen["loss"].append(sum(losses.of(unit, option) for unit, option in kept.items()))
    (row,) = (row for row in model.report.devices if row.device.type != "cpu")
    seen["rows"] = [[getattr(row.ledger, line), row.measured.get(line, 0)] for line in LINES]
    found = model.forward(IDS, cache).cpu()
    model.unload()
    seen["left"] = devices.allocated_memory(torch.device("sim:0"))
    alone = Model(with_weights(ModelConfig.from_pretrained(folder), kept), max_input_len=16)
    alone.load(devices=["cpu"])
    seen["same"] = torch.equal(found, alone.forward(IDS, Cache(alone, 64, 2)))
    alone.unload()
    model.usage = lambda: None
    model._losses = None
    alike = place(model, cache, "sim:0", cpu=host)
    seen["alike"] = [unit.name for unit in alike.units if "[" in (unit.kept or "")]
    sim.set_capacity(0, whole.total - whole.weights * 92 // 100)
    try:
        place(model, cache, "sim:0", cpu=host // 10)
    except PlacementError as error:
        seen["refused"] = str(error)
    return seen


def test_hot_experts_get_more_bits_and_cold_ones_lie_in_host_memory(folder):
    seen = run_sim(on_devices, "64M", args=[str(folder)], timeout=280)
    assert seen["apart"] and seen["read back"] and min(seen["fit"]) >= 0
    assert all(planned == measured for planned, measured in seen["rows"]), seen["rows"]
    assert seen["same"] and not seen["left"]
    by_layers, planned, by_losses = seen["loss"]
    assert planned == pytest.approx(by_losses) and planned < by_layers / 2
    several = 0
    for layer in seen["heat"]:
        hottest, coldest = max(layer), min(layer)
        assert hottest[1] >= coldest[1]
        several += hottest[1] > coldest[1]
    assert several, "no expert has more bits than another"
    assert not seen["alike"] and "no room" in seen["refused"]


# Written ----------------------------------------------------------------------------------------


def written(folder: str, text: str, out: str) -> dict:
    """A mix for a card and some host memory, loaded there."""
    model = Model(folder, max_input_len=64, weights="int8")
    whole = place(model, Cache(model, 64), "sim:0").ledgers[0]
    sim.set_capacity(0, whole.total - whole.weights * 4 // 10)
    host = f"{whole.weights * 25 // 100 // 1024}K"
    arguments = ["quantize", folder, out, "--calibration", text, "--max-seq-len", "64"]
    assert main([*arguments, "--fit", "sim:0", "--cpu", host]) == 0
    other = Model(out, max_input_len=64)
    cache = Cache(other, 64)
    other.load(plan=place(other, cache, "sim:0", cpu=host))
    (row,) = (row for row in other.report.devices if row.device.type != "cpu")
    return {
        "apart": sum(len(unit.host_experts) for unit in other.plan.units),
        "weights": [row.ledger.weights, row.measured["weights"]],
        "heat": heat_and_bits(other),
        "report": json.loads((Path(out) / "exkv-mix.json").read_text())["matrices"],
    }


def test_a_mix_for_cards_and_host_memory_is_written_with_hot_experts_in_more_bits(folder, tmp_path):
    text = tmp_path / "text"
    text.write_text(TEXT)
    arguments = [str(folder), str(text), str(tmp_path / "out")]
    seen = run_sim(written, "64M", args=arguments, timeout=280)
    assert seen["apart"] and seen["weights"][0] == seen["weights"][1]
    assert all(max(layer)[1] >= min(layer)[1] for layer in seen["heat"])
    assert any(max(layer)[1] > min(layer)[1] for layer in seen["heat"])
    assert any("[" in name for layer in seen["report"].values() for name in layer)

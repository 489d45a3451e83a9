"""Models larger than their cards: plans that put experts in host memory, from bare configs, and
carried out on simulated devices to the byte."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from bench import larger
from bench.larger import CARDS, HOSTS, MODELS, model_of, scenario_of
from simproc import run_sim
from tiny import TINY, reference, save

from exkv import Cache, Model, ModelConfig, PlacementError, devices, place, sim
from exkv.cli import main
from exkv.loading.report import LINES
from exkv.planning import Plan, Scenario, expected_time, workspace
from exkv.planning.answer import expectations, fixed, gains
from exkv.planning.best import planned
from exkv.planning.expected_time import CARD, HOST, LINK, expected
from exkv.weights.on_load import OPTIONS


def rate_of(scenario: Scenario) -> float:
    """Predicted tokens per second; 0 where it doesn't fit."""
    try:
        scenario, (plan,), (costs,) = planned(scenario)
    except PlacementError as error:
        assert error.plan is not None and not error.plan.fits
        return 0.0
    assert plan.fits
    whole = sum(sum(unit.nbytes.values()) for unit in scenario.workloads[0].model.units)
    assert sum(unit.weights + unit.host_weights for unit in plan.units) == whole
    return expected(plan, costs, scenario.budgets, 1).tokens_per_second


@pytest.mark.sweep(3)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", MODELS)
def test_shapes_of_models_that_people_run_are_planned(name, host):
    model = model_of(name)
    found = {cards: rate_of(scenario_of(model, cards, host)) for cards in CARDS}
    assert found["8G"] <= found["12G"] <= found["24G"]
    assert found["24G"] <= found["24G,12G"] <= found["24G,24G"] * 1.001
    layers = rate_of(scenario_of(model, "12G", host, host_experts=False))
    assert layers <= found["12G"] * (1 + 1e-9)
    if host == "192G":
        assert layers < found["12G"] / 1.2


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "Qwen3-235B-A22B", "gpt-oss-120b"])
def test_best_of_a_large_mixture_takes_few_dry_calls(name, monkeypatch):
    """Nearly all of its time is these: layers alike in one format are measured once."""
    values = {k: v for k, v in MODELS[name][0].items() if k != "quantization_config"}
    model = Model(ModelConfig.from_dict(values), weights="best")
    calls, dry_call = [], workspace.dry_call
    monkeypatch.setattr(workspace, "dry_call", lambda *a: calls.append(a) or dry_call(*a))
    (choice,) = (w.model.choice for w in planned(scenario_of(model, "24G,12G", "96G"))[0].workloads)
    assert 0 < len(calls) <= 60 < len(model.units) * len(OPTIONS)
    assert choice is not None and len(set(choice.kept.values())) > 1


def cells(line: str) -> list[str]:
    """Cells of a table's row."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_documented_figures_are_the_planned_ones():
    name, cards = "Qwen3-30B-A3B", "12G"
    model = model_of(name)
    rates = {host: larger.rate_of(scenario_of(model, cards, host)) for host in HOSTS}
    page = (Path(__file__).resolve().parents[2] / "docs" / "larger-than-my-cards.md").read_text()
    assert larger.row(name, cards, rates) in [cells(line) for line in page.splitlines()]
    assert all(f"{each / 1e9:,.0f} GB/s" in page for each in (CARD, HOST, LINK))


def test_refusal_names_missing_bytes_that_suffice():
    model = model_of("Qwen3-30B-A3B")
    answer = fixed(scenario_of(model, "8G", "4G"))
    assert not answer.fits and answer.found["extra_memory_on"] == "cpu"
    more = 4 * 2**30 + answer.found["extra_memory"]
    assert fixed(scenario_of(model, "8G", f"{-(-more // 2**20) + 200}M")).fits
    assert not fixed(scenario_of(model, "8G", f"{more // 2**20 - 200}M")).fits
    assert answer.sentence.endswith("more on cpu would be enough.")


def test_plan_reports_expert_placement_and_speed(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS["Qwen3-30B-A3B"][0]))
    asked = ["plan", str(config), "--weights", "int4", "--max-seq-len", "8192", "--devices", "12G"]
    assert main([*asked, "--cpu", "64G"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    there, apart = re.search(
        r"cuda:0: ([\d,]+) of 6,144 experts, ([\d,]+) in host memory", said
    ).groups()
    assert int(there.replace(",", "")) + int(apart.replace(",", "")) == 6144
    rate = float(re.search(r"Predicted with full caches: ([\d.]+) tokens/s", said)[1])
    assert "cuda:0 assumed 1,000 GB/s, cpu assumed 60 GB/s, link assumed 25 GB/s" in said
    sent = re.search(r"host that ([\d,]+) tokens or more have chosen is sent to its card", said)
    assert 1 < int(sent[1]) < 2048
    faster = re.search(r"with one more card of 12.00 GiB: ([\d.]+) tokens/s to expect", said)
    assert float(faster[1]) > 2 * rate
    assert main([*asked, "--cpu", "64G", "--bandwidth", "500,90", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["expected"][0]["bandwidths"].startswith("cuda:0 500 GB/s, cpu 90 GB/s, link")
    assert any(unit["host_experts"] for unit in answer["plans"]["model"]["units"])
    assert len(answer["gains"]) == 1 and "of 6,144 experts, " in answer["experts"][0]
    assert main([*asked, "--cpu", "64G", "--no-host-experts"]) == 0
    assert "6,144 experts" not in capsys.readouterr().out


@pytest.mark.parametrize("weights", [None, "best"])
def test_gains_equal_their_own_plans(weights):
    config = ModelConfig.from_dict({**MODELS["Qwen3-30B-A3B"][0], "num_hidden_layers": 12})
    model, eight = Model(config, weights=weights), Model(config, weights="int8")
    (card, bits) = gains(answer := fixed(scenario_of(model, "4G", "3G" if weights else "32G")))
    chosen = answer.scenario.workloads[0].model.choice
    assert ("the same bits" in card) == (weights == "best") == bool(chosen)
    if chosen:
        assert len(set(chosen.kept.values())) > 1
        eight = Model(config, weights=bits.partition('"')[2].partition('"')[0])
        assert int(re.search(r"int(\d)", bits)[1]) < 8
        assert card.startswith("one more card of 4.00 GiB, and the same bits: ")
    else:
        more = rate_of(scenario_of(model, "4G,4G", "32G"))
        assert card == f"one more card of 4.00 GiB: {more:,.3g} tokens/s to expect"
    fewer = rate_of(scenario_of(eight, "4G", "3G" if weights else "32G"))
    assert bits == f'weights="{eight.weights}": {fewer:,.3g} tokens/s to expect'
    assert fewer > expectations(answer)[0].tokens_per_second


IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(39))
#: By each config's key for its number of experts.
LOADED = {
    "Qwen3MoeForCausalLM": "num_experts",
    "Glm4MoeForCausalLM": "n_routed_experts",
    "MixtralForCausalLM": "num_local_experts",
}


def carried_out(folder: str, cards: int) -> list[dict]:
    """Plans on ever smaller cards: planned, measured, and answered. Memory is slow, so that these
    few bytes matter as many do."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64, 2)
    model.load(devices=["cpu"])
    answer = model.forward(IDS, cache)
    model.unload()
    plan = place(model, cache, [f"sim:{card}" for card in range(cards)])
    held = sum(ledger.weights for ledger in plan.ledgers)
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    seen = []
    for share in (0.2, 0.5, 0.8):
        for card in range(cards):
            beside = max(ledger.total - ledger.weights for ledger in plan.ledgers)
            sim.set_capacity(card, beside + int(held - share * experts) // cards)
        cache.reset()
        model.load_autosplit(cache, devices=[*(f"sim:{card}" for card in range(cards)), "cpu"])
        rows = [row for row in model.report.devices if row.device.type != "cpu"]
        written = Plan.from_json(model.plan.to_json())
        found = {
            "apart": sum(len(unit.host_experts) for unit in model.plan.units),
            "planned": [[getattr(row.ledger, line) for line in LINES] for row in rows],
            "measured": [[row.measured.get(line, 0) for line in LINES] for row in rows],
            "headroom": [row.ledger.headroom for row in rows],
            "staging": max(row.ledger.staging for row in rows),
            "same": torch.equal(model.forward(IDS, cache).cpu(), answer),
            "read back": written == model.plan,
        }
        model.unload()
        cache.reset()
        model.load(plan=written)
        found["carried out"] = model.plan == written
        found["same again"] = torch.equal(model.forward(IDS, cache).cpu(), answer)
        model.unload()
        found["left"] = [devices.allocated_memory(ledger.device) for ledger in plan.ledgers]
        seen.append(found)
    return seen


@pytest.mark.sweep(2)
@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("name", LOADED)
def test_experts_in_host_memory_are_loaded_as_planned_to_the_byte(tmp_path, name, cards):
    config = TINY[name](num_hidden_layers=4, **{LOADED[name]: 16})
    folder = str(save(reference(config), tmp_path))
    found = run_sim(carried_out, ",".join(["1G"] * cards), args=[folder, cards], timeout=300)
    for each in found:
        assert each["apart"] and each["staging"], each
        assert each["planned"] == each["measured"], each
        assert min(each["headroom"]) >= 0 and not any(each["left"]), each
        assert each["same"] and each["read back"], each
        assert each["carried out"] and each["same again"], each
    apart = [each["apart"] for each in found]
    assert apart == sorted(apart) and apart[0] < apart[-1]


def capped(folder: str) -> list[tuple]:
    """The same loads on a card of so many bytes, and on a larger one of which a split gives as
    many: experts and bytes of each device as planned, most bytes on the card, and the answer."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4
    model = Model(folder, max_input_len=16)
    model.usage = lambda: None  # calls between the loads have no effect
    cache, devices_of = Cache(model, 64, 2), ["sim:0", "cpu"]
    plan = place(model, cache, "sim:0")
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    seen = []
    for share in (0.3, 0.7):
        cap = plan.ledgers[0].total - int(share * experts)
        for capacity, split in ((cap, None), (1 << 30, [cap / 2**30, 1])):
            sim.set_capacity(0, capacity)
            cache.reset()
            with devices.peak_memory(torch.device("sim:0")) as peaks:
                if split is None:
                    model.load_autosplit(cache, devices=devices_of)
                else:
                    model.load(devices=devices_of, gpu_split=split)
                answer = model.forward(IDS, cache).cpu()
            apart = [unit.host_experts for unit in model.plan.units]
            totals = [ledger.total for ledger in model.plan.ledgers]
            seen.append((apart, totals, answer.sum().item(), peaks[0] <= cap))
            model.unload()
    return seen


def test_a_split_caps_a_card_with_experts_in_host_memory_too(tmp_path):
    config = TINY["Qwen3MoeForCausalLM"](num_hidden_layers=4, num_experts=16)
    folder = str(save(reference(config), tmp_path))
    first, as_first, second, as_second = run_sim(capped, args=[folder])
    assert first == as_first and second == as_second
    assert any(first[0]) and first[0] != second[0] and first[2] == second[2] and first[3]


@dataclass
class Other:
    """Another program, which takes memory of the card once, before a unit is loaded."""

    nbytes: int
    before: int
    taken: torch.Tensor | None = None

    def __call__(self, index: int, total: int) -> None:
        if index == self.before and self.taken is None:
            self.taken = torch.empty(self.nbytes, dtype=torch.uint8, device="sim:0")


def filled_meanwhile(folder: str) -> list[tuple]:
    """Loads during which another program takes memory of the card: none, before the last layer, and
    before the head, which then fits, while calls don't."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4
    model = Model(folder, max_input_len=16)
    model.usage = lambda: None  # calls between the loads have no effect
    cache = Cache(model, 64, 2)
    plan = place(model, cache, "sim:0")
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    sim.set_capacity(0, plan.ledgers[0].total - experts // 4)
    seen = []
    for other in (Other(0, 0), Other(experts // 12, 4), Other(1 << 14, 5)):
        cache.reset()
        model.load_autosplit(cache, devices=["sim:0", "cpu"], callback=other)
        counts = [len(unit.host_experts) for unit in model.plan.units]
        row = next(row for row in model.report.devices if row.device.type != "cpu")
        as_planned = row.measured["weights"] == row.ledger.weights
        answer = model.forward(IDS, cache).cpu()
        seen.append(
            (
                counts,
                answer.sum().item(),
                as_planned,
                sorted({*map(str, model.device_map.values())}),
            )
        )
        model.unload()
    return seen


def test_full_card_returns_experts_to_the_host(tmp_path):
    config = TINY["Qwen3MoeForCausalLM"](num_hidden_layers=4, num_experts=32)
    folder = str(save(reference(config), tmp_path))
    alone, amid, again = run_sim(filled_meanwhile, "1G", args=[folder])
    assert amid[0][:-2] == alone[0][:-2] and amid[0][-2] > alone[0][-2]  # of the current layer
    assert sum(again[0]) > sum(alone[0])  # planned again
    for _, answer, as_planned, where in (alone, amid, again):
        assert answer == alone[1] and as_planned and where == ["sim:0"]


def refused(folder: str) -> list[str]:
    """Errors of plans with experts that the model doesn't have."""
    model = Model(folder)
    cache = Cache(model, 64, 2)
    plan = place(model, cache, "cpu")
    said = []
    for changes in ({"host_experts": (99,)}, {"host_experts": (0,), "host_weights": 1}):
        unit = replace(plan.units[2], **changes)
        try:
            model.load(plan=replace(plan, units=(*plan.units[:2], unit, *plan.units[3:])))
        except ValueError as error:
            said.append(str(error))
    return said


def test_plan_for_another_models_experts_is_rejected(tmp_path):
    config = TINY["MixtralForCausalLM"](num_hidden_layers=4)
    folder = str(save(reference(config), tmp_path))
    wrong, other = run_sim(refused, "1G", args=[folder])
    assert "model.layers.1 has experts 0 to 3: 99 can't be in host memory" in wrong
    assert "the plan was made for another model" in other

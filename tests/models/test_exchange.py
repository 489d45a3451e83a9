"""Experts that change places between card and host while a model serves: the same tokens, not a
byte more, and both experts whole whatever happens.

Each scenario runs in a process of its own, on simulated devices that compute as the host does.
"""

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from simproc import run_sim
from tiny import TINY, mixtral, reference, save, save_tokenizer

from exkv import (
    Engine,
    GenerationConfig,
    Job,
    Model,
    PagedCache,
    SamplingParams,
    Tokenizer,
    devices,
)
from exkv.checkpoint import open_checkpoint
from exkv.layers.mlp import mixtures
from exkv.loading import loader
from exkv.models import exchange
from exkv.models.exchange import ExpertExchange, Swap
from exkv.models.expert_usage import ExpertUsage

PROMPTS = ("one two three", "Once upon a time", "the key is in the kitchen", "where is it")
KINDS = {"MixtralForCausalLM": None, "Qwen3MoeForCausalLM": "int4", "GptOssForCausalLM": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = mixtral(num_hidden_layers=2, num_local_experts=6, eos_token_id=None)
    return save_tokenizer(save(reference(config), tmp_path_factory.mktemp("mixture")))


def load(folder: str, **options) -> tuple[Model, PagedCache]:
    """Load with every other expert in host memory."""
    model = Model(folder, max_input_len=32, **options)
    cache = PagedCache(model, max_seq_len=512)
    planned = loader.planned

    def with_experts(scenario):
        scenario, (plan,), costs = planned(scenario)
        experts = {unit.name: tuple(range(0, len(unit.expert_bytes), 2)) for unit in model.units}
        units = tuple(replace(u, host_experts=experts[u.name]) for u in plan.units)
        return scenario, (replace(plan, units=units),), costs

    with mock.patch.object(loader, "planned", with_experts):
        model.load_autosplit(cache, devices=["sim:0"])
    return model, cache


def texts(model: Model, cache: PagedCache, stats: list | None = None) -> list[list[int]]:
    """Tokens of jobs that come and go, greedy and sampled."""
    tokenizer = model_tokenizer(model)
    with Engine(model, cache, tokenizer, max_running=3, chunk=16) as engine:
        jobs = [
            Job(prompt=p, max_new_tokens=16 + 4 * i, seed=i, settings=way, ignore_eos=True)
            for i, p in enumerate(PROMPTS)
            for way in (SamplingParams.greedy(), SamplingParams())
        ]
        handles = [engine.submit(job) for job in jobs]
        while engine.busy:
            engine.iterate()
        if stats is not None:
            stats += [engine.stats.exchanges, engine.stats.exchanged_bytes]
        return [list(handle.tokens) for handle in handles]


def model_tokenizer(model: Model):
    return Tokenizer(model.config.path)


def weights(model: Model) -> list[dict[str, torch.Tensor]]:
    return [
        {name: each.detach().cpu().clone() for name, each in unit.module.named_parameters()}
        for unit in model.units
    ]


def same(before: list[dict], after: list[dict]) -> bool:
    return all(torch.equal(a[n], b[n]) for a, b in zip(before, after, strict=True) for n in a)


def misplaced(model: Model) -> list[str]:
    """Experts that are not where their unit says."""
    wrong = []
    for unit in model.units:
        for mixture in mixtures(unit.module):
            assert mixture.on_host == unit.host_experts
            for index, expert in enumerate(mixture.experts):
                kind = "cpu" if index in unit.host_experts else "sim"
                if {p.device.type for p in expert.parameters()} != {kind}:
                    wrong.append(f"{unit.name} {index}")
    return wrong


def any_pairs(self: ExpertExchange):
    """Random pairs of equal format."""
    draw = random.Random(self.swaps)
    for name, mixture in self._counter.experts.items():
        unit = self._units[name]
        there = sorted(set(range(len(mixture.experts))) - unit.host_experts)
        pair = draw.choice(sorted(unit.host_experts)), draw.choice(there)
        yield Swap(unit=unit, mixture=mixture, to_card=pair[0], to_host=pair[1], gain=draw.random())


def many_exchanges(folder: str, options: dict) -> dict:
    model, cache = load(folder, exchange_experts=False, **options)
    seen, expected = {"off": model.exchange is None}, texts(model, cache)
    whole = weights(model)
    model.unload()
    del cache
    model, cache = load(folder, **options)
    model.exchange.every, stats = 1, []
    ledger, card = model.report.devices[0].ledger, torch.device("sim:0")
    before = [unit.host_experts for unit in model.units]
    held = torch.accelerator.memory_allocated(card)
    fired, moved = [], False
    for expert in next(mixtures(model.units[-2].module)).experts:
        next(iter(expert.children())).register_forward_hook(lambda *_: fired.append(1))
    with (
        mock.patch.object(ExpertExchange, "_worthwhile_swaps", any_pairs),
        devices.peak_memory(card) as peaks,
    ):
        while model.exchange.swaps < 200:
            if texts(model, cache, stats) != expected:
                break
            moved |= before != [unit.host_experts for unit in model.units]
    seen["tokens"] = model.exchange.swaps
    seen["stats"] = stats[-2:] == [model.exchange.swaps, model.exchange.moved_bytes]
    seen["moved"] = moved
    seen["as many"] = list(map(len, before)) == [len(unit.host_experts) for unit in model.units]
    seen["misplaced"] = misplaced(model)
    seen["whole"] = same(whole, weights(model))
    seen["hook"] = bool(fired)
    gc.collect()
    seen["held"] = torch.accelerator.memory_allocated(card) - held
    seen["over"] = max(peaks[0] - ledger.workspace - ledger.logits, 0)
    seen["behind"] = texts(model, cache) == expected
    model.unload()
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_tokens_stay_through_200_exchanges_and_so_do_bytes(tmp_path, name):
    config = TINY[name]()
    config.eos_token_id = None
    folder = save_tokenizer(save(reference(config), tmp_path))
    options = {"dtype": "float32"} if KINDS[name] is None else {"weights": KINDS[name]}
    seen = run_sim(many_exchanges, "64M", args=[str(folder), options])
    assert seen.pop("tokens") >= 200
    expected = dict.fromkeys(("off", "stats", "moved", "as many", "whole", "hook", "behind"), True)
    assert seen == expected | {"misplaced": [], "held": 0, "over": 0}


def failing(folder: str, options: dict) -> list[str]:
    """What is wrong after an exchange that failed at its first, second, ... copy of a tensor."""
    wrong = []
    model, cache = load(folder, **options)
    model.exchange.every = 1 << 30
    whole, expected = weights(model), texts(model, cache)
    unit = model.units[1]
    swap = Swap(unit=unit, mixture=next(mixtures(unit.module)), to_card=2, to_host=3, gain=1.0)
    copies, copy = [], torch.Tensor.copy_
    errors = torch.OutOfMemoryError("Allocation failed: out of memory"), RuntimeError("gone")
    for at in range(20):
        for error in errors:
            copies.clear()

            def broken(target, source, *args, at=at, error=error, **kwargs):
                copies.append(at)
                if len(copies) == at + 1:
                    copy(target.view(-1)[:7], source.view(-1)[:7])  # half-way
                    raise error
                return copy(target, source, *args, **kwargs)

            before = unit.host_experts
            try:
                with mock.patch.object(torch.Tensor, "copy_", broken):
                    exchange.exchange(swap, model.exchange._stored[unit.name])
            except (torch.OutOfMemoryError, RuntimeError):
                if not same(whole, weights(model)) or misplaced(model):
                    wrong.append(f"weights after copy {at}")
                if unit.host_experts != before:
                    wrong.append(f"places after copy {at}")
                continue
            swap = replace(swap, to_card=swap.to_host, to_host=swap.to_card)
            if not same(whole, weights(model)) or misplaced(model):
                wrong.append("an exchange that went through")
    if unit.host_experts == before or len(copies) < 6:
        wrong.append(f"{len(copies)} copies")
    if texts(model, cache) != expected:
        wrong.append("tokens")
    return wrong


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"weights": "int8"}], ids=str)
def test_an_error_amid_an_exchange_leaves_both_experts_as_they_were(folder, options):
    assert run_sim(failing, "64M", args=[str(folder), options]) == []


def hot_ones(folder: str) -> dict:
    """What is exchanged for which counts."""
    model, cache = load(folder)
    unit, moves = model.units[1], ExpertExchange(every=1)
    with open_checkpoint(folder) as checkpoint:
        moves.watch(unit, checkpoint)

    def after(*counts: float, bytes_left: int = 1 << 30) -> list[int]:
        moves._recent = {unit.name: ExpertUsage(100.0, counts)}
        moves.most_bytes = bytes_left
        moves._exchange()
        return sorted(unit.host_experts)

    seen = {
        "begin": sorted(unit.host_experts),
        "even": after(50, 49, 52, 50, 50, 48),
        "one": after(90, 50, 20, 40, 0, 60),
        "small": after(20, 60, 90, 10, 95, 0, bytes_left=1),
        "rest": after(20, 60, 90, 10, 95, 0),
        "swaps": moves.swaps,
    }
    seen["faded"] = moves._recent[unit.name].counts
    ids = torch.arange(5, 25).view(1, -1)
    out = model.generate(ids, GenerationConfig(max_new_tokens=8))
    usage = model.exchange.take_served()
    seen["tokens"] = [each.tokens for each in usage.values()]
    seen["served"] = out.shape[1]
    model.generate(ids, GenerationConfig(max_new_tokens=8))
    model.unload()
    return seen


def test_hot_experts_come_to_the_card_for_cold_ones_of_the_same_layer(folder):
    (folder / "exkv-experts.json").unlink(missing_ok=True)
    seen = run_sim(hot_ones, "64M", args=[str(folder)])
    assert seen["begin"] == seen["even"] == [0, 2, 4]
    assert seen["one"] == [2, 3, 4], "0 for 3, and no other pair"
    assert seen["small"] == [2, 3, 5], "one exchange, the greatest gain"
    assert seen["rest"] == [0, 3, 5]
    assert seen["swaps"] == 3
    assert seen["faded"] == pytest.approx([18, 54, 81, 9, 85.5, 0])
    assert seen["tokens"] == [seen["served"] - 1] * 2
    kept = json.loads((folder / "exkv-experts.json").read_bytes())["measured"]["served"]
    assert [each["tokens"] for each in kept.values()] == [seen["served"] - 1] * 2

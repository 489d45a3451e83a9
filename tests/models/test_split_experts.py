"""Layers whose experts lie partly in host memory: the same bits for every placement, no byte more
than planned, and nothing left behind.

Each scenario runs in a process of its own, on simulated devices that compute as the host does.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapters import linears_of, write_adapter
from host_experts import load
from packers.gguf import in_types, write_gguf
from safetensors.torch import load_file
from simproc import run_sim
from tiny import GEMMA4_EXPERTS, TINY, gemma4, mixtral, reference, save, save_tokenizer

from exkv import (
    Cache,
    Engine,
    GenerationConfig,
    Job,
    Model,
    PagedCache,
    PlacementError,
    Tokenizer,
    devices,
    sim,
)
from exkv.checkpoint import ExpertsConfig
from exkv.checkpoint.families import FAMILIES
from exkv.layers.mlp import mixtures
from exkv.layers.split_experts import HostRates, rows_to_stream
from exkv.models.units import staging_bytes

#: Placements: all experts on the card, every other, one, or none.
PLACEMENTS = ("all", "half", "one", "none")
#: Three rows of unlike lengths, two of them longer than a chunk.
IDS = torch.randint(3, 320, (3, 44), generator=torch.Generator().manual_seed(5))
NEW, CHUNK = (44, 31, 7), 24
#: Rates at which every expert of a prompt is sent to the card, or none.
SENT, STAYS = HostRates(flops=1.0), HostRates(flops=1e30)


def answers(model: Model, cache: Cache) -> list[torch.Tensor]:
    """Logits of a ragged prompt, of a few tokens at once, and of single ones."""
    cache.reset()
    made = [model.forward(IDS, cache, new_lens=NEW, last_id_only=True)]
    made.append(model.forward(IDS[:, :4], cache))
    made += [model.forward(IDS[:, step : step + 1], cache) for step in range(3)]
    made.append(model.forward(IDS[:1, :40]))
    return [logits.cpu() for logits in made]


def allocated() -> list[int]:
    gc.collect()
    return [torch.accelerator.memory_allocated(i) for i in range(torch.accelerator.device_count())]


def made(folder: str, weights: str | None = None, rates: HostRates | None = None) -> Model:
    options = {} if weights is None else {"weights": weights}
    model = Model(folder, max_input_len=CHUNK, dtype="bfloat16", **options)
    model.host_rates = rates or model.host_rates
    return model


# The same bits --------------------------------------------------------------------------------


def every_placement(folder: str, weights: str | None) -> list[str]:
    """The differences, in words."""
    wrong: list[str] = []
    expected = None
    before = allocated()
    for placement, rates in zip(PLACEMENTS, (None, SENT, STAYS, None), strict=True):
        model = made(folder, weights, rates)
        cache = Cache(model, 96, 3)
        load(model, cache, placement)
        ledger = model.report.devices[0].ledger
        measured = model.report.devices[0].measured["workspace"]
        if measured != ledger.workspace:
            wrong.append(f"{placement}: workspace {measured}, planned {ledger.workspace}")
        with devices.peak_memory(torch.device("sim:0")) as peaks:
            found = answers(model, cache)
        if peaks[0] > ledger.workspace + ledger.logits:
            wrong.append(f"{placement}: a call took {peaks[0]} of {ledger}")
        expected = expected or found
        same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
        if not all(same):
            wrong.append(f"{placement}: {same}")
        on_host = {p.device.type for u in model.units for p in u.module.parameters()} == {"sim"}
        if on_host != (placement == "all"):
            wrong.append(f"{placement}: weights on the wrong device")
        model.unload()
        del cache, model
        if allocated() != before:
            wrong.append(f"{placement}: {allocated()} instead of {before}")
    return wrong


def gguf(folder: Path) -> Path:
    """A mixture of K types and others, for which other kernels are chosen."""
    theirs = reference(mixtral(hidden_size=256, intermediate_size=256, num_hidden_layers=2))
    tensors = load_file(save(theirs, folder) / "model.safetensors")
    types = in_types("Q4_K", "Q6_K", "Q8_0", "Q4_K", "Q5_K")
    write_gguf(folder / "model.gguf", theirs.config, tensors, types, experts_apart=True)
    return folder / "model.gguf"


#: Unlike classes of experts, with floats and integers. Of three parts and more, the order in which
#: they are summed shows.
KINDS = {
    "GptOssForCausalLM": ({"num_experts_per_tok": 3}, "int4"),
    "DeepseekV3ForCausalLM": ({"num_experts_per_tok": 3}, "int4"),
    "Llama4ForCausalLM": ({}, None),
    "Qwen3MoeForCausalLM": ({"num_experts": 8, "num_experts_per_tok": 4}, None),
}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_do_not_depend_on_where_experts_lie(tmp_path, name):
    changes, weights = KINDS[name]
    folder = save(reference(TINY[name](**changes)), tmp_path)
    assert run_sim(every_placement, args=[str(folder), weights]) == []


def test_formats_of_unlike_kernels_do_not_depend_on_where_experts_lie(tmp_path):
    assert run_sim(every_placement, args=[str(gguf(tmp_path)), None]) == []


def has_experts(name: str) -> bool:
    specific = FAMILIES[name].specific
    always = not name.startswith("Gemma4")  # whose larger one has experts
    return always and specific is not None and issubclass(specific, ExpertsConfig)


MIXTURES = {
    **{name: make for name, make in TINY.items() if has_experts(name)},
    "gemma4-experts": lambda: gemma4(**GEMMA4_EXPERTS),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_no_family_depends_on_where_experts_lie(tmp_path, name, weights):
    folder = save(reference(MIXTURES[name]()), tmp_path)
    assert run_sim(every_placement, args=[str(folder), weights]) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    theirs = reference(mixtral(num_hidden_layers=3, eos_token_id=None)).bfloat16()
    return str(save_tokenizer(save(theirs, tmp_path_factory.mktemp("model"))))


def generated(folder: str) -> list:
    """Tokens of ``generate`` and of the engine, for each placement."""
    prompts, found = [row[:new].tolist() for row, new in zip(IDS, NEW, strict=True)], []
    for placement in PLACEMENTS:
        model = made(folder)
        cache = PagedCache(model, 256, page=16)
        load(model, cache, placement)
        with Engine(model, cache, Tokenizer(folder)) as engine:
            jobs = [engine.submit(Job(prompt=each, max_new_tokens=12, seed=7)) for each in prompts]
            for job in jobs:
                job.result()
            found.append([job.tokens for job in jobs])
        ids = model.generate(IDS[:2, :30], GenerationConfig(max_new_tokens=10, num_beams=2))
        found[-1].append(ids.tolist())
        model.unload()
    return found


def test_generate_and_the_engine_give_the_same_tokens(folder):
    first, *others = run_sim(generated, args=[folder])
    assert others == [first] * 3


# Memory ---------------------------------------------------------------------------------------


def planned_beside_measured(folder: str, weights: str | None, chunk: int) -> list:
    found = []
    for placement in PLACEMENTS:
        model = made(folder, weights)
        model.max_input_len = chunk
        cache = Cache(model, 96, 2)
        load(model, cache, placement)
        row = model.report.devices[0]
        found.append((placement, row.ledger.workspace, row.measured["workspace"]))
        model.unload()
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dry", [0, 1])
@pytest.mark.parametrize(("chunk", "weights"), [(64, None), (3, None), (8, "int4"), (6, "int4")])
def test_calls_of_any_size_take_what_is_planned(folder, chunk, weights, dry):
    env = {"EXKV_SIM_DRY": str(dry)}
    found = run_sim(planned_beside_measured, args=[folder, weights, chunk], env=env)
    assert all(planned == measured for _, planned, measured in found), found


def failing(folder: str) -> list:
    """Each allocation of a load fails once: what is left, and whether the load continued."""

    def attempt(n: int) -> tuple[bool, list[int], int]:
        model = made(folder)
        cache = Cache(model, 64, 1)
        sim.fail_allocation(n)
        try:
            load(model, cache, "half")
            loaded = True
            model.unload()
        except PlacementError:
            loaded = False
        sim.fail_allocation(None)
        del model, cache
        return loaded, allocated(), devices.mapped_memory()

    start = sim.allocation_count()
    attempt(1 << 30)
    total = sim.allocation_count() - start
    return [attempt(n) for n in range(1, total, max(total // 12, 1))]


def test_a_card_that_fills_up_amid_experts_is_left_as_it_was(folder):
    found = run_sim(failing, "64M", args=[folder])
    assert {(tuple(left), mapped) for _, left, mapped in found} == {((0,), 0)}
    assert not all(loaded for loaded, _, _ in found)


def mapped_and_again(folder: str) -> dict:
    model = Model(folder)
    cache = Cache(model, 64, 1)
    found = {"before": devices.mapped_memory()}
    load(model, cache, "none")
    first = model.forward(IDS[:1], cache).cpu()
    experts = sum(sum(unit.expert_bytes) for unit in model.units)
    found |= {"experts": experts, "mapped": devices.mapped_memory()}
    found["staged"] = allocated()[0] - sum(
        parameter.nbytes
        for unit in model.units
        for parameter in unit.module.parameters()
        if parameter.device.type == "sim"
    )
    model.unload()
    found["set"] = [sorted(unit.host_experts) for unit in model.units if unit.host_experts]
    load(model, cache, "half", model.load, lazy=True)
    cache.reset()
    found["again"] = torch.equal(first, model.forward(IDS[:1], cache).cpu())
    found["staging"] = staging_bytes(model.units, "sim")
    found["largest"] = max(max(unit.expert_bytes, default=0) for unit in model.units)
    model.unload()
    found["after"] = [devices.mapped_memory(), *allocated()]
    return found


def test_experts_on_the_host_are_mapped_and_a_model_loads_again_elsewhere(folder):
    found = run_sim(mapped_and_again, args=[folder])
    assert found["before"] == 0 and found["mapped"] == found["experts"] > 0
    assert found["set"] == [] and found["again"]
    assert found["staging"] == 2 * found["largest"] > 0
    assert found["after"] == [0, 0, 0]


def with_adapter(folder: str, adapter: str) -> list[bool]:
    found = []
    for placement in PLACEMENTS:
        model = made(folder)
        model.load_adapter(adapter, "other")
        cache = Cache(model, 96, 3)
        load(model, cache, placement)
        ways = [
            model.forward(
                IDS, cache, new_lens=NEW, last_id_only=True, adapter=["other", None, "other"]
            )
        ]
        ways.append(model.forward(IDS[:, :1], cache, adapter=["other", None, "other"]))
        found.append([logits.float().cpu().tolist() for logits in ways])
        model.unload()
    return [each == found[0] for each in found]


def test_adapters_beside_split_experts(folder, tmp_path):
    linears = linears_of(reference(mixtral(num_hidden_layers=3)), ["q_proj", "o_proj"])
    write_adapter(tmp_path, linears)
    assert run_sim(with_adapter, args=[folder, str(tmp_path)]) == [True] * 4


# What is sent ---------------------------------------------------------------------------------


def sent(folder: str) -> dict:
    """Bytes to the card for a prompt and for a token, by the host's rates."""
    sim.let_streams_lag()
    found: dict = {}
    for name, rates in (("sent", SENT), ("stays", STAYS)):
        model = made(folder, rates=rates)
        cache = Cache(model, 64, 1)
        load(model, cache, "none")
        for what, ids in (("prompt", IDS[:1, :CHUNK]), ("token", IDS[:1, :1])):
            sim.reset_transfer_bytes()
            logits = model.forward(ids, cache).cpu()
            moved = sim.transfer_bytes()[("cpu", "sim:0")]
            found[f"{what} {name}"] = moved, logits.float().tolist()
        found["experts"] = sum(sum(unit.expert_bytes) for unit in model.units)
        model.unload()
    return {**found, "errors": sim.lifetime_errors(), "left": allocated()}


def test_experts_of_a_prompt_are_sent_where_that_is_faster(folder):
    found = run_sim(sent, args=[folder])
    assert found["prompt sent"][0] > 0.8 * found["experts"]  # few are not chosen
    assert found["prompt stays"][0] < found["experts"] / 10
    assert found["token sent"] == found["token stays"]
    assert found["prompt sent"][1] == found["prompt stays"][1]
    assert found["errors"] == 0 and found["left"] == [0, 0]


def test_rows_to_stream_are_those_whose_products_take_longer_than_the_link():
    rates = HostRates(bandwidth=40e9, flops=400e9, link=20e9)
    # 9 MB take 0.45 ms; a row of 16M multiply-adds takes 0.08 ms.
    assert rows_to_stream(9_000_000, 16_000_000, rates) == 6
    assert rows_to_stream(32_000_000, 16_000_000, rates) == 21
    faster = replace(rates, link=50e9)
    assert rows_to_stream(9_000_000, 16_000_000, faster) == 1


def test_wrong_experts_are_refused(folder):
    model = Model(folder)
    name = model.units[1].name
    for experts, words in (
        ({name: (4,)}, f"{name} has experts 0 to 3: 4 can't be"),
        ({name: (-1, 2)}, "-1 can't be"),
        ({model.units[0].name: (0,)}, "has no routed experts"),
        ({"model.layers.9": (0,)}, "no unit 'model.layers.9'"),
    ):
        with pytest.raises(ValueError, match=words):
            model.set_host_experts({model.units[2].name: (1,), **experts})
        assert not any(unit.host_experts for unit in model.units)
    model.load(devices=["cpu"])
    with pytest.raises(ValueError, match="is loaded: call unload"):
        model.set_host_experts({name: (1,)})
    assert not any(mixture.on_host for unit in model.units for mixture in mixtures(unit.module))

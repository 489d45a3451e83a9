"""Experts in host memory together with other features of a plan: memory in segments, a draft, a
multi-token prediction head, adapters, and out of memory during a load."""

from __future__ import annotations

import pytest
import torch
from adapters import linears_of, write_adapter
from full_length import work_at_the_edge
from heads import with_head
from simproc import run_sim
from tiny import TINY, llama, reference, save, small

from exkv import Cache, Draft, Model, PlacementError, devices, place, sim
from exkv.loading.report import LINES
from exkv.planning import expected_time

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(43))
PROMPTS = [IDS[0, :20].tolist(), IDS[1, :13].tolist()]
EDGE = {"max_new_tokens": 40, "on_oom": "raise"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    config = TINY["Qwen3MoeForCausalLM"](
        num_hidden_layers=3, num_experts=16, decoder_sparse_step=1, mlp_only_layers=[]
    )
    return str(save(reference(config), tmp_path_factory.mktemp("mixture")))


def slow_memory() -> None:
    """Make these few bytes matter as many do."""
    expected_time.CARD, expected_time.HOST = 1e6, 6e4


def experts_of(model: Model) -> int:
    return sum(sum(unit.expert_bytes) for unit in model.units)


def apart(model: Model) -> int:
    return sum(len(unit.host_experts) for unit in model.plan.units)


def lines_of(*models: Model) -> list[list[int]]:
    """Ledger lines of all cards, planned and measured."""
    return [
        [getattr(row.ledger, line), row.measured.get(line, 0)]
        for model in models
        for row in model.report.devices
        for line in LINES
        if row.device.type != "cpu"
    ]


def left() -> list[int]:
    cards = (torch.device("sim", index) for index in range(torch.accelerator.device_count()))
    return [devices.allocated_memory(card) for card in cards]


# Segments ---------------------------------------------------------------------------------------


def in_segments(folder: str) -> list[dict]:
    """Loads on cards that give memory in segments, cut to what the plan reserves."""
    slow_memory()
    model = Model(folder, max_input_len=64)
    cache, seen = Cache(model, 90, 2), []
    model.load(devices=["cpu"])
    answer = model.forward(IDS, cache)
    model.unload()
    whole = place(model, cache, "sim:0", cpu=False).ledgers[0]
    for share in (0.3, 0.6):
        cache.reset()
        taken = whole.budget.in_use_by_others
        sim.set_capacity(0, taken + int(whole.total - share * experts_of(model)))
        plan = place(model, cache, "sim:0", cpu=True)
        (ledger,) = (each for each in plan.ledgers if each.device.type != "cpu")
        sim.set_capacity(0, taken + ledger.total)
        model.load(plan=plan)
        found = {
            "apart": apart(model),
            "reserved": torch.accelerator.memory_reserved(0) <= ledger.total,
            "same": torch.equal(model.forward(IDS, cache).cpu(), answer),
        }
        cache.reset()
        work_at_the_edge(model, cache, False)
        found["surprises"] = [str(each) for each in model.report.surprises()]
        model.unload()
        found["left"] = torch.accelerator.memory_reserved(0)
        seen.append(found)
    return seen


def test_cards_that_give_segments_hold_what_is_planned(tmp_path):
    config = small("Qwen3Moe", num_experts=64, num_experts_per_tok=4)(
        num_hidden_layers=3, hidden_size=256, moe_intermediate_size=256, decoder_sparse_step=1
    )
    folder = str(save(reference(config), tmp_path))
    found = run_sim(in_segments, "1G", args=[folder], env={"EXKV_SIM_ALLOCATOR": "cuda"})
    for each in found:
        assert each["apart"] and each["reserved"] and each["same"], each
        assert not each["surprises"] and not each["left"], each
    assert found[0]["apart"] < found[1]["apart"]


# Drafts -----------------------------------------------------------------------------------------


def with_draft(folder: str, other: str) -> dict:
    """Tokens with a draft, on a card that lacks half of the experts' bytes."""
    slow_memory()

    def built() -> tuple[Model, Cache, Model, Cache]:
        main, small = Model(folder, max_input_len=64), Model(other, max_input_len=64)
        return main, Cache(main, 90, 2), small, Cache(small, 90, 2)

    model, cache, draft, beside = built()
    model.load(devices=["cpu"])
    answer = model.generate(PROMPTS, cache=cache, **EDGE).tolist()
    model.unload()
    cache.reset()
    model.load_autosplit(cache, devices=["sim:0"], draft=beside)
    ledger = draft.report.devices[0].ledger
    alone = model.report.devices[0].ledger.total
    total = ledger.budget.in_use + ledger.total if experts_of(draft) else alone
    draft.unload()
    model.unload()
    sim.set_capacity(0, total - experts_of(model) // 2)
    model, cache, draft, beside = built()
    model.load_autosplit(cache, devices=["sim:0", "cpu"], draft=beside)
    found = model.generate(
        PROMPTS, cache=cache, assistant_model=Draft(draft, beside, tokens=4, confidence=0), **EDGE
    )
    seen = {
        "apart": apart(model),
        "of the draft": apart(draft),
        "lines": [line for line in lines_of(model) if line[0] != line[1]],
        "weights": [
            [row.ledger.weights, row.measured.get("weights", 0)]
            for row in draft.report.devices
            if row.device.type != "cpu"
        ],
        "tokens": found.tolist() == answer,
        "where": [sorted({*map(str, each.device_map.values())}) for each in (model, draft)],
    }
    draft.unload()
    model.unload()
    return {**seen, "left": left()}


@pytest.mark.parametrize("of", ["dense", "mixture"])
def test_a_draft_beside_changes_no_token(mixture, tmp_path, of):
    other = mixture if of == "mixture" else str(save(reference(llama()), tmp_path))
    seen = run_sim(with_draft, "64M", args=[mixture, other])
    assert seen["tokens"] and not any(seen["left"]) and not seen["lines"], seen
    assert all(planned == measured for planned, measured in seen["weights"]), seen
    if of == "mixture":  # the model goes before its draft
        assert seen["of the draft"] and not seen["apart"] and seen["where"] == [["sim:0"]] * 2
    else:
        assert seen["apart"] and seen["where"] == [["sim:0"], ["cpu"]], seen


def with_mtp_head(folder: str) -> dict:
    """Tokens with proposals of the checkpoint's own head, whose experts are in host memory, too."""
    slow_memory()
    model = Model(folder, max_input_len=32, mtp=True)
    cache = Cache(model, 90, 2)
    options = {**EDGE, "cache": cache}
    heads = {"use_mtp": True, "num_assistant_tokens": 3, "assistant_confidence_threshold": 0}
    model.load(devices=["cpu"])
    answer = model.generate(PROMPTS, **options).tolist()
    model.unload()
    cache.reset()
    whole = place(model, cache, "sim:0").ledgers[0]
    sim.set_capacity(0, whole.total - experts_of(model) * 3 // 4)
    model.load_autosplit(cache, devices=["sim:0", "cpu"])
    seen = {
        "apart": [len(unit.host_experts) for unit in model.plan.units if "layers" in unit.name],
        "lines": [line for line in lines_of(model) if line[0] != line[1]],
        "tokens": model.generate(PROMPTS, **options, **heads).tolist() == answer,
    }
    model.unload()
    return {**seen, "left": left()}


def test_a_head_for_several_tokens_has_experts_in_host_memory_too(tmp_path):
    folder = with_head("Glm4MoeForCausalLM", tmp_path, num_hidden_layers=3, n_routed_experts=16)
    seen = run_sim(with_mtp_head, "64M", args=[str(folder)])
    assert seen["apart"][-1] and sum(seen["apart"]) > seen["apart"][-1], seen
    assert seen["tokens"] and not seen["lines"] and not any(seen["left"]), seen


# Adapters ---------------------------------------------------------------------------------------


def with_adapters(folder: str, *adapters: str) -> dict:
    slow_memory()
    model = Model(folder, max_input_len=32)
    cache = Cache(model, 64, 2)
    for adapter in adapters:
        model.load_adapter(adapter, adapter)
    answers = []
    for where in ("cpu", "sim"):
        if where == "sim":
            whole = place(model, cache, "sim:0,sim:1")
            held = sum(ledger.weights for ledger in whole.ledgers)
            beside = max(ledger.total - ledger.weights for ledger in whole.ledgers)
            for card in range(2):
                sim.set_capacity(card, beside + (held - experts_of(model) * 2 // 3) // 2)
            model.load_autosplit(cache, devices=["sim:0", "sim:1", "cpu"])
            seen = {
                "apart": apart(model),
                "lines": [line for line in lines_of(model) if line[0] != line[1]],
                "cards": len({*map(str, model.device_map.values())}),
            }
        else:
            model.load(devices=["cpu"])
        answers.append([])
        for adapter in (None, *adapters):
            cache.reset()
            answers[-1].append(model.forward(IDS, cache, adapter=adapter).cpu())
        model.unload()
        cache.reset()
    pairs = list(zip(*answers, strict=True))
    seen["same"] = all(torch.equal(*pair) for pair in pairs)
    seen["unlike"] = not torch.equal(answers[0][0], answers[0][1])
    return {**seen, "left": left()}


def test_adapters_answer_as_with_all_experts_in_one_place(mixture, tmp_path):
    config = TINY["Qwen3MoeForCausalLM"](
        num_hidden_layers=3, num_experts=16, decoder_sparse_step=1, mlp_only_layers=[]
    )
    layers = linears_of(reference(config), ("q_proj", "o_proj"))
    names = [write_adapter(tmp_path / str(n), layers, rank=n, seed=n) for n in (4, 9)]
    seen = run_sim(with_adapters, "64M,64M", args=[mixture, *map(str, names)])
    assert seen["apart"] and seen["same"] and seen["unlike"] and not any(seen["left"]), seen
    assert not seen["lines"] and seen["cards"] > 1, seen


# Memory that goes -------------------------------------------------------------------------------


class Failing:
    """``torch.empty`` that fails once for lack of memory on a card."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0
        self.empty = torch.empty

    def __call__(self, *size, **options):
        device = options.get("device")
        if device is not None and torch.device(device).type == "sim":
            self.seen += 1
            if self.seen == self.at:
                raise torch.OutOfMemoryError("another program has the card's memory")
        return self.empty(*size, **options)


def out_of_memory_at_each(folder: str) -> dict:
    slow_memory()
    model = Model(folder, max_input_len=16)
    model.usage = lambda: None
    cache = Cache(model, 64, 2)
    model.load(devices=["cpu"])
    answer = model.forward(IDS, cache)
    model.unload()
    whole = place(model, cache, "sim:0").ledgers[0]
    sim.set_capacity(0, whole.total - experts_of(model) // 3)
    seen: dict = {"loads": 0, "refused": 0, "apart": [], "wrong": []}
    at = 0
    while True:
        at += 1
        cache.reset()
        torch.empty = failing = Failing(at)
        try:
            model.load_autosplit(cache, devices=["sim:0", "cpu"])
            torch.empty = failing.empty
            seen["loads"] += 1
            seen["apart"].append(apart(model))
            same = torch.equal(model.forward(IDS, cache).cpu(), answer)
            lines = [line for line in lines_of(model) if line[0] != line[1]]
            seen["wrong"] += [] if same and not lines else [[at, same, lines]]
        except (torch.OutOfMemoryError, PlacementError):
            seen["refused"] += 1
        finally:
            torch.empty = failing.empty
        if model.loaded:
            model.unload()
        seen["wrong"] += [[at, "left", left()]] if any(left()) else []
        if failing.seen < at:
            return seen


def test_out_of_memory_at_any_allocation_of_a_load_is_rolled_back(mixture):
    seen = run_sim(out_of_memory_at_each, "64M", args=[mixture], timeout=280)
    assert not seen["wrong"], seen
    assert seen["loads"] > 4 and max(seen["apart"]) > seen["apart"][-1], seen

"""``weights="best"``: the choice takes the planned bytes exactly, and losses are measured once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from on_cpu import on_cpu
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM
from work import function_calls

from exkv import Cache, Model, ModelConfig, PlacementError, Tokenizer, place, sim
from exkv.cli import main
from exkv.layers.linear import Linear
from exkv.loading import losses
from exkv.loading.report import LINES
from exkv.planning import Plan
from exkv.planning.best import given_up
from exkv.sizes import human
from exkv.weights.on_load import OPTIONS, mixed, options_of, with_weights

IDS = torch.randint(3, 320, (2, 44), generator=torch.Generator().manual_seed(3))
UNITS = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "lm_head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = llama(tie_word_embeddings=True, num_hidden_layers=4)
    return save_tokenizer(save(reference(config), tmp_path_factory.mktemp("best")))


def kept(model: Model) -> list[str]:
    return [unit.kept for unit in model.plan.units]


def logits(model: Model, cache: Cache) -> torch.Tensor:
    cache.reset()
    return torch.cat([model.forward(part, cache).cpu() for part in IDS.split([36, 8], 1)], 1)


def on_devices(folder: str) -> dict:
    """A choice for two small cards: its bytes, and its answers beside those of the same choice on
    the host; then another, for one card that has room for all."""
    model = Model(folder, max_input_len=16, weights="best")
    cache = Cache(model, 64, 2)
    model.load_autosplit(cache, devices=["sim:0"])
    whole = model.report.devices[0].ledger
    seen = {"roomy": kept(model)}
    model.unload()
    for index in range(2):
        sim.set_capacity(index, whole.total - whole.weights * 72 // 100)
    model.load_autosplit(cache)
    seen["kept"] = kept(model)
    seen["lines"] = [len(model.report.weights), *str(model.report).splitlines()[-2:]]
    seen["rows"] = [
        [getattr(row.ledger, line), row.measured.get(line, 0)]
        for row in model.report.devices
        for line in LINES
    ]
    found = logits(model, cache)
    model.unload()
    seen["left"] = [torch.accelerator.memory_allocated(i) for i in range(2)]
    weights = dict(zip(UNITS, seen["kept"], strict=True))
    alone = Model(with_weights(ModelConfig.from_pretrained(folder), weights), max_input_len=16)
    other = Cache(alone, 64, 2)
    alone.load(devices=["cpu"])
    seen["bits"] = torch.equal(found, logits(alone, other))
    return seen


def test_choice_is_loaded_to_the_byte(folder):
    seen = run_sim(on_devices, "64M,64M", args=[str(folder)])
    assert seen["roomy"] == ["as stored"] * 6
    assert len(set(seen["kept"])) > 1 and set(seen["kept"]) <= set(OPTIONS)
    assert all(predicted == found for predicted, found in seen["rows"])
    assert seen["bits"] and seen["left"] == [0, 0]
    count, *lines = seen["lines"]
    assert count == 2
    assert [line.partition(":")[0] for line in lines] == ["sim", "sim"]


def in_mixes(folder: str, transform: str) -> dict:
    """A choice by a text for a small card, its bytes, and its answers beside those of the same
    choice on the host; and what whole units would have lost."""
    text = "one two three " * 40
    options = {"max_input_len": 16, "calibration": text, "transform": transform}
    model = Model(folder, weights="best", **options)
    cache = Cache(model, 64, 2)
    model.load_autosplit(cache, devices=["sim:0"])
    whole = model.report.devices[0].ledger
    model.unload()
    sim.set_capacity(0, whole.total - whole.weights * 6 // 10)
    model.load_autosplit(cache)
    modules = (part for unit in model.units for part in unit.module.modules())
    seen = {"blocks": sorted({m.format.transform for m in modules if isinstance(m, Linear)})}
    (row,) = (row for row in model.report.devices if row.ledger.units)
    seen["rows"] = [[getattr(row.ledger, line), row.measured.get(line, 0)] for line in LINES]
    seen["kept"], seen["lines"] = kept(model), given_up(model.plan)
    losses = model.losses()
    seen["loss"] = [sum(unit.loss for unit in model.plan.units)]
    seen["loss"].append(sum(map(losses.of, UNITS, seen["kept"])))
    found = logits(model, cache)
    weights = dict(zip(UNITS, seen["kept"], strict=True))
    config = with_weights(ModelConfig.from_pretrained(folder), weights, transform)
    alone = Model(config, max_input_len=16)
    other = Cache(alone, 64, 2)
    alone.load(devices=["cpu"])
    seen["bits"] = torch.equal(found, logits(alone, other))
    plan = Plan.from_json(model.plan.to_json())
    model.unload()
    model.load(plan=plan)
    seen["again"] = kept(model) == seen["kept"]
    model.unload()
    model._losses = replace(losses, matrices={})
    model.load_autosplit(cache)
    seen["whole"] = sum(unit.loss for unit in model.plan.units)
    return seen


@pytest.mark.parametrize("transform", ["none", "hadamard"])
def test_mixes_by_a_text_lose_less_than_whole_units(folder, transform):
    seen = run_sim(in_mixes, "64M", args=[str(folder), transform])
    assert seen["blocks"] == ([0] if transform == "none" else [0, 32, 64])  # 0: the head's
    mixes = [options_of(each) for each in seen["kept"] if each not in OPTIONS]
    assert mixes and all(len(mix) == 7 and len({*mix.values()}) > 1 for mix in mixes)
    assert all(predicted == found for predicted, found in seen["rows"])
    assert seen["bits"] and seen["again"]
    assert seen["loss"][0] == pytest.approx(seen["loss"][1])
    assert seen["loss"][0] < 0.9 * seen["whole"]
    assert any(" to int" in line for line in seen["lines"])


def robbed(folder: str) -> dict:
    """Other memory fills the first card after the weights were chosen; then a smaller one."""
    model = Model(folder, max_input_len=16, weights="best")
    cache = Cache(model, 64, 2)
    thieves = []

    def steal(index: int, total: int) -> None:
        if index == 2:
            free, _ = torch.accelerator.get_memory_info(torch.device("sim", 0))
            thieves.append(torch.empty(free - (300 << 10), dtype=torch.int8, device="sim:0"))

    sim.set_capacity(1, 3 << 20)
    model.load_autosplit(cache, callback=steal)
    seen = {"kept": kept(model), "devices": sorted({str(d) for d in model.device_map.values()})}
    seen["finite"] = bool(logits(model, cache).isfinite().all())
    model.unload()
    thieves.clear()
    for index in range(2):
        sim.set_capacity(index, 700 << 10)
    try:
        model.load_autosplit(cache)
        seen["again"] = kept(model)
        model.unload()
    except PlacementError as error:
        seen["again"] = str(error)
    seen["left"] = [torch.accelerator.memory_allocated(i) for i in range(2)]
    return seen


def test_a_real_oom_keeps_the_choice_and_the_next_load_chooses_anew(folder):
    seen = run_sim(robbed, "64M,64M", args=[str(folder)])
    assert seen["kept"] == ["as stored"] * 6 and seen["devices"] == ["sim:0", "sim:1"]
    assert seen["finite"] and seen["left"] == [0, 0]
    assert isinstance(seen["again"], list) and "as stored" not in seen["again"][1:5]


def test_less_room_costs_more_and_a_plan_says_what(folder):
    model = Model(folder, max_input_len=16, weights="best")
    cache = Cache(model, 64, 2)
    (whole,) = place(model, cache, "1G", margin=0, allocator="exact").ledgers
    lost = []
    for share in (1.0, 0.8, 0.5, 0.35):
        room = whole.total - int(whole.weights * (1 - share))
        plan = place(model, cache, str(room), margin=0, allocator="exact")
        lost.append(sum(unit.loss for unit in plan.units))
        (line,) = given_up(plan)
        assert line.startswith("cuda:0: embedding") and line.endswith(" %")
        assert Plan.from_json(plan.to_json()) == plan
    assert lost[0] == 0 and lost == sorted(set(lost))
    with pytest.raises(PlacementError, match="no room for"):
        place(
            model,
            cache,
            f"{(whole.total - whole.weights * 95 // 100) >> 10}K",
            margin=0,
            allocator="exact",
        )


def test_plan_is_executed_by_its_model(folder):
    model = Model(folder, max_input_len=16, weights="best")
    cache = Cache(model, 64, 2)
    plan = place(model, cache, "cpu")
    values = json.loads(plan.to_json())
    fewer = sum(t.nbytes for t in Model(folder, weights="int6").units[1].shapes.values())
    values["units"][1] |= {"kept": "int6", "loss": 0.25, "weights": fewer}
    with pytest.raises(ValueError, match="another model"):
        Model(folder, max_input_len=16).load(plan=Plan.from_json(json.dumps(values)))
    values["units"][1]["kept"] = "int7"
    with pytest.raises(ValueError, match="weights of model.layers.0 are 'int7'; known are as st"):
        model.load(plan=Plan.from_json(json.dumps(values)))
    values["units"][0]["kept"] = values["units"][1]["kept"] = "int8"
    with pytest.raises(ValueError, match="lm_head as stored: they share a tensor"):
        model.load(plan=Plan.from_json(json.dumps(values)))
    values["units"][0]["kept"] = None
    with pytest.raises(ValueError, match="weight formats for 5 units only"):
        model.load(plan=Plan.from_json(json.dumps(values)))
    assert not model.loaded
    model.load(plan=plan)
    assert kept(model) == ["as stored"] * 6 and model.caches == [cache]


# What is lost -----------------------------------------------------------------------------------


def test_losses_are_measured_once_for_weights_and_for_each_text(folder, monkeypatch):
    text = "one two three " * 40
    model = Model(folder, weights="best", calibration=text)
    by_text, by_weights = model.losses(), Model(folder, weights="best").losses()
    for found in (by_text, by_weights):
        assert list(found.units) == UNITS
        for unit in found.units.values():
            values = [unit[option] for option in OPTIONS]
            assert values[0] == 0 and values == sorted(values)
    assert list(by_text.matrices) == UNITS[1:-1] and not by_weights.matrices
    for unit, matrices in by_text.matrices.items():
        for option in OPTIONS:
            total = sum(each[option] for each in matrices.values())
            assert len(matrices) == 7 and total == pytest.approx(by_text.units[unit][option])
    # 4 bits in groups lose about a hundredth of the weights' squares.
    assert 0.004 < by_weights.units[UNITS[1]]["int4"] < 0.02
    assert by_text.units != by_weights.units

    def measure(*_):
        raise AssertionError("measured again")

    for name in ("of_weights", "_of_text"):
        monkeypatch.setattr(losses, name, measure)
    assert Model(folder, weights="best").losses() == by_weights
    assert Model(folder, weights="best", calibration=text).losses() == by_text
    with pytest.raises(AssertionError, match="measured again"):
        Model(folder, weights="best", calibration=text[1:]).losses()


def test_a_units_loss_on_a_text_is_the_divergence_from_transformers_probabilities(tmp_path):
    """With this unit alone in 6 bits, of a model whose embedding and head are not tied."""
    folder = save_tokenizer(save(reference(llama(num_hidden_layers=4)), tmp_path))
    text = "one two three " * 15
    losses_of = Model(folder, weights="best", calibration=text).losses()
    found = losses_of.units
    ids = torch.tensor([Tokenizer(folder).encode(text)[: losses.MOST_TOKENS]])
    exact = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)(ids).logits.detach()

    def divergence(unit: str, option: str) -> float:
        kept = dict.fromkeys(UNITS, "as stored") | {unit: option}
        model = on_cpu(with_weights(ModelConfig.from_pretrained(folder), kept), dtype=torch.float32)
        logits = model.forward(ids, Cache(model, 512, dtype=torch.float32)).double()
        pair = logits.log_softmax(-1), exact.log_softmax(-1)
        return kl_div(*pair, log_target=True, reduction="sum").item() / ids.shape[1]

    for unit in UNITS:
        expected = divergence(unit, "int6")
        assert expected > 0
        assert found[unit]["int6"] == pytest.approx(expected, rel=1e-2), unit
    unit = UNITS[2]
    for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        lost = losses_of.matrices[unit][name]
        alone = mixed({each: "as stored" for each in losses_of.matrices[unit]} | {name: "int6"})
        assert losses_of.of(unit, alone) == lost["int6"]
        assert 1 / 3 < lost["int6"] / divergence(unit, alone) < 3, name


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: b"{",
        lambda values: b"[" * 100_000,
        lambda values: json.dumps(values | {"fingerprint": "another"}).encode(),
        lambda values: json.dumps(values | {"measured": {"weights": {"units": {}}}}).encode(),
        lambda values: json.dumps(values).replace('"int6": 0.', '"int6": -0.', 1).encode(),
        lambda values: json.dumps(values).replace('"int6"', '"int7"', 1).encode(),
    ],
)
def test_invalid_loss_files_are_measured_again(folder, damage):
    expected, file = Model(folder, weights="best").losses(), folder / losses.FILE
    values = json.loads(file.read_bytes())
    file.write_bytes(damage(values))
    assert Model(folder, weights="best").losses() == expected
    assert json.loads(file.read_bytes())["measured"]["weights"] == values["measured"]["weights"]


def test_losses_of_read_only_folders_go_to_the_cache_folder(folder, tmp_path, monkeypatch):
    (folder / losses.FILE).unlink(missing_ok=True)
    (folder / losses.FILE).mkdir()  # in the way of a file, for root too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        found = Model(folder, weights="best").losses()
        (file,) = (tmp_path / "exkv").iterdir()
        monkeypatch.setattr(losses, "of_weights", None)
        assert Model(folder, weights="best").losses() == found
        assert json.loads(file.read_bytes())["measured"]["weights"]["units"] == found.units
    finally:
        (folder / losses.FILE).rmdir()


# The command, and refusals ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The config of a model of 70 billion weights."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    file = tmp_path_factory.mktemp("large") / "config.json"
    file.write_text(json.dumps(values))
    return file


def answer(capsys, *arguments: str) -> dict:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_choice_for_80_layers_is_fast_and_a_line_a_device(large, capsys):
    found = {}
    command = (str(large), "--devices", "4x24G", "--weights", "best")
    assert function_calls(lambda: found.update(answer(capsys, *command))) < 3_000_000
    assert found["fits"]
    assert [line.partition(": ")[0] for line in found["weights"]] == [f"cuda:{i}" for i in range(4)]
    assert {unit["kept"] for unit in found["plans"]["model"]["units"]} >= {"as stored", "int8"}
    for ledger in found["plans"]["model"]["ledgers"]:
        total = sum(ledger[line] for line in ("weights", "cache", "workspace", "logits"))
        assert total <= ledger["budget"]["capacity"] - ledger["budget"]["margin"]


def test_a_refusal_names_the_integers_in_which_the_weights_would_fit(large, capsys):
    arguments = [str(large), "--devices", "2x24G", "--max-seq-len", "2048"]
    (said,) = [each for each in answer(capsys, *arguments)["would_fit"] if "weights" in each]
    fits = answer(capsys, *arguments, "--weights", "int5")["found"]["smallest_headroom"]
    assert said == f'weights="int5": it fits and {human(fits)} stay free'
    assert not answer(capsys, *arguments, "--weights", "int6")["fits"]


def test_invalid_requests_are_refused(folder, capsys):
    with pytest.raises(ValueError, match="has 3 tokens; give a few hundred words"):
        Model(folder, weights="best", calibration="a").losses()
    assert main(["plan", str(folder), "--weights", "best", "--max-seq-len", "max"]) == 2
    assert "--max-seq-len max and --weights best: one unknown" in capsys.readouterr().err

"""``exkv quantize --bits`` and ``--fit``: bits chosen per matrix are written, read back and planned
as stored, and an interrupted run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heads import with_head
from safetensors.torch import load_file
from simproc import run_sim
from tiny import TINY, llama, reference, save, save_tokenizer
from transformers import AutoModelForCausalLM

from exkv import Cache, Model, ModelConfig, sim
from exkv.checkpoint import Checkpoint
from exkv.cli import main, quantize
from exkv.loading import calibrated_losses
from exkv.loading.calibrated_losses import FOLLOWED, calibrated_losses_of
from exkv.loading.calibration import calibration_rows
from exkv.loading.mixes import Layers, Mixes, WrittenModel
from exkv.ops.weight_groups import PLANES
from exkv.weights.bits import pack
from exkv.weights.choice import Choice, Losses
from exkv.weights.on_load import AS_STORED, OPTIONS, class_of, mixed, options_of

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps " * 75


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    model = reference(llama(num_hidden_layers=3, dtype="bfloat16")).bfloat16()
    return save_tokenizer(save(model, tmp_path_factory.mktemp("floats")))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_text(TEXT)
    return file


def written(folder: Path, text: Path, out: Path, *how: str) -> dict:
    arguments = [str(folder), str(out), "--calibration", str(text), *how]
    assert main(["quantize", *arguments]) == 0
    assert not (out / quantize.PROGRESS).exists()
    return json.loads((out / quantize.REPORT).read_text())


@pytest.fixture(scope="module")
def mix(folder, text, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("out") / "mix"
    return out, written(folder, text, out, "--bits", "4.8")


def bits_of(out: Path) -> float:
    """Bits per weight of the layers' matrices, from the files' sizes."""
    nbytes = count = 0
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            layer = name.rpartition(".")[0]
            if name.endswith("_packed"):
                beside = ("scale", "zero_point")
                parts = [tensors.get(f"{layer}.weight_{each}") for each in beside]
                nbytes += tensor.nbytes + sum(each.nbytes for each in parts if each is not None)
                count += int(tensors[f"{layer}.weight_shape"].prod())
            elif name.endswith("proj.weight"):
                nbytes, count = nbytes + tensor.nbytes, count + tensor.numel()
    return 8 * nbytes / count


def test_mix_has_the_requested_bits_and_its_loss(mix):
    out, report = mix
    assert 4.6 < bits_of(out) <= 4.8 and report["bits"] == pytest.approx(bits_of(out))
    assert list(report["matrices"]) == [f"model.layers.{i}" for i in range(3)]
    options = [each for unit in report["matrices"].values() for each in unit.values()]
    assert len(options) == 21 and len(set(options)) > 1 and set(options) <= set(OPTIONS)
    bits, losses = zip(*((each["bits"], each["loss"]) for each in report["curve"]), strict=True)
    assert bits[0] == pytest.approx(2.5, abs=1e-3) and bits[-1] == pytest.approx(8.5, abs=1e-3)
    assert list(losses) == sorted(losses, reverse=True) and losses[-1] > 0
    before = max(loss for b, loss in zip(bits, losses, strict=True) if b >= report["bits"])
    assert before <= report["loss"] <= losses[0]


def test_transformers_answers_as_exkv_does(mix):
    pytest.importorskip("compressed_tensors")
    out, _ = mix
    model, ids = Model(out, dtype=torch.float32), torch.arange(3, 23).view(1, 20)
    model.load(devices=["cpu"])
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) > 1
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        expected = theirs(ids).logits
    assert (model.forward(ids) - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_zero_points_are_chosen_where_they_lose_less_and_the_package_reads_them(
    folder, text, mix, tmp_path
):
    """transformers' own model, each linear layer dequantized by the package by the group that the
    package finds for it: transformers would take one group for all."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors.base").BaseCompressor
    out = tmp_path / "out"
    report = written(folder, text, out, "--bits", "4.8", "--zero-points", "-r", "2")
    assert 4.6 < bits_of(out) <= 4.8 and report["bits"] == pytest.approx(bits_of(out))
    options = {each for unit in report["matrices"].values() for each in unit.values()}
    assert any(each.endswith("-asym") for each in options) and len(options) > 1
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = quantization.QuantizationConfig(**settings)
    quantization.apply_quantization_config(theirs, config, run_compressed=False)
    compressor = compressors.get_value_from_registry(settings["format"])
    with Checkpoint(out) as checkpoint:
        stored = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for name, module in theirs.named_modules():
        if f"{name}.weight_packed" in stored:
            parts = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{name}.")}
            parts["weight_scale"] = parts["weight_scale"].float()
            module.weight.data = compressor.decompress(parts, module.quantization_scheme)["weight"]
            module.quantization_enabled = False
    model, ids = Model(out, dtype=torch.float32), torch.arange(3, 23).view(1, 20)
    model.load(devices=["cpu"])
    with torch.no_grad():
        expected = theirs.float()(ids).logits
    assert (model.forward(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("bits", PLANES)
def test_codes_of_any_bits_are_packed_as_the_package_packs_them(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 1 << bits, (5, 96), dtype=torch.uint8)
    signed = (codes.int() - (1 << bits - 1)).to(torch.int8)
    assert torch.equal(pack(codes, bits), helpers.pack_to_int32(signed, bits))


# Ended, and gone on -----------------------------------------------------------------------------


class Killed(BaseException):
    """An exception that no handler catches."""


def test_interrupted_run_resumes(folder, text, mix, tmp_path, monkeypatch):
    out, save_file = tmp_path / "out", quantize.save_file
    saved = []

    def until_third(tensors, file, *rest):
        saved.append(file.name)
        save_file(tensors, file, *rest)
        if len(saved) == 3:
            raise Killed

    monkeypatch.setattr(quantize, "save_file", until_third)
    how = ["--calibration", str(text), "--bits", "4.8"]
    with pytest.raises(Killed):
        main(["quantize", str(folder), str(out), *how])
    there = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(there) == 2
    before = {name: (out / name).stat().st_mtime_ns for name in there}
    monkeypatch.setattr(calibrated_losses.CalibratedLosses, "measured", None)  # nor measured again
    written(folder, text, out, "--bits", "4.8")
    assert before == {name: (out / name).stat().st_mtime_ns for name in there}
    names = {file.name for file in mix[0].iterdir()}
    assert {file.name for file in out.iterdir()} == names
    for name in names:
        assert (out / name).read_bytes() == (mix[0] / name).read_bytes(), name


def test_resuming_with_other_settings_is_refused(folder, text, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise Killed

    monkeypatch.setattr(quantize, "save_file", stop)
    begun, other = [str(folder), str(tmp_path / "out")], tmp_path / "other"
    with pytest.raises(Killed):
        main(["quantize", *begun, "--weights", "int4", "--calibration", str(text)])
    other.write_text(TEXT + "and then")
    for arguments, said in (
        (
            ["--weights", "int5", "--calibration", str(text)],
            "another --weights (int4, now int5",
        ),
        (["--weights", "int4"], "another --calibration ("),
        (["--weights", "int4", "--calibration", str(other)], "another --calibration ("),
    ):
        assert main(["quantize", *begun, *arguments]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "out" / quantize.PROGRESS).unlink()
    (tmp_path / "out" / "notes").write_text("mine")
    assert main(["quantize", *begun, "--weights", "int4"]) == 2
    assert "not an empty folder" in capsys.readouterr().err


# By a plan --------------------------------------------------------------------------------------


def on_a_card(folder: str, text: str, out: str) -> dict:
    """A mix for a card that has room for some 5 bits a weight, loaded onto it."""
    model = Model(folder, max_input_len=64, weights="int8")
    cache = Cache(model, 64)
    model.load_autosplit(cache, devices=["sim:0"])
    whole = model.report.devices[0].ledger
    model.unload()
    layers = Layers.of(ModelConfig.from_pretrained(folder), {})
    sim.set_capacity(0, whole.total - int(layers.count * (8.5 - 5) / 8))
    arguments = ["quantize", folder, out, "--calibration", text, "--max-seq-len", "64"]
    assert main([*arguments, "--fit", "sim:0"]) == 0
    other = Model(out, max_input_len=64)
    beside = Cache(other, 64)
    other.load_autosplit(beside, devices=["sim:0"])
    report = json.loads((Path(out) / quantize.REPORT).read_text())
    row = other.report.devices[0]
    return {
        "weights": [row.ledger.weights, row.measured["weights"]],
        "left": row.ledger.budget.capacity - row.ledger.total,
        # Until a mix is chosen, its workspace counts as the largest of all options'.
        "freed": whole.workspace - row.ledger.workspace,
        "a bit": layers.count // 8,
        "mixed": sum(len({*unit.values()}) > 1 for unit in report["matrices"].values()),
    }


def test_the_models_own_head_is_planned_as_it_is_written(folder, text, tmp_path, capsys):
    source = with_head("Qwen3_5ForCausalLM", tmp_path / "in", num_hidden_layers=2)
    assert main(["quantize", str(source), str(tmp_path / "out"), "--weights", "int4"]) == 0
    layers = Layers.of(ModelConfig.from_pretrained(source), {})
    lost = {unit: dict.fromkeys(OPTIONS, 0.0) for unit in layers.alike("int4")}
    ends = {name: {AS_STORED: 0.0} for name in ("model.embed_tokens", "lm_head")}
    losses = Losses(units={**lost, **ends})
    planned = WrittenModel(Mixes(layers=layers, losses=losses), mtp=True)
    planned.choose(
        Choice.of(
            planned.losses(),
            layers.alike("int4") | dict.fromkeys([*ends, "model.layers.2"], AS_STORED),
        )
    )
    written = Model(tmp_path / "out", mtp=True).units
    sizes = [[sum(unit.nbytes.values()) for unit in units] for units in (planned.units, written)]
    assert sizes[0] == sizes[1] and len(sizes[0]) == 5
    given = [str(folder), str(tmp_path / "no"), "--calibration", str(text), "--draft", "mtp"]
    assert main(["quantize", *given, "--bits", "5"]) == 2
    assert "--draft is for --fit CARDS" in capsys.readouterr().err
    assert main(["quantize", *given, "--fit", "1G"]) == 2
    assert "exkv reads no heads" in capsys.readouterr().err


def test_the_mix_that_fits_is_loaded_onto_the_card_that_it_was_made_for(folder, text, tmp_path):
    seen = run_sim(on_a_card, "64M", args=[str(folder), str(text), str(tmp_path / "out")])
    assert seen["weights"][0] == seen["weights"][1]
    assert 0 <= seen["left"] < seen["a bit"] / 2 + seen["freed"] and seen["mixed"] > 0


def test_cards_that_are_too_small_are_refused(folder, text, tmp_path, capsys):
    arguments = [str(folder), str(tmp_path / "no"), "--calibration", str(text), "--fit", "1M"]
    assert main(["quantize", *arguments]) == 2
    assert "--fit 1M: no room for" in capsys.readouterr().err and not (tmp_path / "no").exists()


# What is lost -----------------------------------------------------------------------------------


def test_losses_of_matrices_add_up_and_fall_with_bits(folder):
    config = ModelConfig.from_pretrained(folder)
    with Checkpoint(folder) as checkpoint:
        rows = calibration_rows(config, TEXT)
        losses = calibrated_losses_of(config, checkpoint, rows)
    assert losses.units["model.embed_tokens"] == losses.units["lm_head"] == {AS_STORED: 0.0}
    for unit, of_classes in losses.matrices.items():
        assert len(of_classes) == 7
        for option in OPTIONS:
            total = sum(each[option] for each in of_classes.values())
            assert total == pytest.approx(losses.units[unit][option])
        for each in of_classes.values():
            values = [each[option] for option in OPTIONS]
            assert values == sorted(values) and values[0] == 0 < values[1]
            # A bit less is about four times the error.
            assert 2 < each["int4"] / each[FOLLOWED] < 8


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", sorted(TINY))
def test_a_mix_counts_and_names_every_matrix_of_every_architecture(name, tmp_path, capsys):
    folder = save_tokenizer(save(reference(TINY[name]()), tmp_path / "floats"))
    config = ModelConfig.from_pretrained(folder)
    layers = Layers.of(config, {})
    losses = {
        unit: {option: 2.0**-place for place, option in enumerate(reversed(OPTIONS))}
        for unit in {each.unit for each in layers.matrices.values()}
    }
    matrices: dict = {unit: {} for unit in losses}
    for layer, matrix in layers.matrices.items():
        matrices[matrix.unit][class_of(layer)] = losses[matrix.unit]
    found = Mixes(layers=layers, losses=Losses(units=losses, matrices=matrices))
    kept = found.at(6.0)
    assert layers.bits(kept) <= 6.0
    try:
        layers.units(layers.alike("int4"), torch.float32)
    except ValueError:
        return  # exkv quantize refuses it
    # What stands before a layer's number is another in a file than by the config alone.
    formats = {name.rpartition("layers.")[2]: each for name, each in layers.formats(kept).items()}
    for unit in layers.units(kept, torch.float32):
        for path, name in unit.spec.matrices.items():
            layer, shape = name.rpartition("layers.")[2], unit.shapes.get(f"{path}.codes")
            assert (layer in formats) == (shape is not None), layer
            if shape is not None:
                assert shape.shape[-1] == 32 * formats[layer].bits


# Refusals ---------------------------------------------------------------------------------------


def test_name_of_a_mix_round_trips():
    kept = {"self_attn.q_proj": "int4", "mlp.up_proj": AS_STORED}
    assert options_of(mixed(kept)) == kept
    assert mixed(dict.fromkeys(kept, "int5")) == options_of("int5") == "int5"
    for name in ("int7", "q_proj", "q_proj int4, q_proj int5", "q_proj int7", ""):
        with pytest.raises(ValueError, match="known are as stored"):
            options_of(name)
    names = ["model.layers.3.mlp.experts.17.w1", "transformer.h.0.attn.c_proj", "lm_head"]
    assert [class_of(name) for name in names] == ["mlp.experts.w1", "attn.c_proj", ""]


def test_invalid_requests_are_refused(folder, text, tmp_path, capsys):
    given = [str(folder), str(tmp_path / "out")]
    by_text = [*given, "--calibration", str(text)]
    for arguments, said in (
        ([*by_text, "--bits", "2.2"], "from 2.5 bits (int2) to under 16"),
        ([*by_text, "--bits", "16"], "from 2.5 bits (int2) to under 16"),
        ([*by_text, "--bits", "nan"], "--bits nan"),
        ([*given, "--bits", "4.25"], "--bits chooses by what fewer bits cost on a text"),
        ([*given, "--fit", "1G"], "--fit chooses by what fewer bits cost on a text"),
        ([*by_text, "--bits", "4.25", "--cache", "fp16"], "--cache is for --fit"),
        ([*given, "--weights", "int4", "--max-seq-len", "64"], "--max-seq-len is for --fit"),
        ([*given, "--weights", "int4", "-r", "2"], "--calibration-rows is for --calibration"),
        ([*by_text, "--bits", "4", "-r", "99"], "99 rows of 512 take 50,688: give a longer text"),
        ([*by_text, "--weights", "int4", "--zero-points"], "--zero-points is for --bits and --fit"),
    ):
        assert main(["quantize", *arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quantize", *by_text, "--bits", "4.25", "--fit", "1G"])
    assert "not allowed with argument" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

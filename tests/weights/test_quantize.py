"""``exkv quantize``: its output, read back by exkv and by the package compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import TINY, llama, mixtral, reference, save, save_tokenizer
from transformers import AutoModelForCausalLM

from exkv import Model
from exkv.checkpoint import Checkpoint
from exkv.cli import main, quantize
from exkv.layers.linear import Matrix
from exkv.weights.rounding import rounded as ours

LAYER = "model.layers.1.block_sparse_moe.experts.2.w2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A mixture of experts."""
    model = reference(mixtral(num_hidden_layers=2))
    folder = save(model, tmp_path_factory.mktemp("floats"), max_shard_size="400KB")
    (folder / "tokenizer.model").write_text("a tokenizer")
    return folder


@pytest.fixture(scope="module", params=["int4", "int8", "int3-asym"])
def quantized(request, folder, tmp_path_factory) -> tuple[Path, int]:
    out = tmp_path_factory.mktemp("out") / request.param
    assert main(["quantize", str(folder), str(out), "--weights", request.param]) == 0
    return out, int(request.param[3])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.names()}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of decoder layers, as exkv reads them."""
    model = on_cpu(folder)
    return {
        f"{unit.name}.{name}".replace("mlp.", "block_sparse_moe."): matrix.format.dequantize(
            dict(matrix.named_parameters()), torch.float32
        )
        for unit in model.units
        for name, matrix in unit.module.named_modules()
        if isinstance(matrix, Matrix) and unit.spec.layer is not None
    }


def test_the_package_reads_the_values_that_exkv_rounds_to_and_reads(folder, quantized):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    theirs = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    out, _ = quantized
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig(**settings)
    tensors, found, floats = tensors_of(out), dequantized(out), tensors_of(folder)
    (scheme,) = config.config_groups.values()
    bits, group = scheme.weights.num_bits, scheme.weights.group_size
    for layer, values in found.items():
        parts = {
            part: tensors[f"{layer}.{part}"]
            for part in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
            if f"{layer}.{part}" in tensors
        }
        if not parts:
            assert layer in config.ignore and layer.endswith("gate")
            continue
        compressor = theirs.get_value_from_registry(settings["format"])
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], values), layer
        kind = parts["weight_scale"].dtype, not scheme.weights.symmetric
        expected = ours(floats[f"{layer}.weight"], bits, group, *kind).values(bits)
        assert torch.equal(values, expected), layer


@pytest.mark.parametrize("weights", ["int4", "int2", "int4-asym", "int5-asym"])
def test_transformers_answers_as_exkv_does(tmp_path, weights):
    pytest.importorskip("compressed_tensors")
    save(reference(llama(num_hidden_layers=1)), tmp_path / "floats")
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path / "floats"), str(out), "--weights", weights]) == 0
    model, ids = Model(out), torch.arange(3, 23).view(1, 20)
    model.load(devices=["cpu"])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits
    assert (model.forward(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "name, matrices, weights",
    [
        ("LlamaForCausalLM", 7, "int4"),
        ("GPTNeoXForCausalLM", 4, "int4"),
        ("GPTNeoXForCausalLM", 4, "int4-asym"),
    ],
)
def test_a_text_makes_other_integers_of_the_same_size_which_transformers_reads(
    name, matrices, weights, tmp_path
):
    pytest.importorskip("compressed_tensors")
    config = TINY[name](num_hidden_layers=2)
    floats = save_tokenizer(save(reference(config), tmp_path / "floats"))
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps " * 60)
    given = {"blind": [], "first": ["--calibration", str(text)]}
    given["again"] = given["first"]
    for name, arguments in given.items():
        out = [str(floats), str(tmp_path / name), "--weights", weights]
        assert main(["quantize", *out, *arguments]) == 0
    blind, first, again = (tensors_of(tmp_path / name) for name in given)
    assert {n: (t.shape, t.dtype) for n, t in blind.items()} == {
        n: (t.shape, t.dtype) for n, t in first.items()
    }
    packed = [name for name in first if name.endswith("weight_packed")]
    assert len(packed) == 2 * matrices
    assert not any(torch.equal(first[n], blind[n]) for n in packed)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    was = dequantized(tmp_path / "floats")
    for layer, found in dequantized(tmp_path / "first").items():
        assert (found - was[layer]).norm() < 0.5 * was[layer].norm(), layer
    model, ids = Model(tmp_path / "first"), torch.arange(3, 23).view(1, 20)
    model.load(devices=["cpu"])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "first").eval()(ids).logits
    assert (model.forward(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


class Killed(BaseException):
    """An exception that no handler catches."""


def test_interrupted_run_resumes_with_zero_points_of_fused_matrices(tmp_path, monkeypatch):
    config, text = TINY["GPTNeoXForCausalLM"](num_hidden_layers=2), tmp_path / "text"
    floats = save_tokenizer(save(reference(config), tmp_path / "floats"))
    text.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps " * 60)
    how = ["--weights", "int4-asym", "--calibration", str(text)]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(["quantize", str(floats), str(whole), *how]) == 0

    def until_second_layer(tensors, file, *rest):
        if "00003-of" in file.name:
            raise Killed
        save_file(tensors, file, *rest)

    with monkeypatch.context() as context:
        context.setattr(quantize, "save_file", until_second_layer)
        with pytest.raises(Killed):
            main(["quantize", str(floats), str(out), *how])
    assert len([*out.glob("*.safetensors")]) == 2
    assert main(["quantize", str(floats), str(out), *how]) == 0
    for file in whole.glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def on_a_card(*arguments: str) -> int:
    return main(["quantize", *arguments, "--device", "sim:0"])


def test_the_text_may_run_on_an_accelerator(tmp_path, capsys):
    floats = save_tokenizer(save(reference(llama(num_hidden_layers=1)), tmp_path / "floats"))
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog " * 60)
    arguments = [str(floats), "--weights", "int4", "--calibration", str(text)]
    assert main(["quantize", *arguments, str(tmp_path / "host")]) == 0
    assert run_sim(on_a_card, "64M", args=[*arguments, str(tmp_path / "card")]) == 0
    host, card = (tensors_of(tmp_path / name) for name in ("host", "card"))
    assert host.keys() == card.keys()
    for name, tensor in host.items():
        assert (tensor == card[name]).float().mean() > 0.99, name
    assert main(["quantize", *arguments, str(tmp_path / "no"), "--device", "sim:7"]) == 2
    assert "sim:7" in capsys.readouterr().err


@pytest.mark.sweep(32)
@pytest.mark.parametrize("name", TINY)
def test_written_files_are_readable_or_absent(name, tmp_path, capsys):
    floats, out = save(reference(TINY[name]()), tmp_path / "floats"), tmp_path / "out"
    if main(["quantize", str(floats), str(out), "--weights", "int4"]) == 2:
        assert "these integers couldn't be loaded" in capsys.readouterr().err
        assert not out.exists()
        return
    model = on_cpu(out)
    assert model.forward(torch.tensor([[3, 4, 5]])).isfinite().all()


def test_a_text_that_is_empty_leaves_nothing_behind(tmp_path, capsys):
    (tmp_path / "text").write_text("")
    floats = save_tokenizer(save(reference(llama(num_hidden_layers=1)), tmp_path / "floats"))
    out = tmp_path / "out"
    arguments = [str(floats), str(out), "--weights", "int4"]
    assert main(["quantize", *arguments, "--calibration", str(tmp_path / "text")]) == 2
    assert "tokens; give a few thousand words" in capsys.readouterr().err
    assert not out.exists()


def test_only_layers_are_changed(folder, quantized):
    out, bits = quantized
    before, after = tensors_of(folder), tensors_of(out)
    kept = {name for name in before if not name.endswith("proj.weight") and ".experts." not in name}
    assert len(kept) == 3 + 2 * 3
    for name in kept:
        assert torch.equal(after[name], before[name])
    assert not any(name in after for name in before.keys() - kept)
    assert (out / "tokenizer.model").read_text() == "a tokenizer"
    size = sum(tensor.nbytes for name, tensor in after.items() if name not in kept)
    floats = sum(tensor.nbytes for name, tensor in before.items() if name not in kept)
    assert size < floats * (bits + 2) / 32


def test_no_group_is_worse_than_rounded_to_the_nearest_and_all_together_are_better(folder):
    weight = tensors_of(folder)[f"{LAYER}.weight"]
    for bits, share in ((4, 0.8), (8, 0.9)):
        half = 2 ** (bits - 1)
        made = ours(weight, bits, 32, torch.float16)
        wide = weight.unflatten(1, (-1, 32))
        nearest = (wide.abs().amax(-1, keepdim=True) / (half - 0.5)).half().float()
        codes = (wide / nearest).round().clamp(-half, half - 1)
        theirs = (codes * nearest - wide).square().sum(-1)
        values = (made.codes.float() - half).unflatten(1, (-1, 32)) * made.scale.unsqueeze(-1)
        error = (values - wide).square().sum(-1)
        assert (error <= theirs * (1 + 1e-6)).all()
        assert error.sum() < share * theirs.sum()


def test_constant_groups_are_exact():
    weight = torch.zeros(3, 64)
    weight[1, 32:], weight[2, 5] = -3, 7
    for zeros in (False, True):
        assert torch.allclose(ours(weight, 4, 32, torch.float32, zeros).values(4), weight)


def test_zero_points_lose_no_more_in_any_group_and_less_where_ranges_are_uneven():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    weight[:, :128] += 2
    for bits, share in ((2, 0.7), (4, 0.5), (8, 0.5)):
        plain, made = (ours(weight, bits, 64, torch.float16, zeros) for zeros in (False, True))
        lost, less = (
            (each.values(bits) - weight).square().unflatten(1, (-1, 64)).sum(-1)
            for each in (plain, made)
        )
        assert (less <= 1.05 * lost).all()  # refitted from another start
        assert less[:, :2].sum() < share * lost[:, :2].sum()
        assert int(made.codes.max()) < 1 << bits and int(made.zero.max()) < 1 << bits


def test_invalid_sources_are_refused_and_leave_no_file(folder, quantized, tmp_path, capsys):
    out, _ = quantized

    def refusal(*arguments: str) -> str:
        assert main(["quantize", *arguments, "--weights", "int4"]) == 2
        return capsys.readouterr().err

    assert "quantized already; give a folder of float weights" in refusal(str(out), str(tmp_path))
    assert "exists already, and is not an empty folder" in refusal(str(folder), str(out))
    broken = tmp_path / "broken"
    broken.mkdir()
    tensors = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
    tensors[f"{LAYER}.weight"][3, 3] = torch.inf
    save_file(tensors, broken / "model.safetensors")
    (broken / "config.json").write_text((folder / "config.json").read_text())
    message = refusal(str(broken), str(tmp_path / "new"))
    assert "model.safetensors" in message and f"{LAYER}.weight has values" in message
    assert list((tmp_path / "new").iterdir()) == []
    assert load_file(broken / "model.safetensors").keys() == tensors.keys()

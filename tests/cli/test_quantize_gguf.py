"""``exkv quantize IN OUT.gguf`` writes ggml's types, which gguf-py reads as the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packers.gguf import floats, gguf, write_gguf
from simproc import run_sim
from tiny import llama, reference, save, save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from exkv import Cache, Model, ModelConfig, Tokenizer, sim
from exkv.checkpoint import GGUFContents
from exkv.cli import main
from exkv.loading.mixes import Layers
from exkv.weights.feedback import cholesky_factor
from exkv.weights.gguf_rounding import TYPES, blocks_with_factor, values_of

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"


def _matrix(rows, inputs):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2048, inputs, generator=generator) * torch.linspace(0.2, 3, inputs)
    x += torch.randn(2048, 1, generator=generator)
    moments = x.T @ x / len(x)
    return torch.randn(rows, inputs, generator=generator) * 0.02, cholesky_factor(moments)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_match_gguf_py_and_calibration_loses_less(name):
    weight, root = _matrix(32, 512)
    blocks = blocks_with_factor(root, weight, name)
    type = gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(gguf.dequantize(blocks.numpy(), type))
    assert torch.equal(values_of(blocks, name), theirs)
    assert torch.equal(blocks, blocks_with_factor(root, weight, name))
    alone = values_of(blocks_with_factor(torch.eye(512), weight, name), name)
    assert ((weight - theirs) @ root).square().sum() < ((weight - alone) @ root).square().sum()
    try:
        packed = gguf.dequantize(gguf.quantize(weight.numpy(), type), type)
    except NotImplementedError:  # K types, which the package only reads
        return
    assert (weight - alone).square().sum() < np.square(weight.numpy() - packed).sum()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("fill", [0.0, 1e-3, -5.0])
def test_blocks_of_a_constant_round_to_it(name, fill):
    weight = torch.full((2, 256), fill)
    found = values_of(blocks_with_factor(torch.eye(256), weight, name), name)
    torch.testing.assert_close(found, weight, rtol=0.03, atol=1e-7)  # halves below normal


def test_unsuitable_matrices_are_refused():
    with pytest.raises(ValueError, match="576 inputs are not a multiple of Q4_K's blocks of 256"):
        blocks_with_factor(torch.eye(576), torch.ones(1, 576), "Q4_K")
    with pytest.raises(ValueError, match="too large for Q8_0"):
        blocks_with_factor(torch.eye(32), torch.full((1, 32), 1e6), "Q8_0")


def _file_of_floats(folder):
    config = LlamaConfig.from_pretrained(DEMO)
    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def words(writer):
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("none")

    write_gguf(folder / "in.gguf", config, model.state_dict(), floats, words)
    return folder / "in.gguf", model


@torch.no_grad()
def test_file_has_the_requested_bits_and_low_loss(tmp_path, monkeypatch, capsys):
    source, theirs = _file_of_floats(tmp_path)
    ids = torch.randint(7, 1280, (3, 64), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("exkv.cli.quantize_gguf.calibration_rows", lambda *_: ids)
    (tmp_path / "text").write_text("stands for the ids")
    words = ["--calibration", str(tmp_path / "text"), "--bits"]
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(source), str(out), *words, "5.2"]) == 0
    assert "bits per weight" in capsys.readouterr().out
    reader = gguf.GGUFReader(out)
    of_layers = [each for each in reader.tensors if each.name.startswith("blk.")]
    matrices = [each for each in of_layers if len(each.shape) > 1]
    bits = 8 * sum(int(each.n_bytes) for each in matrices)
    assert 5 < bits / sum(int(each.n_elements) for each in matrices) <= 5.2
    assert len({each.tensor_type for each in matrices}) > 1
    before = GGUFContents(source).metadata
    assert {**GGUFContents(out).metadata, "general.file_type": 0} == {
        **before,
        "general.file_type": 0,
    }
    model = Model(out, dtype=torch.float32)
    model.load(devices=["cpu"])
    found = model.forward(ids[:1], None).log_softmax(-1)
    floats_of = theirs(ids[:1]).logits.log_softmax(-1)
    lost = (floats_of.exp() * (floats_of - found)).sum(-1).mean()
    assert 0 < lost < 0.02
    for arguments, message in (
        ([str(source), str(tmp_path / "b.gguf"), *words, "4"], "the smallest types that fit"),
        (
            [str(DEMO), str(tmp_path / "b.gguf"), *words, "5", "--zero-points"],
            "have none of --zero",
        ),
        (
            [str(source), str(tmp_path / "b.gguf"), *words[:2], "--weights", "int4"],
            "--bits N or --f",
        ),
        ([str(source), str(out), *words, "5"], "exists already"),
        ([str(out), str(tmp_path / "b.gguf"), *words, "5"], "quantized already"),
    ):
        assert main(["quantize", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_folder_becomes_the_file_that_its_converted_floats_become(tmp_path, monkeypatch, capsys):
    """DEMO's floats as the ``gguf`` package writes them, and exkv's own file of its folder."""
    source, _ = _file_of_floats(tmp_path)
    ids = torch.randint(7, 1280, (2, 64), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("exkv.cli.quantize_gguf.calibration_rows", lambda *_: ids)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").write_text("stands for the ids")
    words = ["--calibration", str(tmp_path / "text"), "--bits", "5.2"]
    found = {}
    for name, given in (("of file", source), ("of folder", DEMO)):
        out = tmp_path / f"{name}.gguf"
        assert main(["quantize", str(given), str(out), *words]) == 0
        found[name] = {t.name: (t.tensor_type, t.data) for t in gguf.GGUFReader(out).tensors}
    assert found["of file"].keys() == found["of folder"].keys()
    for name, (kind, data) in found["of file"].items():
        assert kind == found["of folder"][name][0] and np.array_equal(
            data, found["of folder"][name][1]
        ), name
    assert sorted(each.name for each in tmp_path.glob("*.gguf")) == sorted(
        ["in.gguf", "of file.gguf", "of folder.gguf"]
    )
    text = "Once upon a time, there was a little dog.\n\nIt had 3 friends!"
    assert Tokenizer(tmp_path / "of folder.gguf").encode(text) == Tokenizer(DEMO).encode(text)


def _loaded(file: str) -> Any:
    """The report of loading a file onto the card."""
    model = Model(file, max_input_len=64)
    cache = Cache(model, 64)
    model.load_autosplit(cache, devices=["sim:0"])
    return model.report.devices[0]


def _fitted(folder: str, text: str, out: str) -> dict:
    """Files for a card with room for all, for 2.5 bits a weight less, and for none."""
    words = ["--calibration", text, "--max-seq-len", "64", "-r", "1", "--fit", "sim:0"]
    assert main(["quantize", folder, f"{out}/large.gguf", *words]) == 0
    whole = _loaded(f"{out}/large.gguf").ledger
    count = Layers.of(ModelConfig.from_pretrained(folder), {}).count
    sim.set_capacity(0, whole.total - int(count * 2.5 / 8))
    assert main(["quantize", folder, f"{out}/small.gguf", *words]) == 0
    row = _loaded(f"{out}/small.gguf")
    sim.set_capacity(0, whole.total - whole.weights)
    return {
        "weights": [row.ledger.weights, row.measured["weights"]],
        "left": row.ledger.budget.capacity - row.ledger.total,
        "a bit": count // 8,
        "refused": main(["quantize", folder, f"{out}/no.gguf", *words]),
    }


def test_the_types_that_fit_are_loaded_onto_the_card_that_they_were_chosen_for(tmp_path):
    folder = save_tokenizer(
        save(reference(llama(num_hidden_layers=3)), tmp_path / "floats"),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    (tmp_path / "text").write_text("the key is in the kitchen, and where is it " * 75)
    seen = run_sim(_fitted, "64M", args=[str(folder), str(tmp_path / "text"), str(tmp_path)])
    assert seen["weights"][0] == seen["weights"][1]
    assert 0 <= seen["left"] < seen["a bit"] and seen["refused"] == 2

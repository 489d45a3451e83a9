"""Quantized checkpoints of every method, from tests/packers: read, planned to the byte, split over
devices, and compared with the model of their dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from apart import run_apart
from on_cpu import on_cpu
from packers import write, write_config
from packers.bitsandbytes import RECIPES as BITSANDBYTES
from packers.compressed import RECIPES as COMPRESSED
from packers.exl2 import RECIPES as EXL2
from packers.exl3 import RECIPES as EXL3
from packers.fp8 import RECIPES as FP8
from packers.hqq import RECIPES as HQQ
from packers.integers import RECIPES as INTEGERS
from packers.modelopt import RECIPES as MODELOPT
from packers.mxfp4 import RECIPES as MXFP4
from packers.torchao import RECIPES as TORCHAO
from safetensors.torch import load_file, save_file
from simproc import needs_sim, run_sim
from tiny import llama, mixtral, phi3, qwen2, reference, save

from exkv import Cache, Model
from exkv.cli import main
from exkv.layers.linear import Matrix
from exkv.loading.report import LINES
from exkv.planning.dry_run import DryRun
from exkv.weights import METHODS, tiles

RECIPES = {
    **{**FP8, **MXFP4, **MODELOPT, **INTEGERS, **COMPRESSED, **EXL2, **EXL3, **HQQ},
    **BITSANDBYTES,
    **TORCHAO,
}
IDS = torch.randint(3, 320, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return reference(llama(num_hidden_layers=2, vocab_size=330))


@pytest.fixture(scope="module")
def folders(theirs, tmp_path_factory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Recipe -> its folder, and the folder's dequantized weights."""
    top, config = tmp_path_factory.mktemp("quantized"), theirs.config.to_dict()
    config["dtype"] = "float32"
    tensors = {name: value.clone() for name, value in theirs.state_dict().items()}
    return {
        name: (top / name, write(top / name, config, tensors, recipe))
        for name, recipe in RECIPES.items()
    }


def test_every_method_has_recipes_and_a_row_in_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs/quantized-weights.md").read_text()
    packed = {recipe.settings["quant_method"] for recipe in RECIPES.values()}
    for method in METHODS.keys() - {None, "on_load", "rows8"}:  # what no file states
        assert f"| `{method}` |" in page
        assert method in packed or method == "gguf"
    split = {recipe.settings["quant_method"] for recipe in RECIPES.values() if recipe.split}
    assert split == packed


def logits_of(model: Model, cache: Cache) -> torch.Tensor:
    """Logits of a prompt, and of a token after it."""
    cache.reset()
    parts = (IDS[:, :19], IDS[:, 19:])
    return torch.cat([model.forward(part, cache).cpu() for part in parts], 1)


@pytest.mark.parametrize("name", RECIPES)
def test_model_matches_weights_by_the_definition(folders, theirs, name):
    folder, plain = folders[name]
    model = on_cpu(folder)
    found = dict(dequantized(model))
    assert found.keys() == {key for key, value in plain.items() if value.dim() == 2}
    for key, value in found.items():
        assert torch.equal(value, plain[key]), key
    logits = logits_of(model, Cache(model, 32, 2))
    with torch.no_grad():
        expected = torch.func.functional_call(theirs, plain, (IDS,)).logits
        floats = theirs(IDS).logits
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits - floats).abs().max() > 1e-3 * expected.abs().max()  # so it was quantized


def dequantized(model: Model):
    for unit in model.units:
        for name, matrix in unit.module.named_modules():
            if isinstance(matrix, Matrix):
                layer = f"{unit.name}.{name}" if unit.spec.layer is not None else name
                layer = layer.replace("embed_tokens", "model.embed_tokens")
                values = matrix.format.dequantize(dict(matrix.named_parameters()), torch.float32)
                yield f"{layer}.weight", values


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (phi3, "exl2"),
        (qwen2, "nf4 nested"),
        (mixtral, "gptq 4 act-order v2"),
        (mixtral, "awq rows"),
    ],
)
def test_fused_projections_biases_and_experts_are_quantized_too(tmp_path, config, name):
    theirs = reference(config(num_hidden_layers=1))
    folder = save(theirs, tmp_path / "floats")
    tensors = load_file(folder / "model.safetensors")
    settings = {**theirs.config.to_dict(), "dtype": "float32"}
    plain = write(tmp_path / "packed", settings, tensors, RECIPES[name])
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    found = []
    for each in (folder, tmp_path / "packed"):
        model = on_cpu(each)
        found.append(model.forward(IDS))
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()


def test_every_matrix_of_exl2_is_one_that_bound_runs_know(folders):
    model = on_cpu(folders["exl2"][0])
    kept = Cache(model, 8, 1)
    model.forward(IDS[:1, :4], kept)
    units = [unit.module for unit in model.units]
    matrices = [each for unit in units for each in unit.modules() if isinstance(each, Matrix)]
    formats = [(matrix.format, matrix.size) for matrix in matrices]
    assert sum(format.name.startswith("exl2") for format, _ in formats) == 15
    assert all(format.native(size) for format, size in formats)


@pytest.mark.parametrize("name", ["fp8 blocks", "exl2", "nf4 nested"])
def test_tiles_of_rows_equal_the_whole(folders, monkeypatch, name):
    model = on_cpu(folders[name][0])
    whole = model.forward(IDS)
    monkeypatch.setattr(tiles, "TILE", 128 * 40)  # 40 rows of most matrices, and a rest
    assert (model.forward(IDS) - whole).abs().max() <= 1e-5 * whole.abs().max()


def measured(folders: list[str]) -> list[dict]:
    """Of each folder, on one device and on three, by tiles of 40 rows of most matrices."""
    tiles.TILE = 128 * 40
    return [measured_one(folder) for folder in folders]


def measured_one(folder: str) -> dict:
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 32, 2)
    seen = {"rows": [], "logits": []}
    for names in (["sim:0"], ["sim:0", "sim:1", "sim:2"]):
        model.load_autosplit(cache, devices=names, objective="balance")
        rows = model.report.devices
        seen["rows"] += [[getattr(r.ledger, k), r.measured.get(k, 0)] for r in rows for k in LINES]
        seen["logits"].append(logits_of(model, cache))
        seen["weights"] = sum(row.ledger.weights for row in rows)
        seen["devices"] = len(set(model.device_map.values()))
        model.unload()
    seen["left"] = [torch.accelerator.memory_allocated(index) for index in range(3)]
    seen["same"] = torch.equal(*seen.pop("logits"))
    return seen


def test_bytes_are_as_planned_and_three_devices_answer_as_one(folders):
    """And a device holds no more than the file does, but for its allocator's rounding."""
    names = [name for name, recipe in RECIPES.items() if recipe.split]
    args = [[str(folders[name][0]) for name in names]]
    for name, seen in zip(names, run_sim(measured, "64M,64M,64M", args=args), strict=True):
        assert [row for row in seen["rows"] if row[0] != row[1]] == [], name
        assert (seen["same"], seen["devices"], seen["left"]) == (True, 3, [0, 0, 0]), name
        stored = load_file(folders[name][0] / "model.safetensors")
        on_disk = sum(tensor.nbytes for tensor in stored.values())
        assert seen["weights"] <= on_disk + 512 * len(stored), name


PLAN = [
    "--max-seq-len",
    "64",
    "--devices",
    "3M,3M",
    "--margin",
    "0",
    "--allocator",
    "exact",
    "--objective",
    "balance",
]


@needs_sim
def test_simulated_plan_reads_no_value(folders):
    """Zeros would be no order of inputs."""
    arguments = ["plan", str(folders["exl2"][0]), *PLAN, "--simulate"]
    done = run_apart(f"from exkv.cli import main; main({arguments})", EXKV_SIM_DEVICES="")
    assert "carried out on simulated devices" in done.stdout, done.stderr


def test_a_plan_divides_no_shapes(folders, monkeypatch, capsys):
    """For a floor division of tensors without numbers torch imports sympy: two seconds."""
    called, shapes = [], DryRun._shapes

    def noted(self, func, args, kwargs):
        called.append(str(func))
        return shapes(self, func, args, kwargs)

    monkeypatch.setattr(DryRun, "_shapes", noted)
    names = [name for name, recipe in RECIPES.items() if recipe.split]
    for name in names:
        assert main(["plan", str(folders[name][0]), *PLAN]) == 0
    assert capsys.readouterr().out.count("It fits") == len(names)
    assert "aten.index_select.default" in called
    assert not {"aten.floor_divide.default", "aten.div.Tensor_mode"} & set(called)


@pytest.mark.parametrize("name", ["exl2", "exl3"])
def test_a_bare_config_of_exl2_and_exl3_says_what_it_lacks(folders, tmp_path, name):
    (tmp_path / "config.json").write_text((folders[name][0] / "config.json").read_text())
    says = f"{name.upper()} only the weights' files say how many bits.*folder"
    with pytest.raises(ValueError, match=says):
        Model(tmp_path)


@pytest.mark.parametrize(("name", "tensor"), [("exl2", "q_weight"), ("exl3", "trellis")])
def test_quantized_head_is_never_tied(folders, tmp_path, name, tensor):
    """These tools quantize the head of every model."""
    folder, _ = folders[name]
    config = json.loads((folder / "config.json").read_text())
    write_config(tmp_path, {**config, "tie_word_embeddings": True})
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    table, *_, head = Model(tmp_path).units
    assert table.spec.sources[0].stored.keys() == {"model.embed_tokens.weight"}
    assert f"lm_head.{tensor}" in head.spec.sources[0].stored and not head.spec.tied


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq 4", "awq"])
def test_a_bare_config_is_planned_as_its_checkpoint(folders, tmp_path, name):
    folder, _ = folders[name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    bare, whole = Model(tmp_path), Model(folder)
    for planned, found in zip(bare.units, whole.units, strict=True):
        if "layers.1" not in planned.name:  # of which these recipes leave out a few
            assert planned.nbytes == found.nbytes

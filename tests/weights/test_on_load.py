"""Float weights quantized on load: outputs, bytes, devices and bound runs, against the model of the
dequantized integers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from native import needs_kernels
from on_cpu import on_cpu
from runs import Readable, bound_runs
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import llama, mixtral, phi3, reference, save

from exkv import Cache, Model, ModelConfig, sim
from exkv.layers.linear import Matrix
from exkv.loading.report import LINES
from exkv.weights.methods import formats_of
from exkv.weights.on_load import OnLoad, with_weights
from exkv.weights.rounding import rounded

IDS = torch.randint(3, 320, (2, 44), generator=torch.Generator().manual_seed(3))
CONFIGS = {
    "llama": llama(tie_word_embeddings=False),
    "tied": llama(tie_word_embeddings=True),
    "fused": phi3(),
    "experts": mixtral(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: save(reference(config), tmp_path_factory.mktemp(name))
        for name, config in CONFIGS.items()
    }


def plain_folder(folder: Path, weights: str, out: Path, transform: str = "none") -> Path:
    """A checkpoint of the dequantized integers."""
    config = with_weights(ModelConfig.from_pretrained(folder), weights, transform)
    format_of = formats_of(config, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            continue
        format = format_of(name.removesuffix(".weight"), tuple(tensor.shape))
        if isinstance(format, OnLoad):
            made = format.convert({"weight": tensor})
            tensors[name] = format.dequantize(made, torch.float32)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def answers(model: Model) -> torch.Tensor:
    """Logits of a prompt, of single tokens and of a few at once."""
    cache = Cache(model, 64, 2)
    parts = [IDS[:, :36], *IDS[:, 36:41].split(1, 1), IDS[:, 41:]]
    return torch.cat([model.forward(part, cache).cpu() for part in parts], 1)


@pytest.mark.parametrize(
    ("name", "weights", "transform"),
    [
        ("llama", "int8", "none"),
        ("tied", "int4", "none"),
        ("fused", "int4", "none"),
        ("experts", "int4", "none"),
        ("tied", "int4", "hadamard"),
        ("fused", "int5", "hadamard"),
        ("experts", "int4", "hadamard"),
        ("llama", "int2", "none"),
        ("tied", "int5-asym", "none"),
        ("experts", "int3-asym", "hadamard"),
    ],
)
def test_loaded_integers_match_the_dequantized_model(folders, tmp_path, name, weights, transform):
    found = answers(on_cpu(folders[name], weights=weights, transform=transform))
    expected = answers(on_cpu(plain_folder(folders[name], weights, tmp_path, transform)))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert not torch.equal(expected, answers(on_cpu(folders[name])))


@needs_kernels
@pytest.mark.parametrize("transform", ["none", "hadamard"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("tied", torch.bfloat16),
        ("fused", torch.bfloat16),
        ("experts", torch.float16),
    ],
)
def test_bound_run_is_bit_identical(folders, name, dtype, transform):
    model = on_cpu(folders[name], weights="int4", dtype=dtype, transform=transform)
    with bound_runs() as runs:
        found = answers(model)
    with Readable():
        expected = answers(model)
    assert torch.equal(found, expected)
    assert runs == [len(model.units)] * 6


def measured(folder: str, weights: str, dtype: str) -> dict:
    """On one device, and on three of which each is too small for all; prompts of more tokens than
    decode-sized ones."""
    model = Model(folder, max_input_len=32, weights=weights, dtype=getattr(torch, dtype))
    cache = Cache(model, 64, 2)
    model.load(devices=["cpu"])
    alone = run(model, cache)
    model.unload()
    seen = {"rows": []}
    model.load_autosplit(cache, devices=["sim:0"])
    whole = model.report.devices[0].ledger
    seen["weights"] = whole.weights
    model.unload()
    for index in range(3):
        sim.set_capacity(index, whole.total - (whole.weights + whole.cache) * 5 // 10)
    model.load_autosplit(cache)
    for row in model.report.devices:
        seen["rows"] += [[getattr(row.ledger, key), row.measured.get(key, 0)] for key in LINES]
    seen["bits"] = torch.equal(run(model, cache), alone)
    seen["devices"] = sorted({str(device) for device in model.device_map.values()})
    return seen


def run(model: Model, cache: Cache) -> torch.Tensor:
    cache.reset()
    return torch.cat([model.forward(part, cache).cpu() for part in IDS.split([36, 8], 1)], 1)


@pytest.mark.parametrize(
    ("name", "weights", "dtype"), [("tied", "int4", "float32"), ("fused", "int8", "bfloat16")]
)
def test_it_is_planned_to_the_byte_and_split_without_a_change(folders, name, weights, dtype):
    seen = run_sim(measured, "64M,64M,64M", args=[str(folders[name]), weights, dtype])
    assert all(predicted == found for predicted, found in seen["rows"])
    assert seen["bits"] and len(seen["devices"]) > 1


def test_a_config_alone_is_planned_as_the_checkpoint_is(folders, tmp_path):
    config = json.loads((folders["tied"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    alone, there = (
        Model(path, weights="int4") for path in (tmp_path / "config.json", folders["tied"])
    )
    sizes = [
        sum(t.nbytes for unit in m.units for t in unit.shapes.values()) for m in (alone, there)
    ]
    assert sizes[0] == sizes[1]


def test_no_more_than_a_unit_of_floats_is_in_memory_beside_the_integers(tmp_path):
    folder = save(reference(llama(num_hidden_layers=12)), tmp_path)
    model = Model(folder, weights="int4")
    with torch.profiler.profile(profile_memory=True) as profile:
        model.load(devices=["cpu"])
    events = profile.profiler.kineto_results.events()
    peak = max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))
    held = sum(tensor.nbytes for unit in model.units for tensor in unit.shapes.values())
    matrices = [m for m in model.units[1].module.modules() if isinstance(m, Matrix)]
    layer = sum(matrix.size[0] * matrix.size[1] * 4 for matrix in matrices)
    assert held < peak < held + 3 * layer


def test_searched_scales_beat_rounding_to_nearest():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4):
        made = rounded(weight, bits, 64, torch.float16)
        half = 2 ** (bits - 1)
        signed = made.codes.float().sub(half).unflatten(1, (-1, 64))
        found = signed.mul(made.scale.float().unsqueeze(-1)).flatten(1)
        scale = weight.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True) / (half - 1)
        nearest = weight.unflatten(1, (-1, 64)).div(scale).round().mul(scale).flatten(1)
        assert (found - weight).square().sum() < 0.97 * (nearest - weight).square().sum()


def test_invalid_weights_are_refused(folders, tmp_path):
    known = "int8, int6, int5, int4, int3, int2, these with -asym behind them, best, or None"
    with pytest.raises(ValueError, match=f"'int7'; it must be one of {known}"):
        Model(folders["tied"], weights="int7")
    with pytest.raises(ValueError, match="'rotation'; it must be hadamard, none, or None"):
        Model(folders["tied"], weights="int4", transform="rotation")
    with pytest.raises(ValueError, match="needs integers, and weights is None"):
        Model(folders["tied"], transform="hadamard")
    quantized = with_weights(ModelConfig.from_pretrained(folders["tied"]), "int8")
    with pytest.raises(ValueError, match=r"is quantized already \(on_load\).*leave weights out"):
        Model(quantized, weights="int4")
    plain_folder(folders["tied"], "int8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="1 of .* weights are not finite; the first is number"):
        on_cpu(tmp_path, weights="int8")

"""A format added from outside: loaded, planned to the byte, split, tied, and compared with the
model of its dequantized weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu
from safetensors.torch import load_file, save_file
from simproc import run_sim
from tiny import llama, mixtral, phi3, reference, save

from exkv import Cache, Model, sim
from exkv.checkpoint import CheckpointError
from exkv.loading.report import LINES
from exkv.weights import METHODS

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(3))
IGNORED = "model.layers.1.mlp.up_proj"
CONFIGS = {
    "llama": llama(tie_word_embeddings=False),
    "tied": llama(tie_word_embeddings=True),
    "fused": phi3(),
    "experts": mixtral(),
}


@pytest.fixture(autouse=True)
def newcomer(monkeypatch):
    monkeypatch.setitem(METHODS, "rows8", "rows8")


def know_the_newcomer() -> None:
    """Register the format in a process of its own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    METHODS["rows8"] = "rows8"


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not name.startswith(IGNORED)


def quantize(folder: Path, **settings) -> dict[str, torch.Tensor]:
    """Rewrite a folder of float weights in the format; returns the dequantized tensors."""
    tensors = load_file(folder / "model.safetensors")
    written, plain = {}, {}
    for name, tensor in tensors.items():
        if not is_matrix(name, tensor):
            written[name] = plain[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True).div(127).half().float()
        written[name] = tensor.div(scale).round().clamp(-127, 127).to(torch.int8)
        written[f"{name}_scale"] = scale
        plain[name] = written[name].float() * scale
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "rows8", "ignore": [IGNORED], **settings}
    file.write_text(json.dumps(config))
    return plain


def folder_of(tmp_path: Path, name: str) -> tuple[Path, torch.nn.Module]:
    """A quantized folder, and transformers' model with its dequantized weights."""
    theirs = reference(CONFIGS[name])
    folder = save(theirs, tmp_path)
    saved = load_file(folder / "model.safetensors")
    plain = quantize(folder)
    moved = {key: plain[key] - saved[key] for key in saved}
    assert any(delta.abs().max() > 1e-4 for delta in moved.values())
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain" / "config.json").write_text(theirs.config.to_json_string())
    return folder, type(theirs).from_pretrained(tmp_path / "plain").eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_newcomer_matches_the_dequantized_model(tmp_path, name):
    folder, theirs = folder_of(tmp_path, name)
    model = on_cpu(folder)
    cache = Cache(model, 64, 2)
    found = torch.cat([model.forward(IDS[:, :39], cache), model.forward(IDS[:, 39:], cache)], 1)
    with torch.no_grad():
        expected = theirs(IDS).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def planned_and_measured(folder: str) -> dict:
    """On one device, on two of which the first is too small, and at the promise's edge."""
    know_the_newcomer()
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64, 2)
    model.load(devices=["cpu"])
    alone = run(model, cache)
    model.unload()
    seen = {"rows": [], "bits": []}
    model = Model(folder, max_input_len=16)
    cache = Cache(model, 64, 2)
    model.load_autosplit(cache, devices=["sim:0"])
    (whole,) = seen_ledgers(model, seen)
    model.unload()
    sim.set_capacity(0, whole.total - (whole.weights + whole.cache) * 4 // 10)
    model.load_autosplit(cache)
    for ledger in seen_ledgers(model, seen):
        sim.set_capacity(ledger.device.index, ledger.total)
    seen["bits"] = torch.equal(run(model, cache), alone)
    seen["devices"] = sorted({str(device) for device in model.device_map.values()})
    stored = sum(tensor.nbytes for unit in model.units for tensor in unit.shapes.values())
    seen["weights"] = [whole.weights, stored]
    model.unload()
    seen["left"] = [torch.accelerator.memory_allocated(index) for index in range(2)]
    return seen


def seen_ledgers(model: Model, seen: dict) -> list:
    rows = model.report.devices
    for row in rows:
        seen["rows"] += [[getattr(row.ledger, k), row.measured.get(k, 0)] for k in LINES]
    return [row.ledger for row in rows]


def run(model: Model, cache: Cache) -> torch.Tensor:
    cache.reset()
    return torch.cat(
        [model.forward(IDS[:, :39], cache).cpu(), model.forward(IDS[:, 39:], cache).cpu()], 1
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_planned_to_the_byte_and_split_over_devices(tmp_path, name):
    folder, _ = folder_of(tmp_path, name)
    seen = run_sim(planned_and_measured, "64M,64M", args=[str(folder)])
    for predicted, measured in seen["rows"]:
        assert predicted == measured
    assert seen["bits"] and seen["devices"] == ["sim:0", "sim:1"]
    assert seen["left"] == [0, 0]
    weights, stored = seen["weights"]
    assert stored * 0.9 < weights < 4 * stored * 0.5


def test_a_method_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    folder, _ = folder_of(tmp_path, "llama")
    quantize_config = json.loads((folder / "config.json").read_text())
    quantize_config["quantization_config"]["quant_method"] = "brand_new"
    (folder / "config.json").write_text(json.dumps(quantize_config))
    with pytest.raises(ValueError, match="'brand_new'.*known are: .*rows8.*unquantized"):
        Model(folder)


def test_a_quantized_matrix_in_another_dtype_is_refused(tmp_path):
    folder, _ = folder_of(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}.*float32.*must hold one of: int8"):
        Model(folder).load(devices=["cpu"])

"""Weights whose inputs go through a Hadamard transform, and compressed-tensors' settings of it.

The oracle is the package compressed-tensors: its matrices, its modules, and models that it
transformed and compressed itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native import needs_kernels
from on_cpu import on_cpu
from packers.compressed import RECIPES
from packers.compressor import save_compressed
from runs import Readable, bound_runs
from safetensors.torch import load_file, save_file
from tiny import llama, mixtral, reference, save, save_tokenizer

from exkv import Cache, Model
from exkv.checkpoint import Checkpoint, CheckpointError
from exkv.cli import main
from exkv.layers import Linear
from exkv.layers.linear import Matrix, side_by_side
from exkv.loading.calibration import CalibratedUnits
from exkv.weights import GroupFormat
from exkv.weights.feedback import rounded_for
from exkv.weights.hadamard import block_of, transformed
from exkv.weights.rounding import rounded

transform = pytest.importorskip("compressed_tensors.transform")
matrices = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")

IDS = torch.randint(3, 320, (1, 30), generator=torch.Generator().manual_seed(1))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [32, 64, 128])
def test_transform_is_the_packages_and_preserves_products(block):
    theirs = matrices.deterministic_hadamard_matrix(block, torch.float64) / block**0.5
    x, weight = random(3, 384).double(), random(40, 384, seed=2).double()
    expected = (x.unflatten(1, (-1, block)) @ theirs).flatten(1)
    assert (transformed(x, block) - expected).abs().max() < 1e-14
    assert (transformed(x.float(), block) - expected).abs().max() < 1e-6
    found = transformed(x, block) @ transformed(weight, block).T
    assert (found - x @ weight.T).abs().max() < 1e-12
    assert (transformed(transformed(x, block), block) - x).abs().max() < 1e-14


def test_blocks_are_the_largest_powers_of_two_that_divide_the_inputs():
    assert [block_of(n) for n in (576, 1536, 4096, 96, 80, 48)] == [64, 64, 64, 32, 0, 0]
    assert block_of(4096, most=32) == 32
    with pytest.raises(ValueError, match="blocks of 48 inputs"):
        GroupFormat(bits=4, group=32, scale=torch.float16, hadamard=48)
    with pytest.raises(ValueError, match=r"8 x 96 can't be in .*hadamard64.* multiple of the 64"):
        GroupFormat(bits=4, group=32, scale=torch.float16, hadamard=64).layout((8, 96))


def test_integers_of_a_matrix_with_a_few_large_inputs_lose_less():
    weight, x = random(64, 256), random(2048, 256, seed=2)
    weight[:, ::37] *= 8
    x[:, 5::41] *= 8
    moments = x.T @ x / len(x)
    lost = {}
    for block in (0, 128):
        turned, seen = transformed(weight, block), transformed(transformed(moments, block).T, block)
        for how, made in (
            ("blind", rounded(turned, 4, 64, torch.float16)),
            ("by a text", rounded_for(seen, turned, 4, 64, torch.float16)),
        ):
            apart = transformed(made.values(4), block) - weight
            lost[how, block] = ((x @ apart.T).square().sum() / (x @ weight.T).square().sum()).item()
    assert lost["blind", 128] < 0.6 * lost["blind", 0]
    assert lost["by a text", 128] < 0.95 * lost["by a text", 0]


def test_projections_of_one_input_transform_it_once(monkeypatch):
    formats = [
        GroupFormat(bits=bits, group=64, scale=torch.float16, hadamard=64) for bits in (4, 5, 4)
    ]
    layers, alone = [], []
    x = random(2, 3, 128)
    for format in formats:
        layer = Linear(128, 16, bias=False, dtype=torch.float32)
        layer.use_format(format)
        made = rounded(random(16, 128), format.bits, 64, torch.float16)
        layer.load_state_dict(format.pack(made.codes, made.scale), assign=True)
        layers.append(layer)
        alone.append(layer(x))
    seen = []
    monkeypatch.setattr(
        "exkv.weights.format.transformed",
        lambda x, block: seen.append(block) or transformed(x, block),
    )
    found = side_by_side(x, layers)
    assert seen == [64] and all(map(torch.equal, found, alone))


# Folders of others ------------------------------------------------------------------------------


def scheme(*locations: str, targets: str = "Linear", **more: Any) -> dict[str, Any]:
    apply = [
        {"targets": [targets], "ignore": ["lm_head"], "location": each, "inverse": "_" in each}
        for each in locations
    ]
    return {"type": "hadamard", "head_dim": 32, "apply": apply, **more}


@pytest.mark.parametrize("config", [llama, mixtral])
@torch.no_grad()
def test_a_model_that_the_package_transforms_and_compresses_is_read(tmp_path, config):
    """The transform's matrices are among the saved tensors."""
    plain = reference(config(num_hidden_layers=2, tie_word_embeddings=False))
    applied = transform.TransformConfig(
        config_groups={"u": transform.TransformScheme(**scheme("input", "weight_input"))}
    )
    transform.apply_transform_config(plain, applied)
    rotated = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    theirs = save_compressed(plain, tmp_path, "W4A16")
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["transform_config"]["config_groups"]["u"]["head_dim"] == 32
    assert any(name.endswith("u_input.weight") for name in theirs)
    ours = on_cpu(tmp_path, dtype=torch.float32)
    changed = {key: value.float() for key, value in theirs.items() if key in rotated}
    assert any(not changed[key].equal(rotated[key]) for key in changed)
    plain.load_state_dict(changed, strict=False)
    expected = plain(IDS).logits  # through its hooks
    error = (ours.forward(IDS, Cache(ours, 64)) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


REFUSED = {
    "a random one": (
        scheme("input", type="random-hadamard"),
        "type 'random-hadamard' .* one of 'hadamard'",
    ),
    "a matrix": (scheme("input", type="random-matrix"), "type 'random-matrix'"),
    "a permuted one": (scheme("weight_input", "input", randomize=True), "randomize True"),
    "an output": (scheme("output"), "location 'output' .* one of .*weight_input"),
    "keys": (scheme("k_cache"), "location 'k_cache'"),
    "an odd block": (scheme("input", head_dim=48), "head_dim 48 .* a power of two"),
    "a block that doesn't fit": (scheme("input", head_dim=256), "q_proj's 128 inputs"),
    "a head of floats": (scheme("input", targets="re:.*(proj|head)"), "lm_head, of a layer of"),
    "another setting": (scheme("input", angle=3), "setting 'angle' .3. is not known"),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> Path:
    return save(reference(llama(num_hidden_layers=1)), tmp_path_factory.mktemp("floats"))


def with_transforms(folder: Path, groups: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    settings = {**RECIPES["compressed 4"].settings, "transform_config": {"config_groups": groups}}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("name", REFUSED)
def test_other_transforms_are_named(floats, tmp_path, name):
    values, message = REFUSED[name]
    if name == "a head of floats":
        values["apply"][0]["ignore"] = []
    (tmp_path / "config.json").write_text((floats / "config.json").read_text())
    with_transforms(tmp_path, {"r": values})
    with pytest.raises(ValueError, match=message):
        Model(tmp_path / "config.json")


def test_two_transforms_of_one_input_are_refused(floats, tmp_path):
    (tmp_path / "config.json").write_text((floats / "config.json").read_text())
    with_transforms(tmp_path, {"a": scheme("input"), "b": scheme("input", targets="re:.*q_proj")})
    with pytest.raises(ValueError, match="q_proj, after another one"):
        Model(tmp_path / "config.json")


def test_transforms_of_weights_alone_need_nothing(floats, tmp_path):
    (tmp_path / "config.json").write_text((floats / "config.json").read_text())
    with_transforms(tmp_path, {"a": scheme("weight_input", "weight_output", type="random-matrix")})
    model = Model(tmp_path / "config.json")
    with torch.device("meta"):
        module = model.units[1].spec.build()
    assert {part.format.transform for part in module.modules() if isinstance(part, Matrix)} == {0}


def test_a_matrix_among_the_tensors_must_be_the_one_that_is_named(tmp_path):
    plain = reference(llama(num_hidden_layers=1))
    config = transform.TransformConfig(
        config_groups={"u": transform.TransformScheme(**scheme("input", "weight_input"))}
    )
    transform.apply_transform_config(plain, config)
    (own,) = {p.data_ptr(): p for n, p in plain.named_parameters() if "u_input" in n}.values()
    own.data[3] *= -1
    save_compressed(plain, tmp_path, "W4A16")
    with pytest.raises(CheckpointError, match=r"no place for 1 of its tensors: .*u_input\.weight"):
        on_cpu(tmp_path)


# Folders that exkv writes -----------------------------------------------------------------------


def theirs_of(out: Path, plain: torch.nn.Module) -> torch.nn.Module:
    """The model of a folder by the package: its decompressor, and its transforms of inputs."""
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    applied = transform.TransformConfig(**settings.pop("transform_config"))
    config = quantization.QuantizationConfig(**settings)
    quantization.apply_quantization_config(plain, config)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(plain)
    tensors = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    missing, unknown = plain.load_state_dict(tensors, strict=False)
    assert not unknown and not [name for name in missing if "lm_head" not in name]
    compressor.decompress_model(plain)
    for group in applied.config_groups.values():
        group.apply = [each for each in group.apply if each.location == "input"]
        assert len(group.apply) == 1
    transform.apply_transform_config(plain, applied)
    return plain


@pytest.mark.parametrize("arguments", [["--weights", "int4"], ["--bits", "4.5"]])
@torch.no_grad()
def test_package_matches_exkv_on_exkvs_folder(tmp_path, arguments):
    config = llama(num_hidden_layers=2, intermediate_size=224, tie_word_embeddings=False)
    floats = save_tokenizer(save(reference(config), tmp_path / "floats"))
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps " * 60)
    given = [*arguments, "--transform", "hadamard"]
    if arguments[0] == "--bits":
        given += ["--calibration", str(text)]
    assert main(["quantize", str(floats), str(tmp_path / "out"), *given]) == 0
    model = on_cpu(tmp_path / "out", dtype=torch.float32)
    blocks = {
        matrix.format.transform
        for unit in model.units
        for matrix in unit.module.modules()
        if isinstance(matrix, Matrix) and unit.spec.layer is not None
    }
    assert blocks == {32, 64}
    expected = theirs_of(tmp_path / "out", reference(config))(IDS).logits
    found = model.forward(IDS, Cache(model, 64))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_interrupted_run_resumes_with_its_transform(tmp_path, capsys):
    floats = save_tokenizer(save(reference(llama(num_hidden_layers=2)), tmp_path / "floats"))
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 60)
    given = ["--weights", "int4", "--calibration", str(tmp_path / "text")]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(["quantize", str(floats), str(whole), *given, "--transform", "hadamard"]) == 0
    out.mkdir()
    kept = {"model.layers.0": "int4", "model.layers.1": "int4"}
    with Checkpoint(floats) as checkpoint:
        fingerprint = checkpoint.fingerprint
    text = hashlib.blake2b((tmp_path / "text").read_bytes(), digest_size=16).hexdigest()
    asked = dict.fromkeys(("bits", "fit", "max-seq-len", "cache", "reserve"))
    asked |= {"IN": fingerprint, "weights": "int4", "transform": "hadamard", "calibration": text}
    (out / "exkv-quantize.json").write_text(json.dumps({"asked": asked, "kept": kept}))
    for name in ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"):
        (out / name).write_bytes((whole / name).read_bytes())
    assert main(["quantize", str(floats), str(out), *given]) == 2
    assert "another --transform (hadamard, now none)" in capsys.readouterr().err
    assert main(["quantize", str(floats), str(out), *given, "--transform", "hadamard"]) == 0
    for name in sorted(file.name for file in whole.glob("*.safetensors")):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@torch.no_grad()
def test_a_text_rounds_for_inputs_that_are_transformed(tmp_path):
    theirs = reference(llama(num_hidden_layers=1))
    for name, weight in theirs.named_parameters():
        if "layers" in name and weight.dim() == 2:
            weight[:, ::29] *= 3
    folder = save(theirs, tmp_path)
    ids = torch.randint(3, 320, (4, 128), generator=torch.Generator().manual_seed(2))
    expected, lost = theirs(ids).logits, {}
    model = on_cpu(folder, weights="int3", transform="hadamard")
    lost["blind"] = (model.forward(ids) - expected).square().sum()
    by_text = CalibratedUnits(model, ids)
    with Checkpoint(folder) as checkpoint:
        made = by_text.parameters(model.units[1], checkpoint)
    for name, tensor in made.items():
        model.units[1].module.get_parameter(name).data.copy_(tensor)
    lost["by a text"] = (model.forward(ids) - expected).square().sum()
    assert lost["by a text"] < 0.5 * lost["blind"]


# What native code is told -----------------------------------------------------------------------


@needs_kernels
def test_invalid_hadamard_layouts_are_refused():
    format = GroupFormat(bits=4, group=64, scale=torch.float16, hadamard=64)
    made = rounded(random(16, 128), 4, 64, torch.float16)
    tensors = list(format.pack(made.codes, made.scale).values())
    layout = list(format.native((16, 128)))
    assert layout == [-8, 64, 4, 64, 0, 0]
    run = torch.ops.exkv.new_run(torch.empty(0), 128)
    norm = torch.ones(128)

    def head(numbers: list[int], given: list[torch.Tensor] = tensors) -> None:
        torch.ops.exkv.add_head(run, norm, None, 1e-5, 0, given, numbers, None)

    head(layout)
    for wrong, message in (
        ([-8, 48, *layout[2:]], "blocks of 48, which must be a power of two"),
        ([-8, 0, *layout[2:]], "blocks of 0, which must be a power of two"),
        ([-8, 256, *layout[2:]], "has 128 inputs, which blocks of 256 don't divide"),
        (layout[:2], "layouts are 2 numbers"),
    ):
        with pytest.raises(RuntimeError, match=message):
            head(wrong)
    with pytest.raises(RuntimeError, match="and of a matrix in groups"):
        head([-8, 64, 0, 0, 0, 0], [random(16, 128)])
    with pytest.raises(RuntimeError, match="embedding table is of transformed rows"):
        torch.ops.exkv.add_embedding(run, tensors, layout, 1.0)
    torch.ops.exkv.release_run(run)


@needs_kernels
def test_adapters_see_inputs_as_they_are(tmp_path):
    """In bound runs, too, whose matrices share what was made of x."""
    folder = save(reference(llama(num_hidden_layers=2)), tmp_path / "floats")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    own, changes = load_file(folder / "model.safetensors"), {}
    for place, (layer, name) in enumerate(itertools.product(range(2), names)):
        outputs, inputs = own[f"model.layers.{layer}.{name}.weight"].shape
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        changes[f"{prefix}.lora_A.weight"] = random(4, inputs, seed=place) / 8
        changes[f"{prefix}.lora_B.weight"] = random(outputs, 4, seed=9 + place) / 8
    save_file(changes, adapter / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in names]
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    model = on_cpu(folder, weights="int8", transform="hadamard")
    model.load_adapter(adapter, "a")
    logits = {}
    with bound_runs() as runs:
        logits["bound"] = model.forward(IDS[:, :5], Cache(model, 64), adapter="a")
    with Readable():
        logits["readable"] = model.forward(IDS[:, :5], Cache(model, 64), adapter="a")
    assert runs == [len(model.units)] and torch.equal(*logits.values())
    for unit in model.units[1:-1]:  # the same model of floats, with the changes merged
        for path, part in unit.module.named_modules():
            if not isinstance(part, Matrix):
                continue
            name = f"{unit.name}.{path}"
            values = part.format.dequantize(dict(part.named_parameters()), torch.float32)
            low = f"base_model.model.{name}.lora_"
            if f"{low}A.weight" in changes:
                values = values + changes[f"{low}B.weight"] @ changes[f"{low}A.weight"]
            own[f"{name}.weight"] = values.contiguous()
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    merged = on_cpu(folder)
    expected = merged.forward(IDS[:, :5], Cache(merged, 64))
    assert (logits["bound"] - expected).abs().max() <= 2e-2 * expected.abs().max()

"""``exkv quantize IN OUT``: write a folder of float weights as a compressed-tensors folder of
integers.

It works unit by unit, with at most one decoder layer in memory. The linear layers of decoder layers
are quantized; embedding, head, routers, norms and biases are not. Without a text each weight is
rounded by itself; with one, for the inputs that the text gives it: see
``exkv.loading.calibration``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exkv.checkpoint import Checkpoint, ExpectedTensor, ModelConfig
from exkv.checkpoint.files import read_json_object
from exkv.checkpoint.safetensors import INDEX_NAME
from exkv.devices import resolve_devices
from exkv.loading.calibration import calibration_rows, rounded_units
from exkv.loading.losses import FILE as LOSSES
from exkv.loading.usage import FILE as USAGE
from exkv.loading.usage import keep_counted
from exkv.models import Unit, unit_specs
from exkv.models.expert_usage import ExpertUsage
from exkv.models.units import UnitSpec
from exkv.sizes import human
from exkv.weights import GroupFormat, compressed_tensors
from exkv.weights.bits import SCALE_DTYPES
from exkv.weights.rounding import Rounded, rounded
from exkv.weights.settings import stays_float

from .flags import text_of

#: ``--weights`` -> bits of an integer.
WEIGHTS = {"int8": 8, "int4": 4}
#: Inputs that share a scale; the second if the first doesn't divide all layers' inputs.
GROUPS = (64, 32)
#: Suffixes of files with weights in any form, and of files that are written anew.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", LOSSES, USAGE)


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "quantize",
        help="write a model's weights as integers of 8 or 4 bits",
        description="Write a folder of float weights as a compressed-tensors folder, which exkv "
        "and transformers read. Exit status: 0 done, 2 bad input.",
    )
    parser.add_argument("model", metavar="IN", help="a checkpoint's folder, of floats")
    parser.add_argument("out", metavar="OUT", help="the folder to write, new or empty")
    parser.add_argument("--weights", choices=WEIGHTS, required=True, help="integers to store")
    parser.add_argument(
        "--calibration",
        type=text_of,
        metavar="FILE",
        help="a text, in the model's language, for whose inputs to round: less is lost, and it "
        "takes longer",
    )
    parser.add_argument(
        "--device", default="cpu", help="where the text runs, such as cuda:0 (the default: cpu)"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What to quantize, and how.

    Attributes:
        specs: the model's units; a file is written for each.
        layers: names of the quantized layers.
        group: inputs that share a scale.
        floats: matrices that stay floats.
        bits: of an integer.
        rounded: of each unit, the matrices that a text has rounded, by their layers' names.
    """

    specs: list[UnitSpec]
    layers: frozenset[str]
    group: int
    floats: list[str]
    bits: int
    rounded: Iterator[Mapping[str, Rounded]] = itertools.repeat({})

    @property
    def stored(self) -> dict[str, ExpectedTensor]:
        """The tensors that the checkpoint must hold."""
        sources = (source for spec in self.specs for source in spec.sources)
        return {name: tensor for source in sources for name, tensor in source.stored.items()}


def run(args: argparse.Namespace) -> int:
    folder, out = Path(args.model), Path(args.out)
    config = ModelConfig.from_pretrained(folder)
    work = _plan(config, WEIGHTS[args.weights])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already, and not an empty folder: name a new one")
    usage: dict[str, ExpertUsage] = {}
    with Checkpoint(folder) as checkpoint:
        checkpoint.expect(work.stored, [name for spec in work.specs for name in spec.unused])
        if args.calibration is not None:
            (device,) = resolve_devices(args.device)
            ids = calibration_rows(config, args.calibration)
            found = _calibrated(config, checkpoint, work, ids, device, usage)
            work = replace(work, rounded=found)
        before = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
        with _whole_or_empty(out):
            after = _write_weights(checkpoint, work, out)
            _copy_others(folder, out)
            _write_config(folder, work, out)
    if usage:
        keep_counted(ModelConfig.from_pretrained(out), ids, usage)
    print(
        f"{out}: {len(work.layers)} layers in {work.bits} bits, {human(before)} -> {human(after)}"
    )
    return 0


@contextlib.contextmanager
def _whole_or_empty(out: Path) -> Iterator[None]:
    """Create the folder; empty it if the block fails."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for file in out.iterdir():
            file.unlink()
        raise


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template, and all other files without weights."""
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != "config.json":
            shutil.copy(file, out)


def _plan(config: ModelConfig, bits: int) -> _Work:
    if config.path is None or config.path.is_file():
        raise ValueError(
            f"{config.path} is no folder of safetensors; give a folder of float weights, the one "
            "that the file was converted from"
        )
    if config.quantization is not None:
        raise ValueError(
            f"{config.path}: its weights are quantized already; give a folder of float weights"
        )
    specs = unit_specs(config, config.dtype or torch.float32)
    inputs_of = {
        layer: inputs
        for spec in specs
        for layer, inputs in _matrices(spec)
        if spec.layer is not None and not stays_float(layer) and inputs % GROUPS[-1] == 0
    }
    fits = (all(inputs % size == 0 for inputs in inputs_of.values()) for size in GROUPS)
    floats = {layer for spec in specs for layer, _ in _matrices(spec)} - inputs_of.keys()
    work = _Work(
        specs=specs,
        layers=frozenset(inputs_of),
        group=next(itertools.compress(GROUPS, fits)),
        floats=sorted({"lm_head", *floats}),  # a tied head has its name, too
        bits=bits,
    )
    _check_readable(config, work)
    return work


def _check_readable(config: ModelConfig, work: _Work) -> None:
    """Raise ValueError if exkv could not load the folder that would be written."""
    try:
        unit_specs(replace(config, path=None, quantization=_settings(work)), torch.float32)
    except ValueError as error:
        raise ValueError(
            f"{config.path}: a folder of these integers couldn't be loaded "
            f"({str(error).removeprefix('None: ')}); turn the floats into integers at each load "
            f"instead, with --weights int{work.bits}"
        ) from None


def _settings(work: _Work) -> dict[str, Any]:
    return compressed_tensors.settings_of_packed(work.bits, work.group, work.floats)


def _matrices(spec: UnitSpec) -> Iterator[tuple[str, int]]:
    """Names of the unit's linear layers in the checkpoint, and their inputs."""
    for source in spec.sources:
        for name, tensor in source.stored.items():
            if len(tensor.shape) == 2:
                yield name.removesuffix(".weight"), tensor.shape[1]


def _write_weights(checkpoint: Checkpoint, work: _Work, out: Path) -> int:
    """Write a file for each unit, and their index -> bytes of all tensors."""
    left, total = set(checkpoint.names()), 0
    file_of: dict[str, str] = {}
    for place, (spec, made) in enumerate(zip(work.specs, work.rounded, strict=False)):
        names = {name for source in spec.sources for name in source.stored} & left
        last = place == len(work.specs) - 1
        tensors = _stored(checkpoint, work, sorted(left if last else names), made)
        left -= names
        if not tensors:
            continue
        file = f"model-{place + 1:05}-of-{len(work.specs):05}.safetensors"
        save_file(tensors, out / file, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        checkpoint.unmap()
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (out / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return total


def _calibrated(
    config: ModelConfig,
    checkpoint: Checkpoint,
    work: _Work,
    ids: torch.Tensor,
    device: torch.device,
    usage: dict[str, ExpertUsage],
) -> Iterator[Mapping[str, Rounded]]:
    """The matrices of each unit, rounded for what the text, ``ids``, gives them as inputs."""
    names = [_names_by_path(spec, work.layers) for spec in work.specs]

    def formats(unit: Unit) -> dict[str, GroupFormat]:
        return {
            path: GroupFormat(bits=work.bits, group=work.group, scale=_scale(checkpoint, name))
            for path, name in names[unit.index].items()
        }

    found = rounded_units(config, checkpoint, ids, formats, device, usage)
    return (
        {layers[path]: each for path, each in made.items()}
        for layers, made in zip(names, found, strict=False)
    )


def _names_by_path(spec: UnitSpec, layers: frozenset[str]) -> dict[str, str]:
    """The checkpoint's names of these layers, by the paths of their modules."""
    matrices = (matrix for source in spec.sources for matrix in source.matrices)
    return {matrix.layer: matrix.name for matrix in matrices if matrix.name in layers}


def _scale(checkpoint: Checkpoint, layer: str) -> torch.dtype:
    """In which the scales of a layer are stored."""
    dtype = checkpoint.info(f"{layer}.weight").dtype
    return dtype if dtype in SCALE_DTYPES else torch.float32


def _stored(
    checkpoint: Checkpoint, work: _Work, names: list[str], made: Mapping[str, Rounded]
) -> dict[str, torch.Tensor]:
    """These tensors, quantized if their layer is.

    Args:
        made: layers that are rounded already.
    """
    found = {}
    for name in names:
        layer, tensor = name.removesuffix(".weight"), checkpoint.tensor(name)
        if layer not in work.layers or layer == name:
            found[name] = tensor
            continue
        if not tensor.isfinite().all():
            raise ValueError(f"{checkpoint.info(name).file}: {name} has values that are not finite")
        values = made.get(layer)
        if values is None:
            values = rounded(tensor, work.bits, work.group, _scale(checkpoint, layer))
        stored = compressed_tensors.stored_as_packed(values, work.bits)
        found |= {f"{layer}.{part}": made for part, made in stored.items()}
    return found


def _write_config(folder: Path, work: _Work, out: Path) -> None:
    config = read_json_object(folder / "config.json")
    text = json.dumps({**config, "quantization_config": _settings(work)}, indent=2)
    (out / "config.json").write_text(text)

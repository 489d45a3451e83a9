"""``exkv quantize IN OUT``: write a folder of float weights as a compressed-tensors folder of
integers.

It works unit by unit, with at most one decoder layer in memory. The linear layers of decoder layers
are quantized; embedding, head, routers, norms and biases are not. Without a text each weight is
rounded by itself; with one, for the inputs that the text gives it: see
``exkv.loading.calibration``. ``--bits`` and ``--fit`` choose each matrix's bits
(``exkv.loading.mixes``), by what it loses on the text (``exkv.loading.calibrated_losses``). With
``--transform hadamard`` the matrices are those of transformed inputs (``exkv.weights.hadamard``).

A run that was ended goes on where it was: files that are there whole stay, and the text takes its
way through what they hold. What was asked for lies beside them until the folder is complete.

An OUT that ends in .gguf becomes a file of ggml's types: see ``quantize_gguf``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from exkv.cache import CACHES
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.checkpoint.files import read_json_object
from exkv.checkpoint.gguf.contents import SUFFIX
from exkv.checkpoint.safetensors import INDEX_NAME
from exkv.devices import resolve_devices
from exkv.errors import PlacementError
from exkv.loading.calibrated_losses import calibrated_losses_of
from exkv.loading.calibration import Found, calibration_rows, rounded_units
from exkv.loading.heat import with_usage
from exkv.loading.losses import FILE as LOSSES
from exkv.loading.mixes import Layers, Mixes, WrittenModel
from exkv.loading.usage import FILE as USAGE
from exkv.loading.usage import keep_counted, usage_of_rows
from exkv.models import Transformer, Unit
from exkv.models.expert_usage import ExpertUsage
from exkv.models.units import UnitSpec
from exkv.planning import CacheShape, Scenario, Workload, make_budgets
from exkv.sizes import human
from exkv.weights import GroupFormat, compressed_tensors
from exkv.weights.bits import SCALE_DTYPES
from exkv.weights.expert_groups import name_among, parsed
from exkv.weights.hadamard import HADAMARD, NONE, transformed
from exkv.weights.on_load import BITS, OPTIONS, class_of, options_of
from exkv.weights.rounding import Rounded, rounded

from .flags import count, sizes, text_of
from .picture import page_console
from .quantize_gguf import quantize_gguf

#: Beside the files: what was asked for, until all are written; and what was chosen.
PROGRESS, REPORT = "exkv-quantize.json", "exkv-mix.json"
#: Suffixes of files with weights in any form, and of files that are written anew.
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"),
    *(LOSSES, USAGE, PROGRESS, REPORT),
)
#: Arguments of ``--fit``.
_OF_PLAN = ("cpu", "max_seq_len", "cache", "draft", "reserve")
#: Of a file that is being written.
_PART = ".part"


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "quantize",
        help="write a model's weights as integers of 8 to 3 bits",
        description="Write a folder of float weights as a compressed-tensors folder, which exkv "
        "and transformers read. A run that was ended goes on when it is started again. Exit "
        "status: 0 done, 2 bad input.",
    )
    add = parser.add_argument
    add("model", metavar="IN", help="a checkpoint's folder, or a GGUF file, of floats")
    add(
        "out",
        metavar="OUT",
        help="the folder to write, new or empty, or one that was begun; or a file, OUT.gguf, of "
        "ggml's types (from a GGUF file, with --bits)",
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--weights", choices=BITS, help="integers to store, the same everywhere")
    how.add_argument(
        "--bits",
        type=float,
        metavar="N",
        help="a weight of the layers, with scales: the mix that loses least, such as 4.25; needs "
        "--calibration",
    )
    how.add_argument(
        "--fit",
        metavar="CARDS",
        help="such as 2x24G: the mix that loses least and fits them; needs --calibration",
    )
    add(
        "--calibration",
        type=text_of,
        metavar="FILE",
        help="a text, in the model's language, for whose inputs to round: less is lost, and it "
        "takes longer",
    )
    add(
        "--transform",
        choices=(HADAMARD, NONE),
        default=NONE,
        help="hadamard: store matrices times the Hadamard transform of their inputs, which go "
        "through it, too: less is lost at the same bits; for exkv and vLLM, as transformers reads "
        "no such folders (none)",
    )
    add("--device", default="cpu", help="where the text runs, such as cuda:0 (the default: cpu)")
    add("--cpu", metavar="SIZE", help="of host memory for what cards have no room for, for --fit")
    add("--max-seq-len", type=count, metavar="TOKENS", help="for --fit (the model's positions)")
    add("--cache", choices=list(CACHES), help="kind of cache, for --fit (fp16)")
    add("--draft", choices=["mtp"], help="leave room for the model's own head, too, for --fit")
    add("--reserve", type=sizes, metavar="SIZES", help="to leave free on each card, for --fit: 1G")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What to write, and how.

    Attributes:
        layers: the model's matrices; a file is written for each of its units.
        kept: unit's name -> one of ``on_load.OPTIONS``, or a mix.
        formats: of the matrices that become integers, by their names.
        rows: of the text, int64 (B, T); None without one.
        device: where it runs.
        usage: gets how often each expert is chosen, by the units' names.
    """

    checkpoint: Checkpoint
    layers: Layers
    kept: Mapping[str, str]
    formats: Mapping[str, GroupFormat]
    rows: torch.Tensor | None
    device: torch.device
    usage: dict[str, ExpertUsage] = field(default_factory=dict)

    @property
    def specs(self) -> list[UnitSpec]:
        return self.layers.specs

    def file(self, place: int) -> str:
        return f"model-{place + 1:05}-of-{len(self.specs):05}.safetensors"


def run(args: argparse.Namespace) -> int:
    folder, out = Path(args.model), Path(args.out)
    _check(args)
    if out.suffix == SUFFIX:
        return quantize_gguf(args)
    config = _floats_of(folder)
    with Checkpoint(folder) as checkpoint:
        layers = Layers.of(config, _scales(checkpoint), args.transform)
        checkpoint.expect(
            {n: t for spec in layers.specs for s in spec.sources for n, t in s.stored.items()},
            [name for spec in layers.specs for name in spec.unused],
        )
        _check_readable(layers)
        asked = _asked(args, checkpoint)
        begun = _begun(out, asked)
        (device,) = resolve_devices(args.device)
        rows = None if args.calibration is None else calibration_rows(config, args.calibration)
        mixes = None
        if args.weights is None:
            assert rows is not None  # checked
            losses = calibrated_losses_of(config, checkpoint, rows, args.transform)
            model = Transformer(config)
            usage = usage_of_rows(model, checkpoint, rows)
            losses = with_usage(losses, model, usage)
            mixes = Mixes(layers=layers, losses=losses, usage=usage)
        kept = begun or _kept(args, layers, mixes)
        work = _Work(
            checkpoint=checkpoint,
            layers=layers,
            kept=kept,
            formats=layers.formats(kept),
            rows=rows,
            device=device,
        )
        before = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
        with _whole_or_to_be_continued(out, {"asked": asked, "kept": dict(kept)}):
            after = _write_weights(work, out)
            _copy_others(folder, out)
            _write_config(folder, work, out)
            if mixes is not None:
                _report(mixes, kept, out)
    if rows is not None and work.usage:
        keep_counted(ModelConfig.from_pretrained(out), rows, work.usage)
    print(
        f"{out}: {len(work.formats)} layers in {_bits(work)} bits, {human(before)} -> "
        f"{human(after)}"
    )
    return 0


def _bits(work: _Work) -> str:
    options = {format.bits for format in work.formats.values()}
    return str(*options) if len(options) == 1 else f"{work.layers.bits(work.kept):.4g}"


# What is asked for ------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """Check what no other part of exkv would refuse."""
    if args.weights is None and args.calibration is None:
        given = "--bits" if args.fit is None else "--fit"
        raise ValueError(
            f"{given} chooses by what fewer bits cost on a text: give --calibration FILE, a text "
            "like those that the model is for"
        )
    of_plan = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OF_PLAN}
    if args.fit is None and (alone := [name for name, value in of_plan.items() if value]):
        raise ValueError(f"{alone[0]} is for --fit CARDS, which is not given")


def _floats_of(folder: Path) -> ModelConfig:
    config = ModelConfig.from_pretrained(folder)
    if config.path is None or config.path.is_file():
        raise ValueError(
            f"{config.path} is no folder of safetensors; give a folder of float weights, the one "
            "that the file was converted from"
        )
    if config.quantization is not None:
        raise ValueError(
            f"{config.path}: its weights are quantized already; give a folder of float weights"
        )
    return config


def _scales(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """In which the scales of a matrix are stored."""
    dtypes = {name: checkpoint.info(name).dtype for name in checkpoint.names()}
    return {
        name.removesuffix(".weight"): dtype if dtype in SCALE_DTYPES else torch.float32
        for name, dtype in dtypes.items()
    }


def _check_readable(layers: Layers) -> None:
    """Raise ValueError if exkv could not load the folder that would be written."""
    try:
        layers.units(layers.alike("int4"), torch.float32)
    except ValueError as error:
        raise ValueError(
            f"{layers.config.path}: a folder of these integers couldn't be loaded "
            f"({str(error).removeprefix('None: ')}); turn the floats into integers at each load "
            "instead, with --weights int4"
        ) from None


def _kept(args: argparse.Namespace, layers: Layers, mixes: Mixes | None) -> Mapping[str, str]:
    if mixes is None:
        return layers.alike(args.weights)
    if args.bits is not None:
        return mixes.at(args.bits)
    model = WrittenModel(mixes, mtp=args.draft is not None)
    kind = CACHES[args.cache or "fp16"]
    length = args.max_seq_len or layers.config.max_position_embeddings
    scenario = Scenario(
        workloads=(Workload.of(model, [CacheShape.planned(model, kind, length, 1)]),),
        budgets=tuple(make_budgets(args.fit, reserve=args.reserve, cpu=args.cpu or False)),
    )
    try:
        return mixes.fitting(scenario)
    except PlacementError as error:
        raise ValueError(f"--fit {args.fit}: {error}") from None


def _asked(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """What decides what is written."""
    names = ("weights", "bits", "fit", "transform", *_OF_PLAN)
    text = args.calibration
    if text is not None:
        text = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    asked = {name.replace("_", "-"): getattr(args, name) for name in names}
    return {"IN": checkpoint.fingerprint, **asked, "calibration": text}


def _begun(out: Path, asked: Mapping[str, Any]) -> Mapping[str, str] | None:
    """What units are kept as in a folder that was begun; None for a new one."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / PROGRESS).is_file():
        raise ValueError(f"{out} is there already, and not an empty folder: name a new one")
    begun = read_json_object(out / PROGRESS)
    before = begun.get("asked")
    before = before if isinstance(before, dict) else {}
    for name, value in asked.items():
        if before.get(name) != value:
            raise ValueError(
                f"{out} was begun with another {name if name == 'IN' else '--' + name} "
                f"({before.get(name)}, and now {value}): name a new folder, or delete this one"
            )
    kept: Mapping[str, str] = begun["kept"]
    return kept


@contextlib.contextmanager
def _whole_or_to_be_continued(out: Path, progress: Mapping[str, Any]) -> Iterator[None]:
    """Create the folder, with what is asked for beside the files until it is complete; empty it if
    the model can't be written so."""
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / PROGRESS, json.dumps(progress))
    try:
        yield
    except ValueError:
        for file in out.iterdir():
            file.unlink()
        raise
    (out / PROGRESS).unlink()


def _replace(file: Path, text: str) -> None:
    """Whole or not at all."""
    part = file.with_name(file.name + _PART)
    part.write_text(text)
    part.replace(file)


# Writing ----------------------------------------------------------------------------------------


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template, and all other files without weights."""
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name != "config.json":
            shutil.copy(file, out)


def _write_weights(work: _Work, out: Path) -> int:
    """Write a file for each unit, and their index -> bytes of all tensors."""
    for file in out.glob(f"*{_PART}"):
        file.unlink()
    left, total = set(work.checkpoint.names()), 0
    file_of: dict[str, str] = {}
    for place, (spec, made) in enumerate(zip(work.specs, _rounded(work, out), strict=False)):
        names = {name for source in spec.sources for name in source.stored} & left
        last = place == len(work.specs) - 1
        file = out / work.file(place)
        if file.exists():
            tensors = _tensors(file)
        else:
            tensors = _stored(work, sorted(left if last else names), made)
            if tensors:
                part = file.with_name(file.name + _PART)
                save_file(tensors, part, {"format": "pt"})
                part.replace(file)
        left -= names
        file_of |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        work.checkpoint.unmap()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    (out / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return total


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Of a file that was written before."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise OSError(f"{file} is damaged ({error}): delete it, and start again") from None


def _rounded(work: _Work, out: Path) -> Iterator[Mapping[str, Rounded]]:
    """The matrices of each unit that are rounded for what the text gives them as inputs, by their
    names; none without a text."""
    names = [
        {m.layer: m.name for s in spec.sources for m in s.matrices if m.name in work.formats}
        for spec in work.specs
    ]
    if work.rows is None:
        yield from ({} for _ in work.specs)
        return

    def formats(unit: Unit) -> dict[str, GroupFormat]:
        return {path: work.formats[name] for path, name in names[unit.index].items()}

    def known(unit: Unit) -> Found:
        file = out / work.file(unit.index)
        stored = _tensors(file) if names[unit.index] and file.exists() else {}
        return {
            path: compressed_tensors.rounded_of_packed(stored, name, work.formats[name])
            for path, name in names[unit.index].items()
            if stored
        }

    text = (work.rows, formats, work.device)
    found = rounded_units(work.layers.config, work.checkpoint, *text, known=known, usage=work.usage)
    for layers, made in zip(names, found, strict=False):
        yield {layers[path]: each for path, each in made.items()}


def _stored(work: _Work, names: list[str], made: Mapping[str, Rounded]) -> dict[str, torch.Tensor]:
    """These tensors, quantized if their layer is.

    Args:
        made: layers that are rounded already.
    """
    found, checkpoint = {}, work.checkpoint
    for name in names:
        layer, tensor = name.removesuffix(".weight"), checkpoint.tensor(name)
        format = work.formats.get(layer)
        if format is None or layer == name:
            found[name] = tensor
            continue
        if not tensor.isfinite().all():
            raise ValueError(f"{checkpoint.info(name).file}: {name} has values that are not finite")
        values = made.get(layer)
        if values is None:
            if format.hadamard:
                tensor = transformed(tensor.float(), format.hadamard)
            values = rounded(tensor, format.bits, format.group, format.scale)
        stored = compressed_tensors.stored_as_packed(values, format.bits)
        found |= {f"{layer}.{part}": made for part, made in stored.items()}
    return found


def _write_config(folder: Path, work: _Work, out: Path) -> None:
    config = read_json_object(folder / "config.json")
    settings = work.layers.settings(work.kept)
    text = json.dumps({**config, "quantization_config": settings}, indent=2)
    (out / "config.json").write_text(text)


# The report -------------------------------------------------------------------------------------


def _report(mixes: Mixes, kept: Mapping[str, str], out: Path) -> None:
    """Say what was chosen, and what more or fewer bits would lose; as JSON beside the files."""
    curve, chosen = mixes.curve(), _options(mixes.layers, kept)
    values = {
        "bits": mixes.layers.bits(kept),
        "loss": mixes.loss(kept),
        "curve": [{"bits": bits, "loss": loss} for bits, loss in curve],
        "matrices": chosen,
    }
    _replace(out / REPORT, json.dumps(values, indent=1))
    console = page_console()
    table = Table("matrices", *OPTIONS, title="layers, or groups of experts, in each way")
    ways: dict[str, list[str]] = {}
    for name, option in (pair for each in chosen.values() for pair in each.items()):
        ways.setdefault(parsed(name)[0], []).append(option)
    for name in sorted(ways):
        counted = Counter(ways[name])
        table.add_row(name, *(str(counted[option] or "") for option in OPTIONS))
    console.print(table)
    table = Table("bits a weight", "predicted loss, nats a token", title="what other bits lose")
    for bits, loss in curve:
        table.add_row(f"{bits:.2f}", f"{loss:.2g}")
    console.print(table)
    console.print(
        f"Chosen: {values['bits']:.4g} bits a weight, {values['loss']:.2g} nats a token.",
        highlight=False,
    )


def _options(layers: Layers, kept: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Unit's name -> class of matrices, or group of experts -> option."""
    found: dict[str, dict[str, str]] = {}
    options = {unit: options_of(each) for unit, each in kept.items()}
    name_of = {unit: name_among(each) for unit, each in options.items()}
    for layer, matrix in layers.matrices.items():
        of, plain = options[matrix.unit], class_of(layer)
        name = None if isinstance(of, str) else name_of[matrix.unit](plain, layer)
        option = of if isinstance(of, str) else of[name or plain]
        found.setdefault(matrix.unit, {})[name or plain] = option
    return found

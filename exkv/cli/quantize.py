"""``exkv quantize IN OUT``: write a folder of float weights as a compressed-tensors folder of
integers.

It works unit by unit, with at most one decoder layer in memory. The linear layers of decoder layers
are quantized; embedding, head, routers, norms and biases are not. Without a calibration text, each
weight is rounded by itself; with one, to preserve outputs for the text's inputs: see
``exkv.loading.calibration``. ``--bits`` and ``--fit`` choose each matrix's bits
(``exkv.loading.mixes``) by its loss on the text (``exkv.loading.calibrated_losses``). With
``--transform hadamard``, matrices are stored for transformed inputs (``exkv.weights.hadamard``).

An interrupted run can be continued: complete files stay, and calibration runs through their
weights. The options are stored beside them until the folder is complete.

If OUT ends in .gguf, it becomes a file of ggml's types: see ``quantize_gguf``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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
from exkv.loading.calibration import ROWS, TOKENS, Found, calibration_rows, rounded_units
from exkv.loading.heat import with_usage
from exkv.loading.losses import FILE as LOSSES
from exkv.loading.mixes import Layers, Mixes, WrittenModel
from exkv.loading.usage import FILE as USAGE
from exkv.loading.usage import keep_counted, usage_of_rows
from exkv.models import Transformer, Unit
from exkv.models.expert_usage import ExpertUsage
from exkv.models.units import UnitSpec
from exkv.sizes import human
from exkv.weights import GroupFormat, compressed_tensors
from exkv.weights.bits import SCALE_DTYPES
from exkv.weights.choice import known
from exkv.weights.expert_groups import name_among, parsed
from exkv.weights.hadamard import HADAMARD, NONE, transformed
from exkv.weights.on_load import (
    BITS,
    INTEGERS,
    class_of,
    options_of,
)
from exkv.weights.rounding import Rounded, rounded
from exkv.weights.source import StoredMatrix

from .flags import count, sizes, text_of
from .picture import page_console, say
from .quantize_gguf import quantize_gguf, scenario_of

#: Files beside the weights: the options, until the folder is complete; and the chosen mix.
PROGRESS, REPORT = "exkv-quantize.json", "exkv-mix.json"
#: Suffixes of files with weights in any form, and of files that are rewritten.
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"),
    *(LOSSES, USAGE, PROGRESS, REPORT),
)
#: Arguments of ``--fit``.
_OF_PLAN = ("cpu", "max_seq_len", "cache", "draft", "reserve")
#: Suffix of incomplete files.
_PART = ".part"


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "quantize",
        help="write a model's weights as integers of 8 to 2 bits",
        description="Write a folder of float weights as a compressed-tensors folder, which exkv "
        "and transformers read. An interrupted run continues when it is started again. Exit "
        "status: 0 done, 2 invalid input.",
    )
    add = parser.add_argument
    add("model", metavar="IN", help="a checkpoint's folder, or a GGUF file, of float weights")
    add(
        "out",
        metavar="OUT",
        help="the folder to write: new, empty, or of an interrupted run; or OUT.gguf for a file of "
        "ggml's types, with --bits or --fit",
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--weights", choices=INTEGERS, help="one integer type for all layers")
    how.add_argument(
        "--bits",
        type=float,
        metavar="N",
        help="bits per weight of the layers, with scales, such as 4.25: the mix that loses least; "
        "needs --calibration",
    )
    how.add_argument(
        "--fit",
        metavar="CARDS",
        help="cards such as 2x24G: the mix that fits them and loses least; needs --calibration",
    )
    add(
        "--calibration",
        type=text_of,
        metavar="FILE",
        help="a text in the model's language to calibrate rounding with: it loses less, and takes "
        "longer",
    )
    add(
        "--calibration-rows",
        "-r",
        type=count,
        metavar="N",
        help=f"rows of {TOKENS} tokens of that text to use ({ROWS}, or as many as it fills)",
    )
    add(
        "--zero-points",
        action="store_true",
        default=None,
        help="with --bits or --fit: integers with a zero point for each group, too, where they "
        "lose less; for exkv and vLLM, not for transformers",
    )
    add(
        "--transform",
        choices=(HADAMARD, NONE),
        default=NONE,
        help="hadamard: apply the Hadamard transform to matrices and their inputs, which loses "
        "less at the same bits; for exkv and vLLM, not for transformers (none)",
    )
    add("--device", default="cpu", help="where calibration runs, such as cuda:0 (cpu)")
    add("--cpu", metavar="SIZE", help="with --fit: host memory to use for the rest")
    add(
        "--max-seq-len",
        type=count,
        metavar="TOKENS",
        help="with --fit: the cache's capacity (the model's positions)",
    )
    add("--cache", choices=list(CACHES), help="with --fit: kind of cache (fp16)")
    add("--draft", choices=["mtp"], help="with --fit: leave room for the model's own MTP head, too")
    add("--reserve", type=sizes, metavar="SIZES", help="with --fit: bytes to leave free: 1G")
    parser.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What to write, and how.

    Attributes:
        layers: the model's matrices; a file is written for each of its units.
        chosen: unit's name -> one of ``on_load.ALL_OPTIONS``, or a mix.
        formats: name of a matrix that is quantized -> its format.
        rows: calibration text, int64 (B, T); None without one.
        device: where calibration runs.
        usage: unit's name -> how often each expert is chosen; filled by calibration.
    """

    checkpoint: Checkpoint
    layers: Layers
    chosen: Mapping[str, str]
    rows: torch.Tensor | None
    device: torch.device
    usage: dict[str, ExpertUsage] = field(default_factory=dict)

    @property
    def specs(self) -> list[UnitSpec]:
        return self.layers.specs

    @functools.cached_property
    def formats(self) -> dict[str, GroupFormat]:
        return self.layers.formats(self.chosen)

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
        rows = None
        if args.calibration is not None:
            rows = calibration_rows(config, args.calibration, args.calibration_rows)
        mixes = None
        if args.weights is None:
            assert rows is not None  # checked
            integers = tuple(INTEGERS if args.zero_points else BITS)
            mixes = _mixes(config, checkpoint, layers, rows, args.transform, integers)
        chosen = begun or _choose(args, layers, mixes)
        work = _Work(checkpoint=checkpoint, layers=layers, chosen=chosen, rows=rows, device=device)
        before = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
        with _resumable(out, {"asked": asked, "kept": dict(chosen)}):
            after = _write_weights(work, out)
            _copy_others(folder, out)
            _write_config(folder, work, out)
            if mixes is not None:
                _report(mixes, chosen, out)
    if rows is not None and work.usage:
        keep_counted(ModelConfig.from_pretrained(out), rows, work.usage)
    options = {format.bits for format in work.formats.values()}
    bits = str(*options) if len(options) == 1 else f"{layers.bits(chosen):.4g}"
    print(f"{out}: {len(work.formats)} matrices in {bits} bits, {human(before)} -> {human(after)}")
    return 0


# Options ----------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """Check combinations of flags that no other code checks."""
    if args.weights is None and args.calibration is None:
        given = "--bits" if args.fit is None else "--fit"
        raise ValueError(
            f"{given} chooses by what fewer bits cost on a text: give --calibration FILE, a text "
            "typical of the model's use"
        )
    if args.calibration_rows is not None and args.calibration is None:
        raise ValueError("--calibration-rows is for --calibration FILE: give that too")
    if args.zero_points and args.weights is not None:
        raise ValueError(
            f"--zero-points is for --bits and --fit: give --weights {args.weights} alone, or one "
            "that ends in -asym"
        )
    of_plan = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OF_PLAN}
    if args.fit is None and (alone := [name for name, value in of_plan.items() if value]):
        raise ValueError(f"{alone[0]} is for --fit CARDS: give that too, or leave it out")


def _floats_of(folder: Path) -> ModelConfig:
    config = ModelConfig.from_pretrained(folder)
    if config.path is None or config.path.is_file():
        raise ValueError(
            f"{config.path} is not a folder of safetensors; give the folder of float weights from "
            "which it was converted"
        )
    if config.quantization is not None:
        raise ValueError(
            f"{config.path}: its weights are quantized already; give a folder of float weights"
        )
    return config


def _scales(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """Matrix -> the dtype in which its scales are stored."""
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
            f"({str(error).removeprefix('None: ')}); quantize the floats at each load instead, "
            "with --weights int4"
        ) from None


def _mixes(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layers: Layers,
    rows: torch.Tensor,
    transform: str,
    integers: Sequence[str],
) -> Mixes:
    """Measure what the matrices lose in each format, by the text's inputs and expert usage."""
    losses = calibrated_losses_of(config, checkpoint, rows, transform, integers)
    model = Transformer(config)
    usage = usage_of_rows(model, checkpoint, rows)
    return Mixes(layers=layers, losses=with_usage(losses, model, usage), usage=usage)


def _choose(args: argparse.Namespace, layers: Layers, mixes: Mixes | None) -> Mapping[str, str]:
    """Choose each unit's format -> unit's name -> one of ``on_load.ALL_OPTIONS``, or a mix."""
    if mixes is None:
        return layers.alike(args.weights)
    if args.bits is not None:
        return mixes.at(args.bits)
    model = WrittenModel(mixes, mtp=args.draft is not None)
    try:
        return mixes.fitting(scenario_of(args, model))
    except PlacementError as error:
        raise ValueError(f"--fit {args.fit}: {error}") from None


def _asked(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """The options that determine the output."""
    names = ("weights", "bits", "fit", "transform", "zero_points", "calibration_rows", *_OF_PLAN)
    text = args.calibration
    if text is not None:
        text = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    asked = {name.replace("_", "-"): getattr(args, name) for name in names}
    return {"IN": checkpoint.fingerprint, **asked, "calibration": text}


def _begun(out: Path, asked: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The units' formats in the folder of an interrupted run; None for a new folder."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / PROGRESS).is_file():
        raise ValueError(f"{out} exists already, and is not an empty folder: name a new one")
    begun = read_json_object(out / PROGRESS)
    before = begun.get("asked")
    before = before if isinstance(before, dict) else {}
    for name, value in asked.items():
        if before.get(name) != value:
            raise ValueError(
                f"{out} was begun with another {name if name == 'IN' else '--' + name} "
                f"({before.get(name)}, now {value}): name a new folder, or delete this one"
            )
    chosen: Mapping[str, str] = begun["kept"]
    return chosen


@contextlib.contextmanager
def _resumable(out: Path, progress: Mapping[str, Any]) -> Iterator[None]:
    """Create the folder, with ``progress`` in a file until it is complete; empty it if the model
    can't be written."""
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
    """Write a file atomically."""
    part = file.with_name(file.name + _PART)
    part.write_text(text)
    part.replace(file)


# Writing ----------------------------------------------------------------------------------------


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template, and all other files but weights."""
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
    """The tensors of a file that an interrupted run wrote."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise OSError(f"{file} is damaged ({error}): delete it and start again") from None


def _rounded(work: _Work, out: Path) -> Iterator[Mapping[str, Rounded]]:
    """Yield each unit's matrices, by name, rounded for the text's inputs; none without a text."""
    matrices = [
        [m for s in spec.sources for m in s.matrices if m.name in work.formats]
        for spec in work.specs
    ]
    if work.rows is None:
        yield from ({} for _ in work.specs)
        return

    def formats(unit: Unit) -> dict[str, GroupFormat]:
        return {each.layer: work.formats[each.name] for each in matrices[unit.index]}

    def known(unit: Unit) -> Found:
        file = out / work.file(unit.index)
        stored = _tensors(file) if matrices[unit.index] and file.exists() else {}
        return {
            each.layer: _part(stored, each, work.formats[each.name])
            for each in matrices[unit.index]
            if stored
        }

    text = (work.rows, formats, work.device)
    found = rounded_units(work.layers.config, work.checkpoint, *text, known=known, usage=work.usage)
    for stored, made in zip(matrices, found, strict=False):
        yield _whole([each for each in stored if each.layer in made], made)


def _part(stored: Mapping[str, torch.Tensor], matrix: StoredMatrix, format: GroupFormat) -> Rounded:
    """A matrix among packed tensors, which may be part of a stored one."""
    whole = compressed_tensors.rounded_of_packed(stored, matrix.name, format)
    return whole if matrix.rows is None else whole.map(matrix.rows)


def _whole(matrices: Sequence[StoredMatrix], made: Found) -> dict[str, Rounded]:
    """The matrices of the checkpoint by name, from those that a unit has."""
    parts: dict[str, list[StoredMatrix]] = {}
    for each in matrices:
        parts.setdefault(each.name, []).append(each)
    found = {}
    for name, several in parts.items():
        found[name] = joined = Rounded.joined(made[each.layer] for each in several)
        every = torch.arange(len(joined.codes))
        if places := [each.rows(every) for each in several if each.rows is not None]:
            order = torch.cat(places).argsort()
            found[name] = joined.map(itemgetter(order))
    return found


def _stored(work: _Work, names: list[str], made: Mapping[str, Rounded]) -> dict[str, torch.Tensor]:
    """These tensors, quantized if they have a format.

    Args:
        made: matrices that are rounded already.
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
            values = rounded(tensor, format.bits, format.group, format.scale, format.zeros)
        stored = compressed_tensors.stored_as_packed(values, format.bits)
        found |= {f"{layer}.{part}": made for part, made in stored.items()}
    return found


def _write_config(folder: Path, work: _Work, out: Path) -> None:
    config = read_json_object(folder / "config.json")
    settings = work.layers.settings(work.chosen)
    text = json.dumps({**config, "quantization_config": settings}, indent=2)
    (out / "config.json").write_text(text)


# The report -------------------------------------------------------------------------------------


def _report(mixes: Mixes, chosen: Mapping[str, str], out: Path) -> None:
    """Print the chosen mix and what more or fewer bits would lose; write both as JSON."""
    curve, matrices = mixes.curve(), _options(mixes.layers, chosen)
    values = {
        "bits": mixes.layers.bits(chosen),
        "loss": mixes.loss(chosen),
        "curve": [{"bits": bits, "loss": loss} for bits, loss in curve],
        "matrices": matrices,
    }
    _replace(out / REPORT, json.dumps(values, indent=1))
    console = page_console()
    counts: dict[str, Counter[str]] = {}
    for name, option in (pair for each in matrices.values() for pair in each.items()):
        counts.setdefault(parsed(name)[0], Counter())[option] += 1
    options = known(set().union(*counts.values()))
    table = Table("matrices", *options, title="layers, or groups of experts, by format")
    for name in sorted(counts):
        table.add_row(name, *(str(counts[name][option] or "") for option in options))
    console.print(table)
    table = Table("bits per weight", "predicted loss, nats per token", title="loss of other bits")
    for bits, loss in curve:
        table.add_row(f"{bits:.2f}", f"{loss:.2g}")
    console.print(table)
    say(
        console,
        f"Chosen: {values['bits']:.4g} bits per weight, {values['loss']:.2g} nats per token.",
    )


def _options(layers: Layers, chosen: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Unit's name -> class of matrices, or group of experts -> option."""
    found: dict[str, dict[str, str]] = {}
    options = {unit: options_of(each) for unit, each in chosen.items()}
    name_of = {unit: name_among(each) for unit, each in options.items()}
    for layer, matrix in layers.matrices.items():
        of, plain = options[matrix.unit], class_of(layer)
        name = None if isinstance(of, str) else name_of[matrix.unit](plain, layer)
        option = of if isinstance(of, str) else of[name or plain]
        found.setdefault(matrix.unit, {})[name or plain] = option
    return found

"""How long opening a model takes in each format of weights: what is repacked while it is read, and
what is mapped.

``python -m tests.bench load`` writes random checkpoints of one shape, floats and quantized ones
(packed as ``tests/packers`` has it, and GGUF files where ``gguf`` is installed), and opens each in
turn, every try in a process of its own (``load.py``). Files are in the page cache, so that no disk
is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .common import (
    DTYPES,
    SHAPES,
    Shape,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    rotated,
    write_checkpoint,
    write_outputs,
)
from .load import MODULE, ROOT

sys.path.insert(0, str(ROOT / "tests"))  # for the packers

FLOATS = "bf16"
#: Names of integers -> bits, in groups of 64.
INTEGERS = {"int8": 8, "int4": 4}
BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
KINDS = (FLOATS, *INTEGERS, *BLOCKS, "EXL2")
#: A figure of a try -> its heading.
SECONDS = {
    "load_seconds": "load, s",
    "load_processor_seconds": "of the processor, s",
    "first_forward_seconds": "then the first logits, s",
}


def write(folder: Path, kind: str, shape: Shape) -> Path:
    """A random checkpoint; what exkv opens of it."""
    if kind in BLOCKS:
        from .llamacpp import write_blocks

        folder.mkdir()
        return write_blocks(folder, shape, kind)
    plain = write_checkpoint(folder, shape, DTYPES["bf16"])
    if kind != FLOATS:
        _pack(plain, kind)
    return plain


def _pack(folder: Path, kind: str) -> None:
    """The floats in this folder as integers; layers of one size get the same ones."""
    from packers import Packed, Recipe, every_projection
    from packers import write as write_packed
    from packers.compressed import group, integers, settings
    from packers.exl2 import RECIPES, exl2

    made: dict[torch.Size, Packed] = {}

    def once(layer: str, weight: torch.Tensor) -> Packed:
        if weight.shape not in made:
            made[weight.shape] = pack(layer, weight.float())
        tensors, plain = made[weight.shape]
        return {name: tensor.clone() for name, tensor in tensors.items()}, plain

    def pack(layer: str, weight: torch.Tensor) -> Packed:
        if kind in INTEGERS:
            how: dict[str, Any] = {"group": 64, "sym": True, "packed": True, "act": False}
            return integers(layer, weight, bits=INTEGERS[kind], **how)
        groups = weight.shape[1] // 32
        return exl2(layer, weight, [(5, 32)] * (groups // 4) + [(4, 32)] * (groups - groups // 4))

    recipe = Recipe(settings=RECIPES["exl2"].settings, pack=once, takes=RECIPES["exl2"].takes)
    if kind in INTEGERS:
        grouped = group(num_bits=INTEGERS[kind], strategy="group", group_size=64)
        about = settings("pack-quantized", grouped)
        recipe = Recipe(settings=about, pack=once, takes=every_projection)
    config = json.loads((folder / "config.json").read_text())
    write_packed(folder, config, load_file(folder / "model.safetensors"), recipe)


def one_try(folder: Path) -> dict[str, float]:
    """``load.one_try``'s figures of exkv on the CPU."""
    command = [sys.executable, "-m", MODULE, "exkv", str(folder), "cpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(
    shape: Shape, kinds: Sequence[str], rounds: int
) -> tuple[dict[str, int], dict[str, dict[str, list[float]]]]:
    """Bytes of each kind's file; kind -> figure -> its values, one a round."""
    values: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        where = {kind: write(Path(scratch) / kind, kind, shape) for kind in kinds}
        sizes = {kind: _bytes(path) for kind, path in where.items()}
        for index in range(rounds):
            for kind in rotated(list(kinds), index):
                for figure, value in one_try(where[kind]).items():
                    values[kind].setdefault(figure, []).append(value)
    return sizes, values


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def as_text(sizes: dict[str, int], values: dict[str, dict[str, list[float]]], line: str) -> str:
    """A row for each kind; memory beside the file's bytes."""
    rows = []
    for kind, figures in values.items():
        private = [each / sizes[kind] for each in figures["private"]]
        texts = [Spread.of(figures[name]).text() for name in SECONDS]
        rows.append([kind, f"{sizes[kind] / 1e9:.2f}", *texts, Spread.of(private).text()])
    headings = ["", "GB", *SECONDS.values(), "private memory/file"]
    return f"{line}.\n\n{markdown(headings, rows)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench load", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.1B")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    add_outputs(parser)
    options = parser.parse_args(arguments)
    sizes, values = measure(SHAPES[options.shape], options.kinds, options.rounds)
    about = machine(torch.device("cpu"))
    text = as_text(sizes, values, machine_line(about))
    print(text)
    result = {"machine": about, "shape": options.shape, "bytes": sizes, "values": values}
    write_outputs(options, result, text)
    return 0

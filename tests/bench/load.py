"""What a user waits for before the first token: ``python -m tests.bench load``.

Imports and a plan beyond torch's own import; then opening a random model in each format of weights,
from the folder to the first logits, and transformers opening the floats. Checkpoints are packed as
``tests/packers`` has it; kinds of GGUF need the package ``gguf``. Every try is a process of its
own (``opening.py``). Files are in the page cache, so that no disk is measured. Where others use
the machine, the processor's seconds say more than the clock's.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .harness import ROOT, by_way, in_turns, markdown, ratios, seconds, setting, show, spread
from .shapes import DTYPES, SHAPES, Shape, write_checkpoint

FLOATS, PEER, TORCH = "bf16", "transformers bf16", "import torch"
#: Names of integers -> bits, in groups of 64.
INTEGERS = {"int8": 8, "int4": 4}
BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
KINDS = (FLOATS, *INTEGERS, *BLOCKS, "EXL2")
#: A config alone, of 80 layers in Llama 2 70B's sizes.
SEVENTY = Shape(
    vocab=32000, hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128
)
PLAN = "exkv plan, 80 layers"
#: A figure of a try -> its heading.
FIGURES = {
    **{"import": "import, s", "load": "load, s", "load_processor": "of the processor, s"},
    **{"first": "then the first logits, s", "second": "both again, s"},
}
MEMORY = {"peak": "peak", "private": "private", "device_peak": "device peak"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shape: str = setting("1.1B", choices=SHAPES)
    kinds: tuple[str, ...] = setting(KINDS, choices=KINDS)
    device: str = "cpu"
    rounds: int = 3


def write(folder: Path, kind: str, shape: Shape) -> Path:
    """Write a random checkpoint -> the path that exkv opens."""
    plain = write_checkpoint(folder, shape, DTYPES["bf16"])
    if kind in BLOCKS:
        from .llamacpp import write_gguf

        return write_gguf(plain, shape, kind=kind)
    if kind != FLOATS:
        _pack(plain, kind)
    return plain


def _pack(folder: Path, kind: str) -> None:
    """Quantize the folder's floats; layers of one size get the same integers."""
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


def run(words: Sequence[str], index: int) -> dict[str, float]:
    """A process's wall and CPU seconds, and the figures in its last line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done: list[subprocess.CompletedProcess[str]] = []
    how = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    how |= {"capture_output": True, "text": True}
    clock = seconds(lambda: done.append(subprocess.run([sys.executable, *words], **how)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done[0].returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done[0].stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = done[0].stdout.splitlines()[-1:]
    told = json.loads(last[0]) if last and last[0].startswith("{") else {}
    return {"process": clock, "processor": processor, **told}


def measure(settings: Settings) -> dict[str, Any]:
    """Program -> figure -> its values by round."""
    shape = SHAPES[settings.shape]
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(SEVENTY.config(DTYPES["bf16"])))
        plan = ["-m", "exkv", "plan", str(config), "--devices", "80G,80G,24G"]
        programs = {name: ["-c", name] for name in (TORCH, "import exkv")}
        programs[PLAN] = [*plan, "--max-seq-len", "4096"]
        where = {kind: write(Path(scratch) / kind, kind, shape) for kind in settings.kinds}
        opened = {f"exkv {kind}": ("exkv", place) for kind, place in where.items()}
        if FLOATS in where:
            opened[PEER] = ("transformers", where[FLOATS])
        for name, (engine, place) in opened.items():
            words = ("tests.bench.opening", engine, str(place), settings.device)
            programs[name] = ["-m", *words]
        sizes = {name: _bytes(place) for name, (_, place) in opened.items()}
        ways = {name: partial(run, words) for name, words in programs.items()}
        found = by_way(in_turns(ways, settings.rounds))
    values = {
        name: {key: [r[key] for r in rows] for key in rows[0]} for name, rows in found.items()
    }
    return {"bytes": sizes, "values": values}


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def report(result: dict[str, Any]) -> list[str]:
    """Two tables: imports and a plan beyond torch's import; opening, with memory by file size."""
    values, sizes = result["values"], result["bytes"]
    beyond = [[name] for name in ("import exkv", PLAN)]
    for row, figure in itertools.product(beyond, ("process", "processor")):
        pairs = zip(values[row[0]][figure], values[TORCH][figure], strict=True)
        row.append(show(spread([own - base for own, base in pairs])))
    opening = []
    for name, nbytes in sizes.items():
        own = values[name]
        row = [name, f"{nbytes / 1e9:.2f}", *(show(spread(own[key])) for key in FIGURES)]
        row += [f"{spread(own[key])['median'] / nbytes:.2f}" for key in MEMORY]
        opening.append(row + [show(ratios(_open(own), _open(values.get(PEER, own))))])
    headings = ["", "GB", *FIGURES.values(), *(f"{words}/file" for words in MEMORY.values())]
    return [
        "Beyond `import torch` (median, least and most of the rounds):",
        markdown(["", "by the clock, s", "of the processor, s"], beyond),
        f"Opening {result['settings']['shape']}, from the folder to the first logits, files in the "
        "page cache. Peak: growth of the process at its highest, mapped pages too; private: what "
        f"no file backs. By {PEER}: load and first logits together.",
        markdown([*headings, f"by {PEER}"], opening),
    ]


def _open(figures: dict[str, list[float]]) -> list[float]:
    """Load and first logits together: some loaders read at the first call."""
    return [sum(pair) for pair in zip(figures["load"], figures["first"], strict=True)]


QUICK = {"shape": "tiny", "kinds": (FLOATS, "int4"), "rounds": 1}

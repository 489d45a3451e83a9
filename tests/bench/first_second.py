"""What a user waits for before the first token: imports, a plan, and opening a model.

``python -m tests.bench first`` runs small programs in turn, each in a process of its own, and sets
them beside torch's import alone or beside transformers doing the same. The files are in the page
cache, so that no disk is measured. Where others use the machine too, the processor's seconds say
more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

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

ROOT = Path(__file__).resolve().parents[2]
#: A config alone, of 80 layers in Llama 2 70B's sizes.
SEVENTY = Shape(
    vocab=32000, hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128
)
_MARK = "figures:"
_WATCH = f"""
import json, time
def rss():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
def told(**figures):
    print("{_MARK}" + json.dumps(figures))
"""
_EXKV = (
    _WATCH
    + """
import torch
from exkv import Cache, Model
before = rss()
def opened():
    started = time.perf_counter()
    model = Model(FOLDER)
    cache = Cache(model, max_seq_len=64)
    model.load_autosplit(cache, devices=["cpu"])
    logits = model.forward(torch.tensor([[1]]), cache)
    return model, time.perf_counter() - started
model, first = opened()
peak = rss() - before
model.unload()
del model
model, second = opened()
told(first=first, second=second, peak=peak)
"""
)
_TRANSFORMERS = (
    _WATCH
    + """
import torch
from transformers import LlamaForCausalLM
before = rss()
def opened():
    started = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype="auto")
    with torch.no_grad():
        model(torch.tensor([[1]]), use_cache=True)
    return model, time.perf_counter() - started
model, first = opened()
peak = rss() - before
del model
model, second = opened()
told(first=first, second=second, peak=peak)
"""
)
_PLAN = """
import sys
from exkv.cli import main
sys.exit(main(["plan", FOLDER, "--devices", "80G,80G,24G", "--max-seq-len", "4096"]))
"""
#: Name -> program; the first is what the three behind it are set beside.
PROGRAMS = {
    "import torch": "import torch",
    "import exkv": "import exkv",
    "exkv plan, 80 layers": _PLAN,
    "exkv": _EXKV,
    "transformers": _TRANSFORMERS,
}


def run(name: str, folder: Path, config: Path) -> dict[str, float]:
    """One process: seconds by the clock and of the processor, and what it tells of itself."""
    where = config if name.startswith("exkv plan") else folder
    program = f"FOLDER = {str(where)!r}\n{PROGRAMS[name]}"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    figures = json.loads(told[-1].removeprefix(_MARK)) if told else {}
    return {"process": wall, "processor": processor, **figures}


def measure(shape: Shape, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Program -> figure -> its values, one a round; every round begins with another program."""
    values: dict[str, dict[str, list[float]]] = {name: {} for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "model", shape, DTYPES["bf16"])
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(SEVENTY.config(DTYPES["bf16"])))
        for index in range(rounds):
            for name in rotated(list(PROGRAMS), index):
                for figure, value in run(name, folder, config).items():
                    values[name].setdefault(figure, []).append(value)
    return values


def as_text(values: dict[str, dict[str, list[float]]], shape: str, line: str) -> str:
    """Two tables: beyond torch's import, and exkv beside transformers."""
    torch_alone = values["import torch"]
    beyond = []
    for name in ("import exkv", "exkv plan, 80 layers"):
        row = [name]
        for figure in ("process", "processor"):
            pairs = zip(values[name][figure], torch_alone[figure], strict=True)
            row.append(Spread.of([value - base for value, base in pairs]).text())
        beyond.append(row)
    weights = 2 * SHAPES[shape].parameters
    beside = []
    for name in ("exkv", "transformers"):
        own = values[name]
        row = [name, *(Spread.of(own[key]).text() for key in ("first", "second"))]
        row += [Spread.of(own["processor"]).text()]
        row += [Spread.of([peak / weights for peak in own["peak"]]).text()]
        beside.append(row)
    seconds = ["by the clock, s", "of the processor, s"]
    opening = ["first open to logits, s", "second, s", "whole process, processor s", "peak/weights"]
    return "\n\n".join(
        [
            f"{line}.",
            "Beyond `import torch` (median, least and most of the rounds):",
            markdown(["", *seconds], beyond),
            f"Opening {shape} in bf16 on the CPU, from the folder to the first logits; files warm:",
            markdown(["", *opening], beside),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench first", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="150M")
    parser.add_argument("--rounds", type=int, default=5)
    add_outputs(parser)
    options = parser.parse_args(arguments)
    values = measure(SHAPES[options.shape], options.rounds)
    about = machine(torch.device("cpu"))
    text = as_text(values, options.shape, machine_line(about)) + "\n"
    print(text)
    write_outputs(options, {"machine": about, "shape": options.shape, "values": values}, text)
    return 0

"""A decode step of this tree beside one of another checkout: ``python -m tests.bench bound OTHER``.

For every family and every kind of cache, in small sizes, where a step is the time between kernels,
and in SmolLM2-135M's. Two processes, one that imports exkv from each tree, are asked in turn. What
is compared is the processor's time of a thread, which says more than the clock where others use the
machine, too; the clock's is in the JSON.

OTHER has its native modules built. A case that it doesn't know is left empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exkv import CACHES, Model
from exkv.checkpoint.families import FAMILIES

from .harness import ROOT, in_turns, markdown, ratios, setting, show, spread
from .shapes import SHAPES, save_checkpoint, write_checkpoint

#: Reads cases, a line of JSON each; answers with the medians of a step's milliseconds.
_ASKED = """
import json, statistics, sys, time
import torch
from exkv import CACHES, Model

torch.set_num_threads(1)
models = {}

def loaded(folder, dtype):
    if (folder, dtype) not in models:
        models[folder, dtype] = Model(folder, dtype=getattr(torch, dtype))
        models[folder, dtype].load(devices=["cpu"])
    return models[folder, dtype]

def measured(folder, dtype, cache, rows, context, steps):
    model = loaded(folder, dtype)
    cache = CACHES[cache](model, max_seq_len=context + steps + 4, batch_size=rows)
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (rows, context), generator=made)
    model.forward(ids, cache, last_id_only=True)
    spent = []
    for step in range(steps + 3):
        started = time.process_time(), time.perf_counter()
        model.forward(ids[:, :1], cache, last_id_only=True)
        ended = time.process_time(), time.perf_counter()
        spent.append([1e3 * (b - a) for a, b in zip(started, ended)])
    return [statistics.median(each) for each in zip(*spent[3:])]  # the first are no steps yet

for line in sys.stdin:
    try:
        answer = measured(**json.loads(line))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a cache and a batch. ``model`` is a family in tiny sizes, or one of ``SHAPES``."""

    model: str
    cache: str = "fp16"
    rows: int = 1
    context: int = 32

    @property
    def name(self) -> str:
        batch = f", batch {self.rows}" if self.rows > 1 else ""
        return f"{self.model.removesuffix('ForCausalLM')} {self.cache} after {self.context}{batch}"


CASES = (
    *(Case(model=family) for family in FAMILIES),
    *(Case(model="LlamaForCausalLM", cache=kind) for kind in CACHES if kind != "fp16"),
    Case(model="LlamaForCausalLM", rows=8),
    *(Case(model="135M", cache=kind, context=16) for kind in ("fp16", "8bit", "4bit")),
    Case(model="135M", rows=8, context=16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    other: Path = setting(help="a checkout, built", positional=True)
    only: str = setting("", "cases whose name contains it")
    layers: int = setting(16, "of tiny models")
    steps: int = setting(20, "of a round")
    rounds: int = 5

    def __post_init__(self) -> None:
        if not (self.other / "exkv").is_dir():
            raise ValueError(f"{self.other} is no checkout of exkv: it has no folder exkv")
        if not self.cases:
            raise ValueError(f"--only {self.only}: no case's name contains it")

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if self.only in case.name]


# Models ---------------------------------------------------------------------------------------


def write_tiny(folder: Path, family: str, layers: int) -> None:
    """A random model of 128 wide layers in float32."""
    folder.mkdir(parents=True)
    config = {
        **{"architectures": [family], "model_type": FAMILIES[family].model_type},
        **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 224, "head_dim": 32},
        **{"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 8192, "dtype": "float32"},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    (folder / "config.json").write_text(json.dumps(config))
    made = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(like.shape, generator=made) * (0.1 if len(like.shape) > 1 else 1.0)
        for name, like in Model(folder).stored_tensors().items()
    }
    save_checkpoint(folder, config, tensors)


def written(folder: Path, case: Case, layers: int) -> tuple[Path, str]:
    """The case's checkpoint, shared by cases of one model, and its dtype."""
    place = folder / case.model
    if not place.exists() and case.model in SHAPES:
        write_checkpoint(place, SHAPES[case.model], torch.bfloat16)
    elif not place.exists():
        write_tiny(place, case.model, layers)
    return place, "bfloat16" if case.model in SHAPES else "float32"


# Measuring ------------------------------------------------------------------------------------


class Tree:
    """A process that has imported exkv from one tree."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", _ASKED]
        self._process = subprocess.Popen(command, cwd=root, env=environment, **pipes)

    def measured(self, case: dict[str, Any], index: int) -> list[float] | str:
        """Milliseconds of a step (CPU time, wall time), or why there are none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of a tree ended; what it said is above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def trees(other: Path) -> Iterator[dict[str, Tree]]:
    found = {BEFORE: Tree(other), AFTER: Tree(ROOT)}
    try:
        yield found
    finally:
        for tree in found.values():
            tree.close()


def measure(settings: Settings) -> dict[str, Any]:
    """A row for each case: each tree's times by round, and why a tree has none."""
    other, rows = settings.other.resolve(), []
    with tempfile.TemporaryDirectory() as scratch, trees(other) as asked:
        for case in settings.cases:
            folder, dtype = written(Path(scratch), case, settings.layers)
            what = {"folder": str(folder), "dtype": dtype, "cache": case.cache}
            what |= {"rows": case.rows, "context": case.context, "steps": settings.steps}
            row: dict[str, Any] = {"case": case.name, BEFORE: [], AFTER: [], "refused": {}}
            ways = {name: partial(tree.measured, what) for name, tree in asked.items()}
            for sample in in_turns(ways, settings.rounds):
                if isinstance(sample.value, str):
                    row["refused"][sample.way] = sample.value
                else:
                    row[sample.way].append(sample.value)
            rows.append(row)
            print(case.name, *row["refused"].items(), file=sys.stderr, flush=True)
    return {BEFORE: commit_of(other), AFTER: commit_of(ROOT), "rows": rows}


def report(result: dict[str, Any]) -> list[str]:
    """A table of CPU times."""
    cells = []
    for row in result["rows"]:
        before, after = ([spent[0] for spent in row[name]] for name in (BEFORE, AFTER))
        texts = [show(spread(values)) if values else "-" for values in (before, after)]
        both = len(before) == len(after) > 0
        cells.append([row["case"], *texts, show(ratios(before, after)) if both else "-"])
    text = (
        "One decode step, milliseconds of the processor, one thread: median (least..most) of "
        "{rounds} rounds, each the median of {steps} steps, the two trees asked in turn. Families "
        f"have {{layers}} layers of 128 in float32. Before is {result[BEFORE]}, after "
        f"{result[AFTER]}."
    )
    headings = ("a step of", BEFORE, AFTER, "times as fast")
    return [text.format(**result["settings"]), markdown(headings, cells)]


def commit_of(root: Path) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or root.name


QUICK = {"only": "Gemma2", "layers": 2, "steps": 2, "rounds": 2}

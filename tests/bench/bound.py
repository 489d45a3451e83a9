"""A decode step of this tree beside one of another checkout: ``python -m tests.bench bound OTHER``.

For every family and every kind of cache, in small sizes, where a step is the time between kernels,
and in SmolLM2-135M's. Two processes, one that imports exkv from each tree, are asked in turn, and
every round begins with the other one. What is compared is the processor's time of a thread, which
says more than the clock where others use the machine, too; the clock's is in the JSON.

OTHER has its native modules built. A case that it doesn't know is left empty.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exkv import CACHES, Model
from exkv.checkpoint.families import FAMILIES

from .common import (
    SHAPES,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_checkpoint,
    write_outputs,
)

ROOT = Path(__file__).resolve().parents[2]
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

def measured(folder, dtype, kind, rows, context, steps):
    model = loaded(folder, dtype)
    cache = CACHES[kind](model, max_seq_len=context + steps + 4, batch_size=rows)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a step is measured of. ``model`` is a family in tiny sizes, or one of ``SHAPES``."""

    model: str
    cache: str = "fp16"
    rows: int = 1
    context: int = 32

    @property
    def name(self) -> str:
        batch = f", batch {self.rows}" if self.rows > 1 else ""
        return f"{self.model.removesuffix('ForCausalLM')} {self.cache} after {self.context}{batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; tiny models have so many layers."""

    cases: tuple[Case, ...]
    layers: int
    steps: int
    rounds: int


FULL = Settings(
    cases=(
        *(Case(model=family) for family in FAMILIES),
        *(Case(model="LlamaForCausalLM", cache=kind) for kind in CACHES if kind != "fp16"),
        Case(model="LlamaForCausalLM", rows=8),
        *(Case(model="135M", cache=kind, context=16) for kind in ("fp16", "8bit", "4bit")),
        Case(model="135M", rows=8, context=16),
    ),
    layers=16,
    steps=20,
    rounds=5,
)
QUICK = Settings(
    cases=(Case(model="LlamaForCausalLM"), Case(model="Gemma2ForCausalLM", cache="8bit", rows=2)),
    layers=2,
    steps=2,
    rounds=2,
)


# Models ---------------------------------------------------------------------------------------


def write_tiny(folder: Path, family: str, layers: int) -> Path:
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
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def written(folder: Path, case: Case, layers: int) -> tuple[Path, str]:
    """The case's checkpoint, which several have in common, and its dtype."""
    place, dtype = folder / case.model, "bfloat16" if case.model in SHAPES else "float32"
    if not place.exists() and case.model in SHAPES:
        write_checkpoint(place, SHAPES[case.model], torch.bfloat16)
    elif not place.exists():
        write_tiny(place, case.model, layers)
    return place, dtype


# Measuring ------------------------------------------------------------------------------------


class Tree:
    """A process that has imported exkv from one tree."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ASKED],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measured(self, case: dict[str, Any]) -> list[float] | str:
        """Milliseconds of a step, of the processor and by the clock, or why there are none."""
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
    found = {"before": Tree(other), "after": Tree(ROOT)}
    try:
        yield found
    finally:
        for tree in found.values():
            tree.close()


def measure(other: Path, settings: Settings) -> list[dict[str, Any]]:
    """A row for each case: what each tree took, a value a round, and why one took nothing."""
    rows: list[dict[str, Any]] = [
        {"case": case.name, "before": [], "after": [], "refused": {}} for case in settings.cases
    ]
    with tempfile.TemporaryDirectory() as scratch, trees(other) as asked:
        for index in range(settings.rounds):
            print(f"round {index + 1} of {settings.rounds}", file=sys.stderr, flush=True)
            for case, row in zip(settings.cases, rows, strict=True):
                folder, dtype = written(Path(scratch), case, settings.layers)
                what = {"folder": str(folder), "dtype": dtype, "kind": case.cache}
                what |= {"rows": case.rows, "context": case.context, "steps": settings.steps}
                for name in rotated(list(asked), index):
                    answer = asked[name].measured(what)
                    if isinstance(answer, str):
                        row["refused"][name] = answer
                    else:
                        row[name].append(answer)
    return rows


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """The machine, and a table of the processor's time."""
    cells = []
    for row in result["rows"]:
        before, after = ([spent[0] for spent in row[name]] for name in ("before", "after"))
        texts = [Spread.of(values).text() if values else "-" for values in (before, after)]
        both = len(before) == len(after) > 0
        cells.append([row["case"], *texts, ratios(before, after).text() if both else "-"])
    about, settings = result["machine"], result["settings"]
    text = (
        f"{machine_line(about)}. One decode step, milliseconds of the processor, one thread: "
        f"median (least..most) of {settings['rounds']} rounds, each the median of "
        f"{settings['steps']} steps, the two trees asked in turn. Before is {result['before']}, "
        f"after {result['after']}. Families have {settings['layers']} layers of 128 in float32."
    )
    headings = ("a step of", "before", "after", "times as fast")
    return f"{text}\n\n{markdown(headings, cells)}\n"


def commit_of(root: Path) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or root.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench bound", description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER", help="a checkout, built")
    parser.add_argument("--quick", action="store_true", help="two cases: does the bench run?")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--rounds", type=int)
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if not (options.other / "exkv").is_dir():
        parser.error(f"{options.other} is no checkout of exkv: it has no folder exkv")
    settings = overridden(QUICK if options.quick else FULL, options)
    chosen = tuple(case for case in settings.cases if (options.only or "") in case.name)
    if not chosen:
        parser.error(f"--only {options.only}: no case's name contains it")
    other = options.other.resolve()
    rows = measure(other, overridden(settings, argparse.Namespace(cases=chosen)))
    result = {
        **{"machine": machine(torch.device("cpu")), "settings": asdict(settings)},
        **{"before": commit_of(other), "after": commit_of(ROOT), "rows": rows},
    }
    text = report(result)
    print(text)
    for row in rows:
        for name, why in row["refused"].items():
            print(f"{row['case']}: {name} can't: {why}", file=sys.stderr)
    write_outputs(options, result, text)
    return 0

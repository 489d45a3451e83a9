"""Where a step of the engine spends its time: ``python -m tests.bench step``.

One job, eight, and sixty-four decode greedily, all of them in every step. A step's time by the
clock is that of the native run (``exkv::bound_run``, which takes up to 16 rows), of the rest of the
model's call (Python, and for more rows the modules one by one), and of everything around the call:
choosing tokens, texts, pages, events.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exkv import Engine, Job, Model, PagedCache, SamplingParams

from .common import (
    DTYPES,
    SHAPES,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    write_checkpoint,
    write_outputs,
)
from .engine import Wordless

PROMPT, PAGE = 16, 32  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    shape: str = "150M"
    dtype: str = "bf16"
    jobs: tuple[int, ...] = (1, 8, 64)
    steps: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of one step: in the native run, in the model's call with it, in all."""

    native: float
    call: float
    whole: float


class Clock:
    """Seconds spent in a function since they were asked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._spent = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._function(*args, **options)
        finally:
            self._spent += time.perf_counter() - started

    def taken(self) -> float:
        """What was spent, from here on none."""
        spent, self._spent = self._spent, 0.0
        return spent


def measure(model: Model, jobs: int, settings: Settings) -> list[Step]:
    """So many jobs, once all of them decode."""
    # Each prompt takes a step, in which those before it decode.
    most = jobs + settings.steps + 2
    room = (-(-(PROMPT + most) // PAGE) + 1) * PAGE  # a job begins where there is one page more
    cache = PagedCache(model, max_seq_len=jobs * room, page=PAGE)
    made = torch.Generator().manual_seed(jobs)
    vocab = SHAPES[settings.shape].vocab
    found = []
    native = torch.ops.exkv.bound_run.default
    run, call = Clock(native), Clock(model.forward)
    torch.ops.exkv.bound_run.default, model.forward = run, call  # type: ignore[method-assign] # for the time being
    try:
        with Engine(model, cache, Wordless(), max_running=jobs) as engine:
            for _ in range(jobs):
                prompt = torch.randint(3, vocab, (PROMPT,), generator=made).tolist()
                engine.submit(
                    Job(prompt=prompt, settings=SamplingParams.greedy(), max_new_tokens=most)
                )
            for _ in range(jobs + 1):
                engine.iterate()
            run.taken(), call.taken()
            for _ in range(settings.steps):
                started = time.perf_counter()
                events = engine.iterate()
                whole = time.perf_counter() - started
                assert len(events) == jobs
                found.append(Step(native=run.taken(), call=call.taken(), whole=whole))
    finally:
        torch.ops.exkv.bound_run.default = native
        del model.forward
        cache.free()
        model.forget_cache(cache)
    return found


def measured(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as folder:
        dtype = DTYPES[settings.dtype]
        path = write_checkpoint(Path(folder), SHAPES[settings.shape], dtype)
        model = Model(path, max_input_len=256)
        model.load(devices=["cpu"])
        values = {
            str(jobs): [asdict(step) for step in measure(model, jobs, settings)]
            for jobs in settings.jobs
        }
        model.unload()
    about = machine(torch.device("cpu"))
    return {"machine": about, "settings": asdict(settings), "values": values}


def report(result: dict[str, Any]) -> str:
    """Markdown."""
    settings = result["settings"]
    rows = []
    for jobs, steps in result["values"].items():
        whole = statistics.median(step["whole"] for step in steps)
        python = Spread.of([(s["call"] - s["native"]) / s["whole"] * 100 for s in steps])
        around = Spread.of([(s["whole"] - s["call"]) / s["whole"] * 100 for s in steps])
        in_run = any(step["native"] for step in steps)
        beside = f"{python.text()} %" if in_run else "module by module"
        rows.append([jobs, f"{whole * 1e3:.1f}", beside, f"{around.text()} %"])
    headings = ["jobs", "step, ms", "of it in the call beside the native run", "around the call"]
    notes = [
        machine_line(result["machine"]),
        f"{settings['shape']} in {settings['dtype']}, greedy; median (least..most) of "
        f"{settings['steps']} steps in which every job has a token.",
        markdown(headings, rows),
    ]
    return "\n\n".join(notes) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench step", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the bench run?")
    add_outputs(parser)
    parser.add_argument("--shape", choices=tuple(SHAPES))
    parser.add_argument("--jobs", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args(arguments)
    settings = Settings(shape="tiny", jobs=(1, 3), steps=3) if options.quick else Settings()
    result = measured(overridden(settings, options))
    text = report(result)
    print(text)
    write_outputs(options, result, text)
    return 0

"""Jobs together beside the same jobs one after the other, or beside llama.cpp's slots:
``python -m tests.bench engine``.

Eight prompts of 512 tokens, of which 384 are the same, and 128 new tokens for each: once by an
engine that has all of them at once, once by one that gets a job when the last one has ended and
whose pages know nothing of it. New tokens per second by the clock and of the processor, and how
long a job waits for its first token once it is submitted. ``--shared 0`` has nothing in common.

``--ways together llama.cpp`` sets llama.cpp beside it, with the same weights and its slots
scheduled as its server does (``llamacpp.py``): one cache for all of them where prompts share a
beginning, as its header advises, and else one for each; in batches of ``--batch`` tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.decode import Event, Handle

from . import llamacpp
from .common import (
    DTYPES,
    SHAPES,
    MemoryProbe,
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

WAYS = ("together", "one by one")
PEER = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = "150M"
    dtype: str = "bf16"
    bits: int = 16
    jobs: int = 8
    prompt: int = 512
    shared: int = 384
    new: int = 128
    page: int = 128
    rounds: int = 5
    batch: int = 512
    ways: tuple[str, ...] = WAYS


class Wordless(Tokenizer):
    """No words and no end: random weights have neither."""

    eos_ids = ()

    def __init__(self) -> None:
        pass

    def stream(self, *args: Any, **options: Any) -> Any:
        return self

    def push(self, token: int, skip: bool = False) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All jobs once; seconds."""

    clock: float
    processor: float
    first: float  # median wait for a first token
    share: float | None = None  # of the memory's speed, while all jobs decode


def prompts(settings: Settings, seed: int) -> list[list[int]]:
    """Of random tokens, the first ones the same in all."""
    made = torch.Generator().manual_seed(seed)
    most = SHAPES[settings.shape].vocab
    common = torch.randint(3, most, (settings.shared,), generator=made).tolist()
    rest = settings.prompt - settings.shared
    return [
        common + torch.randint(3, most, (rest,), generator=made).tolist()
        for _ in range(settings.jobs)
    ]


def measure(model: Model, cache: PagedCache, settings: Settings, way: str, seed: int) -> Run:
    """One run; each engine begins with pages that know nothing."""
    greedy = SamplingParams.greedy()
    jobs = [
        Job(prompt=prompt, settings=greedy, max_new_tokens=settings.new)
        for prompt in prompts(settings, seed)
    ]
    batches = [jobs] if way == "together" else [[job] for job in jobs]
    waits: dict[Handle, float] = {}
    useful, decoding, probe = 0, 0.0, MemoryProbe(torch.device("cpu"))
    speed = probe()
    started = time.perf_counter(), time.process_time()
    for batch in batches:
        cache.free()  # the pool too
        with Engine(model, cache, Wordless(), max_running=settings.jobs) as engine:
            submitted = time.perf_counter()
            for job in batch:
                engine.submit(job)
            while engine.busy:
                before = time.perf_counter()
                events = engine.iterate()
                now = time.perf_counter()
                if len(events) == len(waits) == settings.jobs:
                    useful += read_by(events, settings)
                    decoding += now - before
                for event in events:
                    waits.setdefault(event.handle, now - submitted)
    ended = time.perf_counter(), time.process_time()
    speed = (speed + probe()) / 2
    return Run(
        clock=ended[0] - started[0],
        processor=ended[1] - started[1],
        first=statistics.median(waits.values()),
        share=useful / decoding / speed if decoding else None,
    )


def read_by(events: Sequence[Event], settings: Settings) -> int:
    """Bytes that a step reads in which all of these jobs decode: the weights once, and what each
    job has stored."""
    shape, tokens = SHAPES[settings.shape], 0
    for event in events:
        tokens += len(event.handle.prompt) + len(event.handle.tokens)
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * settings.bits // 8
    return shape.read_parameters * DTYPES[settings.dtype].itemsize + tokens * per_token


def measure_slots(slots: llamacpp.Slots, settings: Settings, seed: int) -> Run:
    """The same jobs in llama.cpp."""
    waits: dict[int, float] = {}
    started = time.perf_counter(), time.process_time()

    def told(slot: int) -> None:
        waits.setdefault(slot, time.perf_counter() - started[0])

    slots.run(prompts(settings, seed), settings.shared, settings.new, told)
    ended = time.perf_counter(), time.process_time()
    return Run(
        clock=ended[0] - started[0],
        processor=ended[1] - started[1],
        first=statistics.median(waits.values()),
    )


def slots_for(settings: Settings, folder: Path) -> llamacpp.Slots:
    """llama.cpp's, with the checkpoint in this folder."""
    llamacpp.write_gguf(folder, SHAPES[settings.shape])
    return llamacpp.Slots(
        folder / llamacpp.FILE,
        slots=settings.jobs,
        room=settings.prompt + settings.new,
        unified=settings.shared > 0,
        batch=settings.batch,
        threads=torch.get_num_threads(),
    )


def measured(settings: Settings) -> dict[str, list[Run]]:
    """Way -> its runs, one a round; every round begins with another way."""
    runs: dict[str, list[Run]] = {way: [] for way in settings.ways}
    short = replace(settings, prompt=32, shared=16 if settings.shared else 0, new=4)  # to warm up
    tokens = settings.jobs * (settings.prompt + settings.new + settings.page)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(
            Path(scratch) / "model", SHAPES[settings.shape], DTYPES[settings.dtype]
        )
        model = Model(folder)
        cache = PagedCache(model, max_seq_len=tokens, page=settings.page, nbits=settings.bits)
        model.load_autosplit(cache, devices=["cpu"])
        slots = slots_for(settings, folder) if PEER in settings.ways else None
        for index in range(settings.rounds + 1):
            what = settings if index else short
            for way in rotated(settings.ways, index):
                if way in WAYS:
                    runs[way].append(measure(model, cache, what, way, index))
                elif slots is not None:
                    runs[way].append(measure_slots(slots, what, index))
        if slots is not None:
            slots.close()
    return {way: each[1:] for way, each in runs.items()}  # the first round warms up


def as_text(runs: dict[str, list[Run]], settings: Settings, line: str) -> str:
    new = settings.jobs * settings.new
    speeds = {way: [new / run.clock for run in each] for way, each in runs.items()}
    shares = {
        way: [run.share for run in each if run.share is not None] for way, each in runs.items()
    }
    rows = [
        [
            way,
            Spread.of(speeds[way]).text(1),
            Spread.of([new / run.processor for run in runs[way]]).text(1),
            Spread.of([run.first for run in runs[way]]).text(),
            ratios(speeds[settings.ways[0]], speeds[way]).text(),
            "" if not shares[way] else Spread.of(shares[way]).text(),
        ]
        for way in settings.ways
    ]
    first = f"{settings.ways[0]} by it"
    headings = ["", "tokens/s", "tokens/processor s", "first token, s", first, "share"]
    about = (
        f"{settings.jobs} jobs, prompts of {settings.prompt} with {settings.shared} in common, "
        f"{settings.new} new tokens each; {settings.shape} in {settings.dtype}, cache of "
        f"{settings.bits} bits. Share: what a step has to read while all jobs decode, by what the "
        "memory probe reads a second before and after:"
    )
    return f"{line}.\n\n{about}\n\n{markdown(headings, rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--bits", type=int, choices=(16, 8, 4, 2))
    for name in ("jobs", "prompt", "shared", "new", "page", "rounds", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, PEER))
    add_outputs(parser)
    options = parser.parse_args(arguments)
    settings = Settings()
    if options.quick:
        settings = Settings(shape="tiny", jobs=2, prompt=40, shared=32, new=4, page=16, rounds=2)
    settings = overridden(settings, options)
    runs = measured(settings)
    about = machine(torch.device("cpu"))
    text = as_text(runs, settings, machine_line(about)) + "\n"
    print(text)
    values = {way: [asdict(run) for run in each] for way, each in runs.items()}
    result = {"machine": about, "settings": asdict(settings), "values": values}
    write_outputs(options, result, text)
    return 0

"""Stages beside one, each with one core: ``python -m tests.bench cluster``.

The same checkpoint twice in one process that has one core: whole, and as the first of ``--stages``
stages, the others of which are processes with a core each, on loopback. By turns: a long prompt in
chunks, jobs of an engine, and the decode steps of one sequence. What a stage more adds is what such
a step takes longer: a hop there, and the logits' way back.

Jobs are measured twice: with their prompts, and while all of them decode. How much two stages give
for the latter depends on what a step of half of the jobs takes beside one of all: as long as it
takes to read the weights, it takes the same, and nothing is gained. So it is said what one core
reads a second, and what all of them together do.

``--llama-cpp FOLDER`` sets llama.cpp's RPC with the same weights beside it, one endpoint and as
many as there are stages, each with a core (``cluster_rpc.py`` says how to build it).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exkv import Cache, Engine, Job, Model, PagedCache, SamplingParams
from exkv.cluster import Cluster
from exkv.cluster.host import SECRET
from exkv.planning import Plan

from . import cluster_rpc, llamacpp
from .engine import Wordless
from .harness import MemoryProbe, in_turns, markdown, ratios, seconds, setting, show, spread
from .shapes import DTYPES, SHAPES, write_checkpoint

ONE, STAGES = "one", "stages"
RPC_ONE, RPC_ALL = "llama.cpp, one endpoint", "llama.cpp, endpoints"
PROMPT, JOBS, DECODING, STEP = cluster_rpc.ROWS
#: Tokens behind which a decode step is measured.
SHORT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = setting("150M", choices=SHAPES)
    dtype: str = setting("bf16", choices=DTYPES)
    stages: int = 2
    prefill: int = 8192
    chunk: int = 512
    jobs: int = 8
    prompt: int = 512
    new: int = 64
    rounds: int = 3
    long: int = setting(1, "rounds that have the long prompt, which takes most of the time")
    llama_cpp: Path | None = setting(None, "the folder of llama.cpp's programs")

    def __post_init__(self) -> None:
        if len(os.sched_getaffinity(0)) < self.stages:
            raise ValueError(f"{self.stages} stages need a core each")


class Way:
    """A loaded model, and its measurements."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._settings = settings
        self.model = Model(folder, max_input_len=settings.chunk)
        self._cache = Cache(self.model, settings.prefill)
        tokens = settings.jobs * (settings.prompt + settings.new + 512)
        self._pages = PagedCache(self.model, tokens)

    def load_alone(self) -> list[float]:
        """Load on this machine -> a split by which stages have as many layers each."""
        self.model.load_autosplit(self._cache, last_id_only=True, devices=["cpu"])
        assert self.model.plan is not None
        return split_by_layers(self.model.plan, self._settings.stages)

    def load_over(self, cluster: Cluster, split: list[float]) -> None:
        cluster.spread(self.model)
        self.model.load(split)
        print(f"units by host: {list(self.model.host_map.values())}", file=sys.stderr)

    def measure(self, index: int) -> dict[str, float]:
        """One round: tokens a second of a prompt and of the jobs, and seconds of a decode step."""
        if index < 0:  # warms up
            return {STEP: self._decode()}
        long = {PROMPT: self._prefill(index)} if index < self._settings.long else {}
        jobs, decoding = self._run_jobs(index)
        return {**long, JOBS: jobs, DECODING: decoding, STEP: self._decode()}

    def _ids(self, seed: int, rows: int, tokens: int) -> Tensor:
        made = torch.Generator().manual_seed(seed)
        return torch.randint(3, SHAPES[self._settings.shape].vocab, (rows, tokens), generator=made)

    def _forward(self, ids: Tensor) -> Tensor:
        return self.model.forward(ids, self._cache, last_id_only=True)

    def _prefill(self, seed: int) -> float:
        self._cache.reset()
        ids = self._ids(seed, 1, self._settings.prefill)
        return ids.shape[1] / seconds(partial(self._forward, ids))

    def _decode(self) -> float:
        """Milliseconds of a step after a short text."""
        self._cache.reset()
        self._forward(self._ids(0, 1, SHORT))
        times, token = [], torch.tensor([[5]])
        for _ in range(self._settings.new):
            started = time.perf_counter()
            token = self._forward(token)[:, -1].argmax(-1, keepdim=True)
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times)

    def _run_jobs(self, seed: int) -> tuple[float, float]:
        """Tokens a second: prompts and new tokens in all, and new tokens while all jobs decode."""
        settings = self._settings
        prompts = self._ids(seed + 1000, settings.jobs, settings.prompt).tolist()
        options = {"settings": SamplingParams.greedy(), "max_new_tokens": settings.new}
        self._pages.free()  # what the last round stored would be found
        started = time.perf_counter()
        with Engine(self.model, self._pages, Wordless(), max_running=settings.jobs) as engine:
            handles = [engine.submit(Job(prompt=prompt, **options)) for prompt in prompts]
            while not all(handle.tokens for handle in handles):
                engine.iterate()
            if any(handle.done for handle in handles):
                raise ValueError("a job ends before all decode: give a larger --new")
            first, before = time.perf_counter(), sum(len(handle.tokens) for handle in handles)
            while not any(handle.done for handle in handles):
                engine.iterate()
            decoded = sum(len(handle.tokens) for handle in handles) - before
            decoding = decoded / (time.perf_counter() - first)
            while engine.busy:
                engine.iterate()
            took = time.perf_counter() - started
        return settings.jobs * (settings.prompt + settings.new) / took, decoding


def split_by_layers(plan: Plan, stages: int) -> list[float]:
    """Split a plan over one device into stages of as many layers each, in GB: layers take the time,
    and an embedding table takes none."""
    (ledger,) = (each for each in plan.ledgers if each.units)
    layers = [unit for unit in plan.units if unit.cache]
    layer = layers[0].weights + layers[0].cache
    each = (len(layers) // stages + 0.5) * layer + ledger.workspace
    first = each + plan.units[0].weights
    last = ledger.total + len(layers) * layer
    return [size / 2**30 for size in (first, *[each] * (stages - 2), last)]


def cluster_on(cores: Sequence[int], stack: ExitStack) -> Cluster:
    """A host on each of these cores, with one thread for its arithmetic."""
    left = iter(cores)

    def start(address: str, name: str, devices: str, secret: str) -> int:
        words = ["taskset", "-c", str(next(left)), sys.executable, "-m", "exkv", "cluster", "up"]
        environment = {**os.environ, SECRET: secret, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen([*words, address, "--name", name], env=environment)
        child.returncode = 0  # the cluster waits for it
        return child.pid

    return stack.enter_context(Cluster.local([""] * len(cores), timeout=600.0, start=start))


def measure(settings: Settings) -> dict[str, Any]:
    """What -> way -> a figure of each round, and what one core reads and what all together do, in
    bytes a second."""
    cores = sorted(os.sched_getaffinity(0))[: settings.stages]
    reads = _reads(len(cores)), _reads(1)  # and one thread from here on
    values: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "model"
        write_checkpoint(folder, SHAPES[settings.shape], DTYPES[settings.dtype])
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0]})  # before there are the wire's threads
        cluster = cluster_on(cores[1:], stack)
        one, over = Way(folder, settings), Way(folder, settings)
        over.load_over(cluster, one.load_alone())
        ways = {ONE: one.measure, STAGES: over.measure}
        if settings.llama_cpp:
            ways |= _beside(settings, folder, cores)
        for sample in in_turns(ways, settings.rounds, warm=1):
            for what, figure in sample.value.items():
                values.setdefault(what, {}).setdefault(sample.way, []).append(figure)
    return {"values": values, "reads": reads[::-1]}


def _reads(cores: int) -> float:
    torch.set_num_threads(cores)
    return MemoryProbe()()


def _beside(
    settings: Settings, folder: Path, cores: Sequence[int]
) -> dict[str, Callable[[int], dict[str, float]]]:
    """The same measured with llama.cpp, over one endpoint and over all."""
    llamacpp.write_gguf(folder, SHAPES[settings.shape])
    names = [field.name for field in fields(cluster_rpc.Sizes) if field.name != "short"]
    sizes = cluster_rpc.Sizes(short=SHORT, **{name: getattr(settings, name) for name in names})

    def measure(over: Sequence[int], index: int) -> dict[str, float]:
        if index < 0:
            return {}
        where = (settings.llama_cpp, folder / llamacpp.FILE)
        return cluster_rpc.measure(*where, over, sizes, long=index < settings.long)

    return {RPC_ONE: partial(measure, cores[:1]), RPC_ALL: partial(measure, cores)}


def report(result: dict[str, Any]) -> list[str]:
    values, settings, rows = result["values"], result["settings"], []
    pairs = [pair for pair in ((ONE, STAGES), (RPC_ONE, RPC_ALL)) if pair[0] in values[STEP]]
    for what, ways in values.items():
        row = [what]
        for one, more in pairs:
            row += [show(spread(ways[one]), 1), show(spread(ways[more]), 1)]
            row.append(show(ratios(ways[more], ways[one])))
        rows.append(row)
    adds = ["a stage more adds, ms"]
    for one, more in pairs:
        steps = zip(values[STEP][more], values[STEP][one], strict=True)
        adds += ["", show(spread([(a - b) / (settings["stages"] - 1) for a, b in steps])), ""]
    stages = settings["stages"]
    headings = ["", "one stage", f"{stages} stages", "by one stage's"]
    if len(pairs) > 1:
        headings += ["llama.cpp, one endpoint", f"{stages} endpoints", "by one's"]
    about = (
        "{shape} in {dtype}, one core a stage; a prompt of {prefill} in chunks of {chunk}, {jobs} "
        "jobs with prompts of {prompt} and {new} new tokens each. One core reads "
    )
    reads = "{:.1f} GB/s, and all together {:.1f}:".format(
        *(each / 1e9 for each in result["reads"])
    )
    beside = [] if len(pairs) > 1 else ["Without llama.cpp's RPC: --llama-cpp FOLDER adds it."]
    return [about.format(**settings) + reads, markdown(headings, [*rows, adds]), *beside]


QUICK = {
    **{"shape": "tiny", "prefill": 128, "chunk": 32, "jobs": 2, "prompt": 16, "new": 24},
    "rounds": 1,
}

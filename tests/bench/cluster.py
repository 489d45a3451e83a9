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

``--soak`` is something else: clients of a server over three stages, see ``cluster_soak.py``; so is
``--product``: every combination beside one machine, bit by bit, see ``cluster_product.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from exkv import Cache, Engine, Job, Model, PagedCache, SamplingParams
from exkv.cluster import Cluster
from exkv.cluster.host import SECRET
from exkv.planning import Plan

from . import cluster_product, cluster_rpc, cluster_soak, llamacpp
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
from .engine import Wordless

ONE, STAGES = "one", "stages"
RPC_ONE, RPC_ALL = "llama.cpp, one endpoint", "llama.cpp, endpoints"
PROMPT, JOBS, DECODING, STEP = cluster_rpc.ROWS
#: Tokens behind which a decode step is measured.
SHORT = 64
#: What is measured -> way -> a figure of each round.
Figures: TypeAlias = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens. ``long`` is in how many of the rounds the long prompt
    is, which takes most of the time."""

    shape: str = "150M"
    dtype: str = "bf16"
    stages: int = 2
    prefill: int = 8192
    chunk: int = 512
    jobs: int = 8
    prompt: int = 512
    new: int = 64
    rounds: int = 3
    long: int = 1


class Way:
    """A model that is loaded, with what is measured of it."""

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

    def warm_up(self) -> None:
        self._decode()

    def measure(self, seed: int) -> dict[str, float]:
        """One round: tokens a second of a prompt and of the jobs, and seconds of a decode step."""
        long = {PROMPT: self._prefill(seed)} if seed < self._settings.long else {}
        jobs, decoding = self._run_jobs(seed)
        return {**long, JOBS: jobs, DECODING: decoding, STEP: self._decode()}

    def _ids(self, seed: int, rows: int, tokens: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        return torch.randint(3, SHAPES[self._settings.shape].vocab, (rows, tokens), generator=made)

    def _prefill(self, seed: int) -> float:
        self._cache.reset()
        ids = self._ids(seed, 1, self._settings.prefill)
        started = time.perf_counter()
        self.model.forward(ids, self._cache, last_id_only=True)
        return ids.shape[1] / (time.perf_counter() - started)

    def _decode(self) -> float:
        """Milliseconds of a step behind a short text."""
        self._cache.reset()
        self.model.forward(self._ids(0, 1, SHORT), self._cache, last_id_only=True)
        times, token = [], torch.tensor([[5]])
        for _ in range(self._settings.new):
            started = time.perf_counter()
            logits = self.model.forward(token, self._cache, last_id_only=True)
            assert isinstance(logits, torch.Tensor)
            token = logits[:, -1].argmax(-1, keepdim=True)
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times)

    def _run_jobs(self, seed: int) -> tuple[float, float]:
        """Of prompts and new tokens, and of new ones from the last first one to the first end."""
        settings = self._settings
        prompts = self._ids(seed + 1000, settings.jobs, settings.prompt).tolist()
        greedy = SamplingParams.greedy()
        options = {"settings": greedy, "max_new_tokens": settings.new}
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
            seconds = time.perf_counter() - started
        return settings.jobs * (settings.prompt + settings.new) / seconds, decoding


def split_by_layers(plan: Plan, stages: int) -> list[float]:
    """GB for each stage, so that each has as many layers as the others of a plan over one device:
    these take the time, and an embedding table takes none."""
    (ledger,) = (each for each in plan.ledgers if each.units)
    layers = [unit for unit in plan.units if unit.cache]
    layer = layers[0].weights + layers[0].cache
    each = (len(layers) // stages + 0.5) * layer + ledger.workspace
    first = each + plan.units[0].weights
    last = ledger.total + len(layers) * layer
    return [size / 2**30 for size in (first, *[each] * (stages - 2), last)]


def on_core(core: int) -> Callable[[str, str, str, str], int]:
    """Starts a host that has this core, and one thread for its arithmetic."""

    def start(address: str, name: str, devices: str, secret: str) -> int:
        command = ["taskset", "-c", str(core), sys.executable, "-m", "exkv", "cluster", "up"]
        environment = {**os.environ, SECRET: secret, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen([*command, address, "--name", name], env=environment)
        child.returncode = 0  # the cluster waits for it
        return child.pid

    return start


def cluster_on(cores: Sequence[int], stack: ExitStack) -> Cluster:
    """A host on each of these cores."""
    left = iter(cores)
    return stack.enter_context(
        Cluster.local(
            [""] * len(cores), timeout=600.0, start=lambda *args: on_core(next(left))(*args)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of each round, and what one core reads and what all together do, in bytes a
    second."""

    figures: Figures
    reads: tuple[float, float]


def measured(settings: Settings, peer: cluster_rpc.Programs | None = None) -> Measured:
    """Every round begins with another way; the first one warms up, with a short prompt.

    Args:
        peer: llama.cpp's programs, if they are to be measured, too.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < settings.stages:
        raise ValueError(f"{settings.stages} stages need a core each, and there are {len(cores)}")
    cores = cores[: settings.stages]
    reads = _reads(1), _reads(len(cores))
    torch.set_num_threads(1)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = write_checkpoint(
            Path(scratch) / "model", SHAPES[settings.shape], DTYPES[settings.dtype]
        )
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0]})  # before there are the wire's threads
        cluster = cluster_on(cores[1:], stack)
        ways = {name: Way(folder, settings) for name in (ONE, STAGES)}
        ways[STAGES].load_over(cluster, ways[ONE].load_alone())
        print(f"units by host: {_spread(ways[STAGES].model)}", file=sys.stderr)
        rounds = {name: way.measure for name, way in ways.items()}
        if peer is not None:
            rounds |= _beside(settings, peer, folder, cores)
        for way in ways.values():
            way.warm_up()
        for index in range(settings.rounds):
            for name in rotated(list(rounds), index):
                print(f"round {index + 1}: {name}", file=sys.stderr)
                for what, figure in rounds[name](index).items():
                    found.setdefault(what, {}).setdefault(name, []).append(figure)
    return Measured(figures=found, reads=reads)


def _reads(cores: int) -> float:
    torch.set_num_threads(cores)
    return MemoryProbe(torch.device("cpu"))()


def _beside(
    settings: Settings, programs: cluster_rpc.Programs, folder: Path, cores: Sequence[int]
) -> dict[str, Callable[[int], dict[str, float]]]:
    """llama.cpp's ways of measuring the same: over one endpoint, and over all."""
    llamacpp.write_gguf(folder, SHAPES[settings.shape])
    names = [field.name for field in fields(cluster_rpc.Sizes) if field.name != "short"]
    sizes = cluster_rpc.Sizes(short=SHORT, **{name: getattr(settings, name) for name in names})

    def measure(over: Sequence[int], index: int) -> dict[str, float]:
        file, long = folder / llamacpp.FILE, index < settings.long
        return cluster_rpc.measure(programs, file, over, sizes, long=long)

    return {RPC_ONE: partial(measure, cores[:1]), RPC_ALL: partial(measure, cores)}


def _spread(model: Model) -> dict[str, int]:
    hosts = list(getattr(model, "host_map", {}).values())
    return {host: hosts.count(host) for host in dict.fromkeys(hosts)}


def as_text(found: Measured, settings: Settings, line: str) -> str:
    pairs = [(ONE, STAGES), (RPC_ONE, RPC_ALL)]
    pairs = [pair for pair in pairs if pair[0] in found.figures[STEP]]
    rows = [
        [what, *(cell for pair in pairs for cell in _cells(ways, *pair))]
        for what, ways in found.figures.items()
    ]
    adds = ["a stage more adds, ms"]
    for less, more in pairs:
        steps = zip(*(found.figures[STEP][way] for way in (more, less)), strict=True)
        each = [(a - b) / (settings.stages - 1) for a, b in steps]
        adds += ["", Spread.of(each).text(), ""]
    headings = ["", "one stage", f"{settings.stages} stages", "by one stage's"]
    if len(pairs) > 1:
        headings += ["llama.cpp, one endpoint", f"{settings.stages} endpoints", "by one's"]
    one, all_of_them = (each / 1e9 for each in found.reads)
    about = (
        f"{settings.shape} in {settings.dtype}, one core a stage; a prompt of {settings.prefill} "
        f"in chunks of {settings.chunk}, {settings.jobs} jobs with prompts of {settings.prompt} "
        f"and {settings.new} new tokens each. One core reads {one:.1f} GB/s, and "
        f"{settings.stages} together {all_of_them:.1f}:"
    )
    beside = "" if len(pairs) > 1 else "\n\nWithout llama.cpp's RPC: --llama-cpp FOLDER adds it."
    return f"{line}.\n\n{about}\n\n{markdown(headings, [*rows, adds])}{beside}"


def _cells(ways: dict[str, list[float]], one: str, more: str) -> list[str]:
    ratio = ratios(ways[more], ways[one])
    return [Spread.of(ways[one]).text(1), Spread.of(ways[more]).text(1), ratio.text()]


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[2:] if arguments is None else list(arguments)
    if "--soak" in words:
        words.remove("--soak")
        return cluster_soak.main(words)
    if words == ["--product"]:
        return cluster_product.main()
    parser = argparse.ArgumentParser(prog="python -m tests.bench cluster", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES)
    for name in ("stages", "prefill", "chunk", "jobs", "prompt", "new", "rounds", "long"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="of llama.cpp's programs")
    add_outputs(parser)
    options = parser.parse_args(words)
    settings = overridden(Settings(), options)
    peer = cluster_rpc.Programs.of(options.llama_cpp) if options.llama_cpp else None
    found = measured(settings, peer)
    about = machine(torch.device("cpu"))
    text = as_text(found, settings, machine_line(about)) + "\n"
    print(text)
    result = {"machine": about, "settings": asdict(settings), "values": found.figures}
    write_outputs(options, result | {"reads": found.reads}, text)
    return 0

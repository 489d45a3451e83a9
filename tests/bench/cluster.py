"""Stages beside one, each with one core: ``python -m tests.bench cluster``.

The same checkpoint twice in one process that has one core: whole, and as the first of ``--stages``
stages, the others of which are processes with a core each, on loopback. By turns: a long prompt in
chunks, jobs of an engine, and the decode steps of one sequence. What a hop adds is what such a step
takes longer, by the number of hops.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from exkv import Cache, Engine, Job, Model, PagedCache, SamplingParams
from exkv.cluster import Cluster
from exkv.cluster.host import SECRET

from . import cluster_product, cluster_soak
from .common import (
    DTYPES,
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
from .engine import Wordless

ONE, STAGES = "one", "stages"
#: What is measured -> way -> a figure of each round.
Figures: TypeAlias = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = "150M"
    dtype: str = "bf16"
    stages: int = 2
    prefill: int = 8192
    chunk: int = 512
    jobs: int = 8
    prompt: int = 512
    new: int = 64
    rounds: int = 5


class Way:
    """A model that is loaded, with what is measured of it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._settings = settings
        self.model = Model(folder, max_input_len=settings.chunk)
        self._cache = Cache(self.model, settings.prefill)
        tokens = settings.jobs * (settings.prompt + settings.new + 256)
        self._pages = PagedCache(self.model, tokens)

    def load_alone(self) -> list[float]:
        """Load on this machine -> a split by which stages have as much of it each."""
        self.model.load_autosplit(self._cache, last_id_only=True, devices=["cpu"])
        assert self.model.plan is not None
        return cluster_soak.split_evenly(self.model.plan, self._settings.stages)

    def load_over(self, cluster: Cluster, split: list[float]) -> None:
        cluster.spread(self.model)
        self.model.load(split)

    def measure(self, seed: int) -> dict[str, float]:
        """One round: tokens a second of a prompt and of the jobs, and seconds of a decode step."""
        return {
            "prompt, tokens/s": self._prefill(seed),
            "jobs, tokens/s": self._run_jobs(seed),
            "decode step, ms": self._decode(),
        }

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
        self._cache.crop(64)
        times, token = [], torch.tensor([[5]])
        for _ in range(self._settings.new):
            started = time.perf_counter()
            logits = self.model.forward(token, self._cache, last_id_only=True)
            assert isinstance(logits, torch.Tensor)
            token = logits[:, -1].argmax(-1, keepdim=True)
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times)

    def _run_jobs(self, seed: int) -> float:
        settings = self._settings
        prompts = self._ids(seed + 1000, settings.jobs, settings.prompt).tolist()
        greedy = SamplingParams.greedy()
        options = {"settings": greedy, "max_new_tokens": settings.new}
        self._pages.free()  # what the last round stored would be found
        started = time.perf_counter()
        with Engine(self.model, self._pages, Wordless(), max_running=settings.jobs) as engine:
            engine.run([Job(prompt=prompt, **options) for prompt in prompts])
        return settings.jobs * (settings.prompt + settings.new) / (time.perf_counter() - started)


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
        Cluster.local([""] * len(cores), start=lambda *args: on_core(next(left))(*args))
    )


def measured(settings: Settings) -> Figures:
    """Every round begins with another way; the first one warms up."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < settings.stages:
        raise ValueError(f"{settings.stages} stages need a core each, and there are {len(cores)}")
    torch.set_num_threads(1)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        shape, dtype = SHAPES[settings.shape], DTYPES[settings.dtype]
        folder = write_checkpoint(Path(scratch) / "model", shape, dtype)
        cluster = cluster_on(cores[1 : settings.stages], stack)
        os.sched_setaffinity(0, {cores[0]})
        stack.callback(os.sched_setaffinity, 0, set(cores))
        ways = {name: Way(folder, settings) for name in (ONE, STAGES)}
        ways[STAGES].load_over(cluster, ways[ONE].load_alone())
        print(f"units by host: {_spread(ways[STAGES].model)}", file=sys.stderr)
        for index in range(settings.rounds + 1):
            for name in rotated((ONE, STAGES), index):
                for what, figure in ways[name].measure(index).items():
                    found.setdefault(what, {}).setdefault(name, []).append(figure)
    return {what: {way: x[1:] for way, x in each.items()} for what, each in found.items()}


def _spread(model: Model) -> dict[str, int]:
    hosts = list(getattr(model, "host_map", {}).values())
    return {host: hosts.count(host) for host in dict.fromkeys(hosts)}


def as_text(found: Figures, settings: Settings, line: str) -> str:
    rows = [
        [
            what,
            Spread.of(ways[ONE]).text(1),
            Spread.of(ways[STAGES]).text(1),
            ratios(ways[STAGES], ways[ONE]).text(),
        ]
        for what, ways in found.items()
    ]
    steps = found["decode step, ms"]
    pairs = zip(steps[STAGES], steps[ONE], strict=True)
    hops = [(more - less) / settings.stages for more, less in pairs]  # the logits' way back is one
    rows.append(["a hop, ms", "", Spread.of(hops).text(), ""])
    about = (
        f"{settings.shape} in {settings.dtype}, one core a stage; a prompt of {settings.prefill} "
        f"in chunks of {settings.chunk}, {settings.jobs} jobs with prompts of {settings.prompt} "
        f"and {settings.new} new tokens each:"
    )
    headings = ["", "one stage", f"{settings.stages} stages", "by one stage's"]
    return f"{line}.\n\n{about}\n\n{markdown(headings, rows)}"


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
    for name in ("stages", "prefill", "chunk", "jobs", "prompt", "new", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    add_outputs(parser)
    options = parser.parse_args(words)
    settings = overridden(Settings(), options)
    found = measured(settings)
    about = machine(torch.device("cpu"))
    text = as_text(found, settings, machine_line(about)) + "\n"
    print(text)
    write_outputs(options, {"machine": about, "settings": asdict(settings), "values": found}, text)
    return 0

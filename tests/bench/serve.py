"""A server beside the engine alone, and beside llama.cpp's: ``python -m tests.bench serve``.

Eight clients ask at once for 128 tokens after prompts of 512, of which 384 are the same: of an
engine in this process, of ``exkv serve``, and of ``llama-server -np 8`` where ``--llama-server``
says where that is. All three read one GGUF file, whose random weights never end a text; one
generator of load asks both servers. New tokens per second by the clock, from the first request to
the last answer, the processor's time that whoever answers takes for it, and the steps of the
engine. ``--load`` is another
measurement: see ``serve_load.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer

from . import llamacpp, serve_load
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

ROOT = Path(__file__).parents[2]
WAYS = ("engine", "server", "llama.cpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = "150M"
    clients: int = 8
    prompt: int = 512
    shared: int = 384
    new: int = 128
    each: int = 1
    rounds: int = 5
    threads: int = 0
    llama_server: str = ""

    @property
    def room(self) -> int:
        """Tokens of a cache in which all jobs fit."""
        return self.clients * (-(-(self.prompt + self.new) // 256) + 1) * 256

    @property
    def tokens(self) -> int:
        """That a round writes."""
        return self.clients * self.each * self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All requests once; seconds by the clock and of the processor, tokens, and the median wait
    for a first part.

    Attributes:
        asking: seconds of the processor that the generator of load takes.
        steps, found: of the engine, and tokens of prompts that were in pages; 0 where they aren't
            told.
    """

    clock: float
    cpu: float
    tokens: int
    first: float
    asking: float = 0.0
    steps: int = 0
    found: int = 0


def prompts(settings: Settings, seed: int) -> list[list[int]]:
    """Of random tokens, the first ones the same in all of a round."""
    made = torch.Generator().manual_seed(seed)
    most = SHAPES[settings.shape].vocab
    low = llamacpp.FIRST_WORD
    common = torch.randint(low, most, (settings.shared,), generator=made).tolist()
    rest = settings.prompt - settings.shared
    return [
        common + torch.randint(low, most, (rest,), generator=made).tolist()
        for _ in range(settings.clients * settings.each)
    ]


def write_model(folder: Path, settings: Settings) -> Path:
    """A GGUF file of random weights in bf16, in which the end of a text is never the likeliest."""
    shape = SHAPES[settings.shape]
    write_checkpoint(folder, shape, torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    tensors[head][: llamacpp.FIRST_WORD] = 0  # of the control tokens, and single bytes
    save_file(tensors, file)
    llamacpp.write_gguf(folder, shape, words=True)
    file.unlink()
    return folder / llamacpp.FILE


# The three ways -------------------------------------------------------------------------------


class Alone:
    """An engine in this process, with a job for each client at a time."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self._model = Model(file, max_input_len=256)
        self._cache = PagedCache(self._model, max_seq_len=settings.room)
        self._model.load_autosplit(self._cache, last_id_only=True)
        self._engine = Engine(
            self._model, self._cache, Tokenizer(file), max_running=settings.clients
        )
        self._clients = settings.clients

    def run(self, asked: Sequence[Sequence[int]], new: int) -> Run:
        greedy = SamplingParams.greedy()
        left = [Job(prompt=ids, settings=greedy, max_new_tokens=new) for ids in asked]
        engine, tokens, begun, first = self._engine, 0, {}, {}
        steps, known = engine.stats.steps, engine.stats.found_tokens
        started, cpu = time.perf_counter(), time.process_time()
        handles = []
        for _ in range(self._clients):
            handles.append(engine.submit(left.pop(0)))
            begun[handles[-1]] = started
        while engine.busy:
            for each in engine.iterate():
                now = time.perf_counter()
                first.setdefault(each.handle, now - begun[each.handle])
                tokens += each.token is not None
                if each.reason and left:
                    handles.append(engine.submit(left.pop(0)))
                    begun[handles[-1]] = now
        clock, cpu = time.perf_counter() - started, time.process_time() - cpu
        return Run(
            clock=clock,
            cpu=cpu,
            tokens=tokens,
            first=statistics.median(first.values()),
            steps=engine.stats.steps - steps,
            found=engine.stats.found_tokens - known,
        )

    def close(self) -> None:
        self._engine.close()
        self._model.unload()


class Served:
    """A server in a process of its own, asked over HTTP."""

    def __init__(self, command: Callable[[int], list[str]], clients: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._clients = clients
        self._process = subprocess.Popen(
            command(self._port), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"{command(0)[0]} has ended: {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health"):
                    return
            except OSError:
                time.sleep(0.1)

    def run(self, asked: Sequence[Sequence[int]], new: int) -> Run:
        return asyncio.run(self._run(asked, new))

    async def _run(self, asked: Sequence[Sequence[int]], new: int) -> Run:
        left, found = list(asked), []

        async def client() -> None:
            while left:
                body = {"prompt": left.pop(0), "max_tokens": new, "temperature": 0}
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                found.append(await serve_load.ask(self._port, json.dumps(body).encode()))

        steps, known = self._counted()
        started, cpu, asking = time.perf_counter(), self._processor_seconds(), time.process_time()
        await asyncio.gather(*(client() for _ in range(self._clients)))
        clock, cpu = time.perf_counter() - started, self._processor_seconds() - cpu
        asking = time.process_time() - asking
        lost = [each for each in found if each.status != 200]
        if lost:
            raise RuntimeError(f"{len(lost)} of {len(found)} were not answered: {lost[0]}")
        first = statistics.median(each.first for each in found)
        now = self._counted()
        return Run(
            clock=clock,
            cpu=cpu,
            tokens=sum(each.tokens for each in found),
            first=first,
            asking=asking,
            steps=now[0] - steps,
            found=now[1] - known,
        )

    def _counted(self) -> tuple[int, int]:
        """Steps, and tokens of prompts that were found in pages, where the server tells."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0, 0
        figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("exkv_steps_total", "exkv_cached_tokens_total")
        steps, found = (int(figures.get(name, 0)) for name in names)
        return steps, found

    def _processor_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _ways(file: Path, settings: Settings, stack: ExitStack) -> dict[str, Alone | Served]:
    def exkv_serve(port: int) -> list[str]:
        words = [sys.executable, "-m", "exkv", "serve", str(file), "--port", str(port)]
        words += ["--max-seq-len", str(settings.room), "--max-running", str(settings.clients)]
        return words

    def llama_server(port: int) -> list[str]:
        words = [settings.llama_server, "-m", str(file), "--port", str(port), "-fa", "on"]
        words += ["-np", str(settings.clients), "-c", str(settings.room)]
        return words + (["-t", str(settings.threads)] if settings.threads else [])

    ways: dict[str, Alone | Served] = {"engine": Alone(file, settings)}
    stack.callback(ways["engine"].close)
    ways["server"] = Served(exkv_serve, settings.clients)
    stack.callback(ways["server"].close)
    if settings.llama_server:
        ways["llama.cpp"] = Served(llama_server, settings.clients)
        stack.callback(ways["llama.cpp"].close)
    return ways


def measured(settings: Settings) -> Iterator[dict[str, list[Run]]]:
    """Way -> its runs so far, after each round; every round begins with another way."""
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        file = write_model(Path(scratch) / "model", settings)
        ways = _ways(file, settings, stack)
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for way in ways.values():  # warms up
            way.run([ids[-40:] for ids in prompts(settings, 10_000)], 4)
        for index in range(settings.rounds):
            for name in rotated(tuple(ways), index):
                runs[name].append(ways[name].run(prompts(settings, index), settings.new))
            yield runs


# Results --------------------------------------------------------------------------------------


def as_text(runs: dict[str, list[Run]], settings: Settings, line: str) -> str:
    speeds = {way: [run.tokens / run.clock for run in each] for way, each in runs.items()}
    rows = [
        [
            way,
            Spread.of(speeds[way]).text(1),
            Spread.of([run.first for run in runs[way]]).text(),
            ratios(speeds[way], speeds["engine"]).text(),
            ratios(speeds["server"], speeds[way]).text(),
            Spread.of([1000 * run.cpu / run.tokens for run in runs[way]]).text(),
            Spread.of([1000 * run.asking / run.tokens for run in runs[way]]).text(),
            Spread.of([run.steps for run in runs[way]]).text(0),
            Spread.of([run.found for run in runs[way]]).text(0),
        ]
        for way in runs
    ]
    headings = ["", "tokens/s", "first part, s", "by the engine's", "the server by this"]
    headings += ["processor, ms a token", "asking, ms", "steps", "prompt tokens found"]
    about = (
        f"{settings.clients} clients, {settings.each} requests each, prompts of {settings.prompt} "
        f"with {settings.shared} in common, {settings.new} new tokens; {settings.shape} in bf16:"
    )
    return f"{line}.\n\n{about}\n\n{markdown(headings, rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[2:] if arguments is None else list(arguments)
    if "--load" in words:
        words.remove("--load")
        return serve_load.main(words)
    parser = argparse.ArgumentParser(prog="python -m tests.bench serve", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    for name in ("clients", "prompt", "shared", "new", "each", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--llama-server", help="llama.cpp's llama-server, built from its sources")
    add_outputs(parser)
    options = parser.parse_args(words)
    settings = overridden(Settings(), options)
    about, text = machine(torch.device("cpu")), ""
    told = asdict(settings) | {"llama_server": bool(settings.llama_server)}
    for runs in measured(settings):  # a run that is killed leaves the rounds that it had
        text = as_text(runs, settings, machine_line(about)) + "\n"
        values = {way: [asdict(run) for run in each] for way, each in runs.items()}
        write_outputs(options, {"machine": about, "settings": told, "values": values}, text)
        print(f"round {len(runs['engine'])} of {settings.rounds}", file=sys.stderr)
    print(text)
    return 0

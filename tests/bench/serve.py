"""A server beside the engine alone, and beside llama.cpp's: ``python -m tests.bench serve``.

Eight clients ask at once for 128 tokens after prompts of 512, of which 384 are the same: of an
engine in this process, of ``exkv serve``, and of ``llama-server -np 8`` where ``--llama-server``
says where that is. All three read one GGUF file, whose random weights never end a text; one
generator of load asks both servers. New tokens per second by the clock, from the first request to
the last answer, the processor's time that whoever answers takes for it, and the steps of the
engine. ``serve-load`` is another measurement: answers under load, each of them checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer

from . import llamacpp, serving
from .harness import in_turns, markdown, ratios, setting, show, spread
from .shapes import SHAPES, write_checkpoint

ENGINE, SERVER, PEER = "engine", "server", "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = setting("150M", choices=SHAPES)
    clients: int = 8
    prompt: int = 512
    shared: int = setting(384, "of a prompt, the same in all of a round")
    new: int = 128
    each: int = setting(1, "requests of a client")
    rounds: int = 5
    threads: int = setting(0, "0 for torch's own number")
    llama_server: str = setting("", "llama.cpp's llama-server, built from its sources")

    @property
    def room(self) -> int:
        """Tokens of a cache in which all jobs fit."""
        return self.clients * (-(-(self.prompt + self.new) // 256) + 1) * 256


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
    steps: float = 0
    found: float = 0


def prompts(settings: Settings, seed: int) -> list[list[int]]:
    """Of random tokens, the first ones the same in all of a round."""
    made = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, llamacpp.FIRST_WORD, SHAPES[settings.shape].vocab, generator=made)
    common = draw((settings.shared,)).tolist()
    rest = draw((settings.clients * settings.each, settings.prompt - settings.shared))
    return [common + row for row in rest.tolist()]


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
        model = Model(file, max_input_len=256)
        cache = PagedCache(model, max_seq_len=settings.room)
        model.load_autosplit(cache, last_id_only=True)
        self.engine = Engine(model, cache, Tokenizer(file), max_running=settings.clients)
        self._clients = settings.clients

    def run(self, asked: Sequence[Sequence[int]], new: int) -> Run:
        greedy, engine = SamplingParams.greedy(), self.engine
        left = [Job(prompt=ids, settings=greedy, max_new_tokens=new) for ids in asked]
        tokens, begun, first = 0, {}, {}
        steps, known = engine.stats.steps, engine.stats.found_tokens
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._clients):
            begun[engine.submit(left.pop(0))] = started
        while engine.busy:
            for each in engine.iterate():
                now = time.perf_counter()
                first.setdefault(each.handle, now - begun[each.handle])
                tokens += each.token is not None
                if each.reason and left:
                    begun[engine.submit(left.pop(0))] = now
        return Run(
            clock=time.perf_counter() - started,
            cpu=time.process_time() - cpu,
            tokens=tokens,
            first=statistics.median(first.values()),
            steps=engine.stats.steps - steps,
            found=engine.stats.found_tokens - known,
        )


class Served:
    """A server, asked over HTTP."""

    def __init__(self, server: serving.Server, clients: int) -> None:
        self._server, self._clients = server, clients

    def run(self, asked: Sequence[Sequence[int]], new: int) -> Run:
        left, found = list(asked), []

        async def client() -> None:
            while left:
                body = {"prompt": left.pop(0), "max_tokens": new, "temperature": 0}
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                found.append(await serving.ask(self._server.port, json.dumps(body).encode()))

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(self._clients)))

        steps, known = self._counted()
        cpu, asking = self._server.processor_seconds(), time.process_time()
        started = time.perf_counter()
        asyncio.run(clients())
        clock = time.perf_counter() - started
        lost = [each for each in found if each.status != 200]
        if lost:
            raise RuntimeError(f"{len(lost)} of {len(found)} were not answered: {lost[0]}")
        now = self._counted()
        return Run(
            clock=clock,
            cpu=self._server.processor_seconds() - cpu,
            tokens=sum(each.tokens for each in found),
            first=statistics.median(each.first for each in found),
            asking=time.process_time() - asking,
            steps=now[0] - steps,
            found=now[1] - known,
        )

    def _counted(self) -> tuple[float, float]:
        """Steps, and tokens of prompts that were found in pages, where the server tells."""
        try:
            figures = self._server.figures()
        except OSError:
            return 0, 0
        return figures.get("exkv_steps_total", 0), figures.get("exkv_cached_tokens_total", 0)


def ways_of(file: Path, settings: Settings, stack: ExitStack) -> dict[str, Alone | Served]:
    clients, room = str(settings.clients), str(settings.room)

    def exkv_serve(port: int) -> list[str]:
        words = [sys.executable, "-m", "exkv", "serve", str(file), "--port", str(port)]
        return [*words, "--max-seq-len", room, "--max-running", clients]

    def llama_server(port: int) -> list[str]:
        words = [settings.llama_server, "-m", str(file), "--port", str(port), "-fa", "on"]
        words += ["-np", clients, "-c", room]
        return words + (["-t", str(settings.threads)] if settings.threads else [])

    def served(command: Callable[[int], list[str]]) -> Served:
        return Served(stack.enter_context(serving.running(command)), settings.clients)

    ways: dict[str, Alone | Served] = {ENGINE: Alone(file, settings)}
    stack.callback(ways[ENGINE].engine.close)
    ways[SERVER] = served(exkv_serve)
    if settings.llama_server:
        ways[PEER] = served(llama_server)
    return ways


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Way -> its runs so far, after each round."""
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        ways = ways_of(write_model(Path(scratch) / "model", settings), settings, stack)
        calls = {name: partial(_round, way, settings) for name, way in ways.items()}
        values: dict[str, list[Any]] = {name: [] for name in ways}
        for sample in in_turns(calls, settings.rounds, warm=1):
            values[sample.way].append(asdict(sample.value))
            if len({len(runs) for runs in values.values()}) == 1:
                yield {"values": values}


def _round(way: Alone | Served, settings: Settings, index: int) -> Run:
    asked = prompts(settings, index if index >= 0 else 10_000)
    return way.run(asked, settings.new) if index >= 0 else way.run([i[-40:] for i in asked], 4)


def report(result: dict[str, Any]) -> list[str]:
    values = result["values"]
    speeds = {way: [run["tokens"] / run["clock"] for run in runs] for way, runs in values.items()}
    rows = []
    for way, runs in values.items():
        row = [way, show(spread(speeds[way]), 1), show(spread([run["first"] for run in runs]))]
        row += [
            show(ratios(speeds[way], speeds[ENGINE])),
            show(ratios(speeds[SERVER], speeds[way])),
        ]
        row += [
            show(spread([1000 * r[key] / r["tokens"] for r in runs])) for key in ("cpu", "asking")
        ]
        rows.append(
            [*row, *(show(spread([r[key] for r in runs]), 0) for key in ("steps", "found"))]
        )
    headings = ["", "tokens/s", "first part, s", "by the engine's", "the server by this"]
    headings += ["processor, ms a token", "asking, ms", "steps", "prompt tokens found"]
    about = (
        "{clients} clients, {each} requests each, prompts of {prompt} with {shared} in common, "
        "{new} new tokens; {shape} in bf16:"
    )
    return [about.format(**result["settings"]), markdown(headings, rows)]


QUICK = {"shape": "tiny", "clients": 2, "prompt": 60, "shared": 40, "new": 8, "rounds": 2}

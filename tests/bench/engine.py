"""Jobs of an engine, several ways: ``python -m tests.bench engine``.

Eight prompts of 512 tokens, of which 384 are the same, and 128 new tokens for each: *together*, by
an engine that has all of them at once, and *one by one*, by one that gets a job when the last one
has ended and whose pages know nothing of it. New tokens per second by the clock and of the
processor, and how long a job waits for its first token. ``--shared 0`` has nothing in common.

``--ways together llama.cpp`` sets llama.cpp beside it, with the same weights and its slots
scheduled as its server does (``llamacpp.py``): one cache for all of them where prompts share a
beginning, as its header advises, and else one for each; in batches of ``--batch`` tokens.

``--ways together server`` sets ``exkv serve`` beside it, ``--ways together server llama-server
--llama-server PATH`` llama.cpp's server as well, each with as many clients as jobs. All read one
GGUF file then, whose random weights never end a text; processor time is that of whoever answers.

``--ways n-grams together --allowed 2`` sets proposed tokens (``exkv.NGrams``) beside none, on texts
that repeat themselves: random weights write such where all but a few tokens are forbidden, and
``--model FILE`` asks a real model to write a list again. The tokens are the same, which is checked.

While all jobs decode, a step's time by the clock is that of the native run (``exkv::bound_run``,
which takes up to 16 rows), of the rest of the model's call (Python, and for more rows the modules
one by one), and of everything around the call: choosing tokens, texts, pages, events.
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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exkv import Engine, Job, Model, NGrams, PagedCache, SamplingParams, Tokenizer
from exkv.decode import Event

from . import llamacpp, serving
from .harness import MemoryProbe, by_way, in_turns, markdown, ratios, setting, show, spread
from .shapes import DTYPES, SHAPES, Shape, write_checkpoint

TOGETHER, ALONE, NGRAMS, PEER = "together", "one by one", "n-grams", "llama.cpp"
SERVER, LLAMA_SERVER = "server", "llama-server"
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
WAYS = (TOGETHER, ALONE, NGRAMS, PEER, SERVER, LLAMA_SERVER)
QUESTION = (
    "Repeat this list of {} parts twice, word by word, and write nothing else:\n"
    + "\n".join(
        f"- {name} {number} {place}"
        for number, (name, place) in enumerate(
            {
                **{"apples": "in the red box", "lamps": "on the long shelf"},
                **{"keys": "under the old clock", "books": "beside the green door"},
                **{"coats": "behind the blue curtain", "maps": "inside the small drawer"},
            }.items(),
            3,
        )
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; sizes in tokens."""

    shape: str = setting("150M", choices=SHAPES)
    dtype: str = setting("bf16", choices=DTYPES)
    model: str = setting("", "a real model's folder or file, asked to write a list again")
    bits: int = setting(16, "of the cache")
    jobs: int = 8
    prompt: int = 512
    shared: int = setting(384, "of a prompt, the same in all")
    new: int = 128
    allowed: int = setting(0, "tokens that random weights may choose from; 0 for all")
    page: int = 128
    batch: int = setting(512, "tokens of one of llama.cpp's calls")
    proposed: int = setting(10, "tokens, by n-grams")
    longest: int = setting(3, "n-gram")
    rounds: int = 5
    ways: tuple[str, ...] = setting((TOGETHER, ALONE), "the first is set beside the others", WAYS)
    llama_server: str = setting("", "llama.cpp's llama-server, built from its sources")

    def __post_init__(self) -> None:
        if LLAMA_SERVER in self.ways and not self.llama_server:
            raise ValueError(f"--ways {LLAMA_SERVER} needs --llama-server, where it is")

    @property
    def served(self) -> bool:
        return bool({SERVER, LLAMA_SERVER} & {*self.ways})

    @property
    def room(self) -> int:
        """Tokens of a cache that holds all jobs."""
        pages = -(-(self.prompt + self.new) // self.page) + 1
        return self.jobs * (pages * self.page + (512 if self.model else 0))


class Wordless(Tokenizer):
    """A tokenizer without words or end tokens, for random weights."""

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
    """All jobs once.

    Attributes:
        clock, processor: seconds.
        first: seconds, the median wait for a first token.
        tokens: written by all jobs.
        asking: CPU seconds of a server's clients.
        steps: seconds of the steps in which all jobs decode: in the native run, in the model's call
            with it, in all.
        share: of the memory's speed that these read.
        proposed, accepted: tokens.
    """

    clock: float
    processor: float
    first: float
    tokens: int
    asking: float = 0.0
    steps: tuple[float, float, float] = (0.0, 0.0, 0.0)
    share: float | None = None
    proposed: int = 0
    accepted: int = 0


def random_prompts(settings: Settings, seed: int) -> list[list[int]]:
    """Prompts of random tokens that share the first ones."""
    made = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, llamacpp.FIRST_WORD, SHAPES[settings.shape].vocab, generator=made)
    common = draw((settings.shared,)).tolist()
    rest = draw((settings.jobs, settings.prompt - settings.shared)).tolist()
    return [common + own for own in rest]


def write_served(folder: Path, shape: Shape) -> Path:
    """A GGUF file of random weights in bf16, in which the end of a text is never the likeliest."""
    write_checkpoint(folder, shape, torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    tensors[head][: llamacpp.FIRST_WORD] = 0  # of the control tokens, and single bytes
    save_file(tensors, file)
    llamacpp.write_gguf(folder, shape, words=True)
    file.unlink()
    return folder / llamacpp.FILE


class Clock:
    """A function, and the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.spent = function, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.function(*args, **options)
        finally:
            self.spent += time.perf_counter() - started


@contextmanager
def clocked(model: Model) -> Iterator[tuple[Clock, Clock]]:
    """Clock the native run and the model's call within the context."""
    native = torch.ops.exkv.bound_run.default
    clocks = Clock(native), Clock(model.forward)
    torch.ops.exkv.bound_run.default, model.forward = clocks  # type: ignore[method-assign]
    try:
        yield clocks
    finally:
        torch.ops.exkv.bound_run.default = native
        del model.forward


class Ours:
    """A new engine for each run, with empty pages."""

    def __init__(self, model: Path, settings: Settings) -> None:
        self.model, self.written = Model(model, max_input_len=256), {}
        worded = settings.model or settings.served
        self.tokenizer = Tokenizer(model) if worded else Wordless()
        how = {"page": settings.page, "nbits": settings.bits}
        self.cache = PagedCache(self.model, max_seq_len=settings.room, **how)
        self.model.load_autosplit(self.cache, devices=["cpu"])
        self.probe = MemoryProbe()

    def jobs(self, settings: Settings, seed: int) -> list[Job]:
        greedy = SamplingParams.greedy()
        if settings.allowed:
            allowed = {token: 1e4 for token in range(300, 300 + settings.allowed)}
            greedy = replace(greedy, token_bias=allowed)
        prompts = random_prompts(settings, seed)
        if settings.model:
            asked = (QUESTION.format(number + 2) for number in range(settings.jobs))
            chats = ([{"role": "user", "content": text}] for text in asked)
            prompts = [self.tokenizer.encode_chat(chat) for chat in chats]
        return [Job(prompt=ids, settings=greedy, max_new_tokens=settings.new) for ids in prompts]

    def run(self, settings: Settings, way: str, seed: int) -> Run:
        """All jobs one way."""
        jobs = self.jobs(settings, seed)
        how: dict[str, Any] = {"max_running": settings.jobs}
        if way == NGRAMS:
            how["ngrams"] = NGrams(tokens=settings.proposed, longest=settings.longest)
        waits, handles, read, steps = {}, [], 0, [0.0, 0.0, 0.0]
        proposed = accepted = 0
        limit, started = self.probe(), (time.perf_counter(), time.process_time())
        for batch in [[job] for job in jobs] if way == ALONE else [jobs]:
            self.cache.free()
            with (
                Engine(self.model, self.cache, self.tokenizer, **how) as engine,
                clocked(self.model) as clocks,
            ):
                submitted = time.perf_counter()
                handles += [engine.submit(job) for job in batch]
                while engine.busy:
                    before = (*(clock.spent for clock in clocks), time.perf_counter())
                    events = engine.iterate()
                    now = (*(clock.spent for clock in clocks), time.perf_counter())
                    if len(events) == len(waits) == settings.jobs:
                        read += read_by(events, settings)
                        steps = [s + b - a for s, a, b in zip(steps, before, now, strict=True)]
                    for event in events:
                        waits.setdefault(event.handle, now[-1] - submitted)
                proposed += engine.stats.proposed_tokens
                accepted += engine.stats.accepted_tokens
        ended, limit = (time.perf_counter(), time.process_time()), (limit + self.probe()) / 2
        tokens = [handle.tokens for handle in handles]
        if way in (TOGETHER, NGRAMS):
            assert self.written.setdefault(seed, tokens) == tokens, "proposals changed a token"
        known = steps[-1] and not settings.model and way != NGRAMS
        return Run(
            clock=ended[0] - started[0],
            processor=ended[1] - started[1],
            first=statistics.median(waits.values()),
            tokens=sum(len(handle.tokens) for handle in handles),
            steps=tuple(steps),
            share=read / steps[-1] / limit if known else None,
            proposed=proposed,
            accepted=accepted,
        )


def read_by(events: Sequence[Event], settings: Settings) -> int:
    """Bytes that a step reads in which all of these jobs decode: the weights once, and what each
    job has stored."""
    shape = SHAPES[settings.shape]
    tokens = sum(len(event.handle.prompt) + len(event.handle.tokens) for event in events)
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * settings.bits // 8
    return shape.read_parameters * DTYPES[settings.dtype].itemsize + tokens * per_token


class Slots:
    """llama.cpp's slots."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self.slots = llamacpp.Slots(
            file,
            slots=settings.jobs,
            room=settings.prompt + settings.new,
            unified=settings.shared > 0,
            batch=settings.batch,
            threads=torch.get_num_threads(),
        )

    def run(self, settings: Settings, way: str, seed: int) -> Run:
        waits: dict[int, float] = {}
        started = time.perf_counter(), time.process_time()
        tokens = self.slots.run(
            random_prompts(settings, seed),
            settings.shared,
            settings.new,
            lambda slot: waits.setdefault(slot, time.perf_counter() - started[0]),
        )
        ended = time.perf_counter(), time.process_time()
        clock, processor = ended[0] - started[0], ended[1] - started[1]
        first = statistics.median(waits.values())
        total = sum(map(len, tokens))
        return Run(clock=clock, processor=processor, first=first, tokens=total)


class Served:
    """A server, called over HTTP."""

    def __init__(self, server: serving.Server) -> None:
        self._server = server

    def run(self, settings: Settings, way: str, seed: int) -> Run:
        async def ask(ids: list[int]) -> serving.Answered:
            body = {"prompt": ids, "max_tokens": settings.new, "temperature": 0, "stream": True}
            body |= {"stream_options": {"include_usage": True}}
            return await serving.ask(self._server.port, json.dumps(body).encode())

        async def ask_all() -> list[serving.Answered]:
            return await asyncio.gather(*map(ask, random_prompts(settings, seed)))

        processor, asking = self._server.processor_seconds(), time.process_time()
        started = time.perf_counter()
        found = asyncio.run(ask_all())
        clock = time.perf_counter() - started
        if lost := [each for each in found if each.status != 200]:
            raise RuntimeError(f"{len(lost)} of {len(found)} were not answered: {lost[0]}")
        return Run(
            clock=clock,
            # A server is told its time in ticks: less than one counts as one.
            processor=max(self._server.processor_seconds() - processor, TICK),
            first=statistics.median(each.first for each in found),
            tokens=sum(each.tokens for each in found),
            asking=time.process_time() - asking,
        )


def command(way: str, file: Path, settings: Settings, port: int) -> list[str]:
    """A server's command line."""
    jobs, room = str(settings.jobs), str(settings.room)
    if way == SERVER:
        words = [sys.executable, "-m", "exkv", "serve", str(file), "--page", str(settings.page)]
        return [*words, "--port", str(port), "--max-seq-len", room, "--max-running", jobs]
    words = [settings.llama_server, "-m", str(file), "--port", str(port), "-fa", "on"]
    return [*words, "-np", jobs, "-c", room, "-t", str(torch.get_num_threads())]


def measure(settings: Settings) -> dict[str, Any]:
    """Way -> its runs, one a round; a shorter round warms up."""
    short = replace(settings, prompt=32, shared=16 if settings.shared else 0, new=4)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        shape, folder = SHAPES[settings.shape], Path(scratch) / "model"
        if settings.model:
            model = Path(settings.model)
        elif settings.served:
            model = write_served(folder, shape)
        else:
            model = write_checkpoint(folder, shape, DTYPES[settings.dtype])
        ours, ways = Ours(model, settings), {}
        for way in settings.ways:
            who: Any = ours
            if way in (SERVER, LLAMA_SERVER):
                words = partial(command, way, model, settings)
                who = Served(stack.enter_context(serving.running(words)))
            elif way == PEER:
                if model == folder:
                    llamacpp.write_gguf(folder, shape)
                who = Slots(folder / llamacpp.FILE, settings)
                stack.callback(who.slots.close)
            ways[way] = partial(_run, who, settings, short, way)
        runs = by_way(in_turns(ways, settings.rounds, warm=1))
    return {"values": {way: [asdict(run) for run in runs[way]] for way in settings.ways}}


def _run(who: Any, settings: Settings, short: Settings, way: str, index: int) -> Run:
    return who.run(settings if index >= 0 else short, way, index + 1)


def report(result: dict[str, Any]) -> list[str]:
    settings, values = result["settings"], result["values"]
    base = settings["ways"][0]
    first = _speeds(values[base], "clock"), _speeds(values[base], "processor")
    rows = []
    for way, runs in values.items():
        speeds = _speeds(runs, "clock"), _speeds(runs, "processor")
        row = [way, *(show(spread(each), 1) for each in speeds)]
        row += [show(spread([run["first"] for run in runs]))]
        row += [show(ratios(one, own)) for one, own in zip(first, speeds, strict=True)]
        shares = [run["share"] for run in runs if run["share"] is not None]
        proposed, accepted = (sum(run[key] for run in runs) for key in ("proposed", "accepted"))
        row.append(show(spread(shares)) if shares else "")
        rows.append(
            [*row, f"{accepted / proposed:.0%} of {proposed}" if proposed else "", *_of_step(runs)]
        )
    what = Path(settings["model"]).name or "{shape} in {dtype}".format(**settings)
    about = (
        "{jobs} jobs, prompts of {prompt} with {shared} in common, {new} new tokens each, cache of "
        f"{{bits}} bits; {what}. Share: what a step has to read while all jobs decode, by what the "
        "memory probe reads a second before and after. Right: of the proposed tokens. Last: of "
        "the time of a step in which all jobs decode:"
    )
    headings = ["", "tokens/s", "tokens/processor s", "first token, s", f"{base} by it"]
    headings += ["of the processor", "share", "right", "call beside the native run, %"]
    return [about.format(**settings), markdown([*headings, "around the call, %"], rows)]


def _speeds(runs: Sequence[dict[str, Any]], clock: str) -> list[float]:
    return [run["tokens"] / run[clock] for run in runs]


def _of_step(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Shares of a step's time: the call without the native run, and the rest of the step."""
    steps = [run["steps"] for run in runs if run["steps"][2]]
    if not steps:
        return ["", ""]
    beside = spread([100 * (call - native) / whole for native, call, whole in steps])
    in_run = any(native for native, _, _ in steps)
    around = spread([100 * (whole - call) / whole for _, call, whole in steps])
    return [show(beside) if in_run else "module by module", show(around)]


QUICK = {
    **{"shape": "tiny", "jobs": 2, "prompt": 40, "shared": 32, "new": 40, "page": 16},
    **{"rounds": 2, "allowed": 2, "ways": (TOGETHER, ALONE, NGRAMS)},
}

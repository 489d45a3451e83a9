"""A server under load: ``python -m tests.bench serve --load --seconds 120``.

Clients ask for completions of prompts from a list, a third of which begin alike. A fifth of the
answers are dropped in the middle, and bad requests come between. Every answer is compared with the
text that its request has alone, from an engine without a server; afterwards pages and memory are
counted. ``--scarce`` has six times more context asked for at once than there are pages, by answers
that grow over several pages and a fifth of which go before others, so that jobs are put away;
``--oom-every N`` has every so many calls of the model run out of memory, and at last the server is
killed and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.serve.requests import CompletionRequest

from .common import add_outputs, machine, machine_line, markdown, overridden, write_outputs

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo-model"
TEXT = "the key is in a kitchen and anna put the red ball where tom had a lamp on his table"
BAD = (
    b'{"prompt": "a", "top_p": 7}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": [[]]}',
    b"{",
    b'{"prompt": "a", "nothing": 1}',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the server; sizes in tokens.

    Attributes:
        words: further ones of the server's command line.
    """

    model: Path = DEMO
    seconds: float = 120.0
    clients: int = 64
    requests: int = 96
    prompt: int = 420
    new: int = 32
    max_running: int = 16
    tokens: int = 16_384
    page: int = 256
    scarce: float = 0.0
    oom_every: int = 0
    seed: int = 1
    words: tuple[str, ...] = ()

    @property
    def shared(self) -> int:
        """Tokens that a third of the prompts begin with."""
        return self.prompt * 2 // 3

    @property
    def longest(self) -> int:
        """Tokens of a request, at most, or a few more."""
        return self.shared + self.prompt // 4 + 8 + self.new

    @property
    def asked(self) -> int:
        """Tokens of the clients' requests, about; what they share counts once."""
        return self.shared + self.clients * (self.prompt // 8 + self.new * 5 // 8)

    @property
    def cache(self) -> int:
        """Tokens of the server's cache: where they are scarce, as little as this of what is asked
        for at once, and enough for one request."""
        tokens = max(self.asked / self.scarce, self.longest) if self.scarce else self.tokens
        return -int(-tokens // self.page) * self.page


@dataclass(slots=True)
class Outcome:
    """What came of it; ``waits``: kind of request -> seconds to the first part and to the end;
    ``resident``: the server's bytes, :data:`SAMPLES` times while it is under load."""

    counts: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)


# Requests, and what they bring alone ------------------------------------------------------------


def requests_of(load: Load) -> list[dict[str, Any]]:
    """Bodies of completions: greedy ones, and drawn ones with a seed. Where pages are scarce they
    go on to their last token, and some before others."""
    source, tokenizer, words = random.Random(load.seed), Tokenizer(load.model), TEXT.split()
    tokens_of_word = len(tokenizer.encode(TEXT)) / len(words)

    def text(tokens: float) -> str:
        return " ".join(source.choices(words, k=max(int(tokens / tokens_of_word), 1)))

    shared, found = text(load.shared), []
    for index in range(load.requests):
        own = text(source.randrange(3, max(load.prompt // 4, 4)))
        body = {"prompt": f"{shared} {own}" if index % 3 == 0 else own, "seed": index}
        body["max_tokens"] = source.randrange(load.new // 4 + 1, load.new + 1)
        body |= {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95}
        if load.scarce:
            ends = {str(token): -100 for token in tokenizer.eos_ids}
            body |= {"logit_bias": ends, "priority": int(index % 5 == 0)}
        found.append(body)
    return found


def kind_of(load: Load, index: int) -> str:
    """What its waits are counted as."""
    first = "before others, " if load.scarce and index % 5 == 0 else ""
    return first + ("shared beginning" if index % 3 == 0 else "own prompt")


def texts_alone(load: Load, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """One after the other, each by an engine that has nothing else."""
    model, tokenizer = Model(load.model, max_input_len=256), Tokenizer(load.model)
    tokens = -(-load.longest // load.page) * load.page
    cache = PagedCache(model, max_seq_len=tokens, page=load.page)
    model.load_autosplit(cache, last_id_only=True)
    usual = SamplingParams.recommended(load.model)
    texts = []
    with Engine(model, cache, tokenizer) as engine:
        for body in bodies:
            settings = CompletionRequest.model_validate(body).sampling(usual, tokenizer.encode)
            new = body["max_tokens"]
            job = Job(
                prompt=body["prompt"], settings=settings, max_new_tokens=new, seed=body["seed"]
            )
            texts += engine.run([job])
    model.unload()
    return texts


# The server -----------------------------------------------------------------------------------


class Server:
    """A server's process."""

    def __init__(self, load: Load, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        module = "tests.bench.faulty_server" if load.oom_every else "exkv"
        command = [sys.executable, "-m", module, "serve", str(load.model)]
        command += ["--port", str(self.port), "--max-seq-len", str(load.cache)]
        command += ["--max-running", str(load.max_running), "--max-jobs", "1024"]
        command += ["--page", str(load.page), *load.words]
        env = os.environ | {"EXKV_OOM_EVERY": str(load.oom_every), "PYTHONPATH": str(ROOT)}
        self._log = log.open("w")
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=self._log)
        self._wait(log)

    def _wait(self, log: Path) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except OSError:
                time.sleep(0.05)

    def figures(self) -> dict[str, float]:
        """Its metrics, by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def memory(self) -> int:
        """Resident bytes of its process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        return 0

    def kill(self) -> None:
        """At once, as the system would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._log.close()
        return code


@contextmanager
def server(load: Load) -> Iterator[Server]:
    """A server that runs, and has ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        found = Server(load, Path(folder) / "log")
        try:
            yield found
        finally:
            if found.process.poll() is None:
                found.kill()


# Clients --------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """Status, text, seconds to its first part and to its end, and new tokens, if it says so."""

    status: int
    text: str = ""
    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0


class _Reader(asyncio.Protocol):
    """Takes in what a server sends, and looks into it once all is there: whoever asks has the
    processors of the server that is measured, which it wakes for every event."""

    def __init__(self, drop_after: int) -> None:
        self.received = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0  # when the first event came
        self._left = drop_after

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter()
        if self._left > 0:
            self._left -= data.count(b"data: {")
            if self._left <= 0:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def ask(port: int, body: bytes, drop_after: int = -1) -> Answered:
    """What a request brings; it is dropped after so many events, -1 for never."""
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: _Reader(drop_after), "127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    head += "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    transport.write(head.encode() + body)
    try:
        await reader.ended
    finally:
        transport.close()
    seconds, first = time.perf_counter() - started, max(reader.first - started, 0.0)
    if drop_after >= 0:
        return Answered(0, first=first)
    lines = bytes(reader.received).splitlines() or [b"closed 0"]
    text, tokens = "", 0
    for line in lines:
        if line.startswith(b"data: {"):
            found = json.loads(line.removeprefix(b"data: "))
            if "error" in found:
                return Answered(500, str(found["error"])[:500])
            tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
            text += found["choices"][0]["text"] if found.get("choices") else ""
    return Answered(int(lines[0].split()[1]), text, first, seconds, tokens)


async def _client(
    number: int,
    port: int,
    until: float,
    load: Load,
    bodies: Sequence[dict[str, Any]],
    texts: Sequence[str],
    out: Outcome,
) -> None:
    source = random.Random(number)
    while time.monotonic() < until:
        index = source.randrange(len(bodies))
        data = json.dumps(bodies[index] | {"stream": True}).encode()
        if source.random() < 0.1:
            status, *_ = await ask(port, source.choice(BAD))
            out.counts["bad, refused" if 400 <= status < 500 else "bad, not refused"] += 1
        elif source.random() < 0.2:
            await ask(port, data, drop_after=source.randrange(1, 4))
            out.counts["dropped"] += 1
        else:
            _judge(out, await ask(port, data), texts[index], kind_of(load, index))


def _judge(out: Outcome, found: Answered, text: str, kind: str = "") -> None:
    status, said, first, whole, _ = found
    if status != 200:
        out.counts["lost"] += 1
        out.wrong.append(f"{status}: {said[:200]}")
    elif said != text:
        out.counts["wrong"] += 1
        out.wrong.append(f"{said[:80]!r} instead of {text[:80]!r}")
    else:
        out.counts["right"] += 1
        out.waits.setdefault(kind, []).append((first, whole))


async def _all_clients(
    found: Server, load: Load, bodies: Sequence[dict[str, Any]], texts: Sequence[str], out: Outcome
) -> None:
    until = time.monotonic() + load.seconds
    clients = (
        _client(number, found.port, until, load, bodies, texts, out)
        for number in range(load.clients)
    )
    watching = _watch(found, load.seconds / SAMPLES, out)
    for error in await asyncio.gather(*clients, watching, return_exceptions=True):
        if error is not None:
            out.counts["lost"] += 1
            out.wrong.append(repr(error)[:200])


async def _watch(found: Server, seconds: float, out: Outcome) -> None:
    """Whether its memory grows, and goes on to."""
    for _ in range(SAMPLES):
        await asyncio.sleep(seconds)
        out.resident.append(found.memory())


def _settled(found: Server) -> dict[str, float]:
    """Its metrics once no job is left, and the engine's next step has taken back the pages of those
    whose clients went away."""
    deadline = time.monotonic() + 120
    figures = found.figures()
    while (figures["exkv_jobs"] or leaked(figures)) and time.monotonic() < deadline:
        time.sleep(0.1)
        figures = found.figures()
    return figures


def run(load: Load) -> Outcome:
    """The load, and what is left of it in the server."""
    out, bodies = Outcome(), requests_of(load)
    texts = texts_alone(load, bodies)
    with server(load) as found:
        _warm(found, load, bodies, texts)
        before = found.memory()
        asyncio.run(_all_clients(found, load, bodies, texts, out))
        out.figures = _settled(found)
        out.figures |= {"memory_before": before, "memory_after": found.memory()}
        if found.end() != 0:
            out.counts["not ended by SIGTERM"] += 1
    return out


def _warm(
    found: Server, load: Load, bodies: Sequence[dict[str, Any]], texts: Sequence[str]
) -> None:
    """As many at once as there will be, so that buffers of all sizes are there."""
    few = replace(load, seconds=min(load.seconds / 6, 10.0))
    asyncio.run(_all_clients(found, few, bodies, texts, Outcome()))
    _settled(found)


def killed(load: Load) -> bool:
    """Whether a server that was killed under load starts again, has all pages, and is right."""
    bodies = requests_of(load)[:8]
    texts = texts_alone(load, bodies)

    async def under_load(found: Server) -> None:
        asks = [ask(found.port, json.dumps(b | {"stream": True}).encode()) for b in bodies]
        waiting = asyncio.gather(*asks, return_exceptions=True)
        while not found.figures()["exkv_jobs"]:
            await asyncio.sleep(0.01)
        found.kill()
        await waiting

    with server(load) as found:
        asyncio.run(under_load(found))
    out = Outcome()
    with server(load) as found:
        for body, text in zip(bodies, texts, strict=True):
            answer = asyncio.run(ask(found.port, json.dumps(body | {"stream": True}).encode()))
            _judge(out, answer, text)
        figures = _settled(found)
    return out.counts["right"] == len(bodies) and not leaked(figures)


def leaked(figures: dict[str, float]) -> int:
    """Pages that no job has and that are not there."""
    return int(figures["exkv_pages"] - figures["exkv_pages_available"])


# Results --------------------------------------------------------------------------------------

SHARES = (50, 90, 99, 100)
SAMPLES = 10  # of memory, while it is under load


def percentiles(seconds: Sequence[float]) -> list[float]:
    """Of :data:`SHARES`."""
    found = sorted(seconds) or [0.0]
    return [found[min(int(len(found) * share / 100), len(found) - 1)] for share in SHARES]


def waits_of(out: Outcome) -> list[tuple[str, int, list[float]]]:
    """Of each kind of request and of all, to the first part and to the end: how many, and the
    percentiles of their seconds."""
    kinds = dict(sorted(out.waits.items()))
    everything = {"all": [each for found in kinds.values() for each in found], **kinds}
    return [
        (f"{kind}: {what}", len(found), percentiles([each[at] for each in found]))
        for kind, found in everything.items()
        for at, what in enumerate(("first part, s", "whole answer, s"))
    ]


def as_text(load: Load, out: Outcome, restarted: bool | None) -> str:
    """Tables of what came, how long it took, and what is left."""
    figures = out.figures
    about = (
        f"{load.clients} clients for {load.seconds:g} s, {load.model.name}, a cache of "
        f"{load.cache:,} tokens in pages of {load.page}, {load.max_running} jobs at once"
        + (f", 1 / {load.asked / load.cache:.1f} of what is asked for" if load.scarce else "")
        + (f", every {load.oom_every}th call out of memory" if load.oom_every else "")
    )
    counts = ["right", "wrong", "lost", "dropped", "bad, refused", "bad, not refused"]
    rows = [[name, str(out.counts[name])] for name in counts]
    rows += [
        ["pages leaked", str(leaked(figures))],
        ["times that a job was put away", f"{figures['exkv_preemptions_total']:.0f}"],
        ["calls that ran out of memory", f"{figures['exkv_out_of_memory_total']:.0f}"],
        ["prompt tokens found in pages", f"{figures['exkv_cached_tokens_total']:.0f}"],
        ["new tokens", f"{figures['exkv_generated_tokens_total']:.0f}"],
        ["resident before, MiB", f"{figures['memory_before'] / 2**20:.1f}"],
        ["meanwhile", ", ".join(f"{nbytes / 2**20:.0f}" for nbytes in out.resident)],
        ["resident after, MiB", f"{figures['memory_after'] / 2**20:.1f}"],
    ]
    if restarted is not None:
        rows.append(["killed, started again, right", "yes" if restarted else "no"])
    times = [
        [name, str(count), *(f"{value:.2f}" for value in shares)]
        for name, count, shares in waits_of(out)
    ]
    heads = ["", "answers", *(f"{share} %" for share in SHARES)]
    return f"{about}:\n\n{markdown(['', ''], rows)}\n\n{markdown(heads, times)}"


def is_right(out: Outcome) -> bool:
    """Whether nothing was lost, wrong or leaked."""
    bad = ("wrong", "lost", "bad, not refused", "not ended by SIGTERM")
    return not any(out.counts[name] for name in bad) and not leaked(out.figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench serve --load", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--page", type=int)
    parser.add_argument(
        "--scarce",
        type=float,
        nargs="?",
        const=6.0,
        default=0.0,
        metavar="X",
        help="X times more context is asked for than there are pages (6); by itself it takes pages "
        "of 32 and answers of up to 128 tokens",
    )
    parser.add_argument("--oom-every", type=int, default=0)
    parser.add_argument("--kill", action="store_true", help="kill it once and start it again")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    usual = Load(page=32, new=128) if options.scarce else Load()
    load = overridden(usual, options)
    out = run(load)
    restarted = killed(load) if options.kill else None
    about = machine(torch.device("cpu"))
    text = f"{machine_line(about)}.\n\n{as_text(load, out, restarted)}\n"
    print(text)
    print("\n".join(out.wrong[:10]))
    result = {
        "machine": about,
        "load": asdict(load) | {"model": load.model.name},
        "values": {
            "counts": dict(out.counts),
            "waits": {name: [count, *shares] for name, count, shares in waits_of(out)},
            "figures": out.figures,
            "resident": out.resident,
            "restarted": restarted,
        },
    }
    write_outputs(options, result, text)
    return 0 if is_right(out) and restarted is not False else 1

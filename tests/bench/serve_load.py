"""A server under load, whose every answer is checked: ``python -m tests.bench serve-load``.

Clients ask for completions of prompts from a list, a third of which begin alike. A fifth of the
answers are dropped in the middle, and bad requests come between. Every answer is compared with the
text that its request has alone, from an engine without a server; afterwards pages are counted, and
memory and open files of the server and of its hosts beside those after a quarter of the time.

``--scarce 6 --page 32 --new 128`` has six times more context asked for at once than there are
pages, by answers that grow over several pages and a fifth of which go before others, so that jobs
are preempted. ``--oom-every N`` has every so many calls of the model run out of memory. ``--stages
3`` has the model over so many hosts on this machine. ``--kill`` kills the server, and starts it
again; where there are stages, it kills one of the hosts when half of the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exkv import Engine, Job, Model, PagedCache, SamplingParams, Tokenizer
from exkv.planning import Plan
from exkv.serve.requests import CompletionRequest

from .harness import ROOT, markdown, setting, status_bytes
from .serving import Answered, Server, ask, running

DEMO = ROOT / "examples" / "demo-model"
TEXT = "the key is in a kitchen and anna put the red ball where tom had a lamp on his table"
BAD = (
    b'{"prompt": "a", "top_p": 7}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": [[]]}',
    b"{",
    b'{"prompt": "a", "nothing": 1}',
)
#: Percentiles of waits.
SHARES = (50, 90, 99, 100)
#: Bytes of a process, and of open files, that come and go.
_SLACK, _FILES = 24 << 20, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The requests to the server; sizes in tokens."""

    model: Path = DEMO
    seconds: float = 120.0
    clients: int = 64
    requests: int = 96
    prompt: int = 420
    new: int = 32
    max_running: int = 16
    tokens: int = setting(16_384, "of the server's cache")
    page: int = 256
    scarce: float = setting(0.0, "so many times more context is asked for at once than pages hold")
    oom_every: int = setting(0, "so many calls of the model, one runs out of memory")
    stages: int = setting(1, "hosts on this machine, over which the model lies")
    kill: bool = setting(False, "the server, or one host of several")
    seed: int = 1

    @property
    def shared(self) -> int:
        """Tokens of the beginning that a third of the prompts share."""
        return self.prompt * 2 // 3

    @property
    def longest(self) -> int:
        """Upper bound on a request's tokens."""
        return self.shared + self.prompt // 4 + 8 + self.new

    @property
    def cache(self) -> int:
        """Tokens of the server's cache: where they are scarce, as little as this of what is asked
        for at once, where shared tokens count once, and enough for one request."""
        asked = self.shared + self.clients * (self.prompt // 8 + self.new * 5 // 8)
        tokens = max(asked / self.scarce, self.longest) if self.scarce else self.tokens
        return -int(-tokens // self.page) * self.page


@dataclass(slots=True)
class Outcome:
    """What came of it; ``waits``: kind of request -> seconds to the first part and to the end;
    ``processes``: name -> bytes and open files after a quarter of the time, and at the end."""

    counts: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    processes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


# Requests, and what they bring alone ------------------------------------------------------------


def requests_of(load: Settings) -> list[dict[str, Any]]:
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


def kind_of(load: Settings, index: int) -> str:
    """The kind under which a request's waits are counted."""
    first = "before others, " if load.scarce and index % 5 == 0 else ""
    return first + ("shared beginning" if index % 3 == 0 else "own prompt")


def texts_alone(load: Settings, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts one after another, each alone in an engine."""
    model, tokenizer = Model(load.model, max_input_len=256), Tokenizer(load.model)
    tokens = -(-load.longest // load.page) * load.page
    cache = PagedCache(model, max_seq_len=tokens, page=load.page)
    model.load_autosplit(cache, last_id_only=True)
    usual, texts = SamplingParams.recommended(load.model), []
    with Engine(model, cache, tokenizer) as engine:
        for body in bodies:
            settings = CompletionRequest.model_validate(body).sampling(usual, tokenizer.encode)
            how = {"max_new_tokens": body["max_tokens"], "seed": body["seed"]}
            texts += engine.run([Job(prompt=body["prompt"], settings=settings, **how)])
    model.unload()
    return texts


# The server -----------------------------------------------------------------------------------


def server(load: Settings) -> AbstractContextManager[Server]:
    """``exkv serve`` for a load, ended at the exit of the context."""
    module = "tests.bench.faulty_server" if load.oom_every else "exkv"
    words = [sys.executable, "-m", module, "serve", str(load.model), "--page", str(load.page)]
    words += ["--max-seq-len", str(load.cache), "--max-running", str(load.max_running)]
    words += ["--max-jobs", "1024", *stages_of(load)]
    env = {"EXKV_OOM_EVERY": str(load.oom_every)}
    return running(lambda port: [*words, "--port", str(port)], env)


def stages_of(load: Settings) -> list[str]:
    """Arguments of a server over as many stages, all on this machine."""
    if load.stages == 1:
        return []
    model = Model(load.model, max_input_len=256)
    cache = PagedCache(model, max_seq_len=load.cache, page=load.page)
    model.load_autosplit(cache, devices=["cpu"])
    assert model.plan is not None
    split = ",".join(f"{size:.9f}" for size in split_evenly(model.plan, load.stages))
    model.unload()
    names = [f"h{number}" for number in range(1, load.stages)]
    return ["--cluster", "local", "--hosts", *names, "--gpu-split", split]


def split_evenly(plan: Plan, stages: int) -> list[float]:
    """GB for each stage, so that each has as much as the others of a plan over one device."""
    (ledger,) = (each for each in plan.ledgers if each.units)
    kept, beside = ledger.weights + ledger.cache, ledger.workspace + ledger.logits
    each = (kept / stages + beside) / 2**30
    return [each] * (stages - 1) + [each + kept / 2**30]


def hosts_of(found: Server) -> list[int]:
    """The running processes that a server has started."""
    children = []
    for task in Path(f"/proc/{found.process.pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # of a thread that has ended since
            children += map(int, task.read_text().split())
    return sorted(pid for pid in children if b"cluster" in _words(pid))


def _words(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")


def held(found: Server) -> dict[str, tuple[int, int]]:
    """Bytes and open files of the server and its hosts."""
    processes = {"server": found.process.pid, **{f"host {pid}": pid for pid in hosts_of(found)}}
    return {
        name: (status_bytes("VmRSS", pid), len(os.listdir(f"/proc/{pid}/fd")))
        for name, pid in processes.items()
    }


async def _watch(found: Server, load: Settings) -> dict[str, tuple[int, int]]:
    """The processes' memory and files after a quarter of the time; a host dies after half of it."""
    await asyncio.sleep(load.seconds / 4)
    early = held(found)
    await asyncio.sleep(load.seconds / 4)
    if load.kill and load.stages > 1:
        # The last one of the split has room for what another one had.
        os.kill(next(pid for pid in hosts_of(found) if b"h1" in _words(pid)), signal.SIGKILL)
    return early


# Clients --------------------------------------------------------------------------------------


async def _client(
    number: int,
    port: int,
    load: Settings,
    asked: Sequence[tuple[dict[str, Any], str]],
    out: Outcome,
) -> None:
    source, until = random.Random(number), time.monotonic() + load.seconds
    while time.monotonic() < until:
        index = source.randrange(len(asked))
        body, text = asked[index]
        data = json.dumps(body | {"stream": True}).encode()
        if source.random() < 0.1:
            status, *_ = await ask(port, source.choice(BAD))
            out.counts["bad, refused" if 400 <= status < 500 else "bad, not refused"] += 1
        elif source.random() < 0.2:
            await ask(port, data, drop_after=source.randrange(1, 4))
            out.counts["dropped"] += 1
        else:
            judge(out, await ask(port, data), text, kind_of(load, index))


def judge(out: Outcome, found: Answered, text: str, kind: str = "") -> None:
    """Count an answer."""
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


async def all_clients(
    port: int, load: Settings, asked: Sequence[tuple[dict[str, Any], str]], out: Outcome
) -> None:
    clients = (_client(number, port, load, asked, out) for number in range(load.clients))
    for error in await asyncio.gather(*clients, return_exceptions=True):
        if error is not None:
            out.counts["lost"] += 1
            out.wrong.append(repr(error)[:200])


def _settled(found: Server) -> dict[str, float]:
    """Its metrics once no job is left, and the engine's next step has taken back the pages of those
    whose clients went away."""
    deadline = time.monotonic() + 120
    figures = found.figures()
    while (figures["exkv_jobs"] or leaked(figures)) and time.monotonic() < deadline:
        time.sleep(0.1)
        figures = found.figures()
    return figures


def loaded(load: Settings) -> Outcome:
    """Put load on the server -> the outcome, and what is left in the server."""
    out, bodies = Outcome(), requests_of(load)
    asked = list(zip(bodies, texts_alone(load, bodies), strict=True))

    async def all_of_it(found: Server) -> dict[str, tuple[int, int]]:
        clients = all_clients(found.port, load, asked, out)
        return (await asyncio.gather(clients, _watch(found, load)))[1]

    with server(load) as found:
        if len(hosts_of(found)) != load.stages - 1:
            raise RuntimeError(f"the server's hosts are {hosts_of(found)}, not {load.stages - 1}")
        # As many at once as there will be, so that buffers of all sizes are there.
        few = replace(load, seconds=min(load.seconds / 6, 10.0))
        asyncio.run(all_clients(found.port, few, asked, Outcome()))
        _settled(found)
        early = asyncio.run(all_of_it(found))
        out.figures = _settled(found)
        time.sleep(0.5)  # for connections to close
        out.processes = {name: [early[name], late] for name, late in held(found).items()}
        if found.end() != 0:
            out.counts["not ended by SIGTERM"] += 1
    return out


def killed(load: Settings) -> bool:
    """Whether a server killed under load starts again, has all pages, and answers right."""
    bodies, out = requests_of(load)[:8], Outcome()
    texts = texts_alone(load, bodies)
    asked = [json.dumps(body | {"stream": True}).encode() for body in bodies]

    async def under_load(found: Server) -> None:
        asks = [ask(found.port, data) for data in asked]
        waiting = asyncio.gather(*asks, return_exceptions=True)
        while not found.figures()["exkv_jobs"]:
            await asyncio.sleep(0.01)
        found.kill()
        await waiting

    with server(load) as found:
        asyncio.run(under_load(found))
    with server(load) as found:
        for data, text in zip(asked, texts, strict=True):
            judge(out, asyncio.run(ask(found.port, data)), text)
        figures = _settled(found)
    return out.counts["right"] == len(bodies) and not leaked(figures)


def leaked(figures: dict[str, float]) -> int:
    """Pages that no job holds and that are not available."""
    return int(figures["exkv_pages"] - figures["exkv_pages_available"])


# Results --------------------------------------------------------------------------------------


def measure(load: Settings) -> dict[str, Any]:
    out = loaded(load)
    mistakes = mistakes_of(load, out)
    if load.kill and load.stages == 1 and not killed(load):
        mistakes.append("what was killed did not start again, or was wrong")
    return {
        **{"cache": load.cache, "counts": dict(out.counts), "figures": out.figures},
        **{"processes": out.processes, "wrong": mistakes},
        "waits": {name: [count, *shares] for name, count, shares in waits_of(out)},
    }


def wrong(result: dict[str, Any]) -> list[str]:
    return result["wrong"]


def mistakes_of(load: Settings, out: Outcome) -> list[str]:
    """Lost, wrong and leaked things; memory may grow where a dead host's units move."""
    bad = ("wrong", "lost", "bad, not refused", "not ended by SIGTERM")
    found = [f"{name}: {out.counts[name]}" for name in bad if out.counts[name]] + out.wrong[:10]
    if leaked(out.figures):
        found.append(f"pages leaked: {leaked(out.figures)}")
    dies = load.kill and load.stages > 1
    for name, (early, late) in out.processes.items():
        if late[1] > early[1] + _FILES or (late[0] > early[0] + _SLACK and not dies):
            found.append(f"{name} grew from {early} bytes and files to {late}")
    if out.processes and len(out.processes) != load.stages - dies:
        found.append(f"hosts at the end: {', '.join(out.processes)}")
    return found


def percentiles(seconds: Sequence[float]) -> list[float]:
    """The percentiles of :data:`SHARES`."""
    found = sorted(seconds) or [0.0]
    return [found[min(int(len(found) * share / 100), len(found) - 1)] for share in SHARES]


def waits_of(out: Outcome) -> list[tuple[str, int, list[float]]]:
    """Of each kind of request and of all, to the first part and to the end: the count, and the
    percentiles of their seconds."""
    kinds = dict(sorted(out.waits.items()))
    everything = {"all": [each for found in kinds.values() for each in found], **kinds}
    return [
        (f"{kind}: {what}", len(found), percentiles([each[at] for each in found]))
        for kind, found in everything.items()
        for at, what in enumerate(("first part, s", "whole answer, s"))
    ]


def report(result: dict[str, Any]) -> list[str]:
    """Tables of answers, waits, and the processes' memory and files."""
    load, figures, counts = result["settings"], result["figures"], result["counts"]
    about = (
        f"{load['clients']} clients for {load['seconds']:g} s, {Path(load['model']).name}, a cache "
        f"of {result['cache']:,} tokens in pages of {load['page']}, {load['max_running']} at once"
        + (f", over {load['stages']} hosts" if load["stages"] > 1 else "")
        + (f", {load['scarce']:g} times as much is asked for" if load["scarce"] else "")
        + (f", every {load['oom_every']}th call out of memory" if load["oom_every"] else "")
    )
    names = ["right", "wrong", "lost", "dropped", "bad, refused", "bad, not refused"]
    rows = [[name, counts.get(name, 0)] for name in names] + [["pages leaked", leaked(figures)]]
    told = {
        **{"times that a job was preempted": "preemptions", "new tokens": "generated_tokens"},
        **{"calls that ran out of memory": "out_of_memory"},
        "prompt tokens found in pages": "cached_tokens",
    }
    rows += [[words, f"{figures[f'exkv_{name}_total']:.0f}"] for words, name in told.items()]
    times = [
        [name, count, *(f"{value:.2f}" for value in shares)]
        for name, (count, *shares) in result["waits"].items()
    ]
    processes = [
        [name, *(cell for nbytes, files in pair for cell in (f"{nbytes / 2**20:.1f}", files))]
        for name, pair in result["processes"].items()
    ]
    heads = ["", "MiB after a quarter", "open files", "MiB at the end", "open files"]
    return [
        *(f"{about}:", markdown(["", ""], rows)),
        markdown(["", "answers", *(f"{share} %" for share in SHARES)], times),
        markdown(heads, processes),
    ]


QUICK = {
    **{"seconds": 2.0, "clients": 12, "requests": 8, "prompt": 120, "new": 16},
    "oom_every": 10,
}

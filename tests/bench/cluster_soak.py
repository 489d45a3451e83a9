"""A server over three stages under load: ``python -m tests.bench cluster --soak --seconds 600``.

Clients ask as in ``serve_load.py``, and every answer is compared with what its request gives alone
on one machine. Memory and open files of the server and of its hosts are counted once a quarter of
the time is over, and at the end; pages at the end. ``--kill`` has one of the hosts die when half
of the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from exkv import Model, PagedCache
from exkv.planning import Plan

from .common import add_outputs, machine, machine_line, markdown, write_outputs
from .serve_load import (
    Load,
    Outcome,
    Server,
    _all_clients,
    _settled,
    _warm,
    as_text,
    is_right,
    requests_of,
    server,
    texts_alone,
)

STAGES = 3
#: Bytes of a process, and of open files, that come and go.
_SLACK, _FILES = 24 << 20, 4


def split_evenly(plan: Plan, stages: int) -> list[float]:
    """GB for each stage, so that each has as much as the others of a plan over one device."""
    (ledger,) = (each for each in plan.ledgers if each.units)
    kept, beside = ledger.weights + ledger.cache, ledger.workspace + ledger.logits
    each = (kept / stages + beside) / 2**30
    return [each] * (stages - 1) + [each + kept / 2**30]


def stages_of(load: Load) -> tuple[str, ...]:
    """Words by which a server lies over as many stages, this machine's."""
    model = Model(load.model, max_input_len=256)
    cache = PagedCache(model, max_seq_len=load.cache, page=load.page)
    model.load_autosplit(cache, devices=["cpu"])
    assert model.plan is not None
    split = split_evenly(model.plan, STAGES)
    model.unload()
    names = [f"h{number}" for number in range(1, STAGES)]
    return (
        *("--cluster", "local", "--hosts", *names),
        *("--gpu-split", ",".join(f"{size:.9f}" for size in split)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds."""

    memory: int
    files: int

    @classmethod
    def of(cls, process: int) -> Held:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        (resident,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
        return cls(memory=resident * 1024, files=len(os.listdir(f"/proc/{process}/fd")))


def hosts_of(found: Server) -> list[int]:
    """The processes that a server has started and that run."""
    tasks = Path(f"/proc/{found.process.pid}/task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    return sorted(pid for pid in children if b"cluster" in _words(pid))


def _words(process: int) -> list[bytes]:
    return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")


def held(found: Server) -> dict[str, Held]:
    """Of the server and its hosts, by process."""
    hosts = {f"host {pid}": Held.of(pid) for pid in hosts_of(found)}
    return {"server": Held.of(found.process.pid), **hosts}


async def _watch(found: Server, seconds: float, kill: bool) -> dict[str, Held]:
    """What processes hold after a quarter of the time; one dies after half of it."""
    await asyncio.sleep(seconds / 4)
    early = held(found)
    await asyncio.sleep(seconds / 4)
    if kill:
        # The last one of the split has room for what another one had.
        os.kill(next(pid for pid in hosts_of(found) if b"h1" in _words(pid)), signal.SIGKILL)
    return early


def run(load: Load, kill: bool) -> tuple[Outcome, dict[str, tuple[Held, Held]]]:
    """What came of the load, and of each process that has lived to the end what it held."""
    out, bodies = Outcome(), requests_of(load)
    texts = texts_alone(load, bodies)

    async def all_of_it(found: Server) -> dict[str, Held]:
        clients = _all_clients(found, load, bodies, texts, out)
        _, early = await asyncio.gather(clients, _watch(found, load.seconds, kill))
        return early

    with server(load) as found:
        if len(hosts_of(found)) != STAGES - 1:
            raise RuntimeError(f"the server's hosts are {hosts_of(found)}, and not {STAGES - 1}")
        _warm(found, load, bodies, texts)
        before = found.memory()
        early = asyncio.run(all_of_it(found))
        out.figures = _settled(found)
        time.sleep(0.5)  # for connections to close
        late = held(found)
        out.figures |= {"memory_before": before, "memory_after": found.memory()}
        if found.end() != 0:
            out.counts["not ended by SIGTERM"] += 1
    return out, {name: (early[name], late[name]) for name in late}


def grown(processes: dict[str, tuple[Held, Held]], kill: bool) -> list[str]:
    """Processes that hold more than they did; where a host died the others have its units."""
    return [
        name
        for name, (early, late) in processes.items()
        if late.files > early.files + _FILES or (late.memory > early.memory + _SLACK and not kill)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench cluster --soak", description=__doc__
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=420)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--kill", action="store_true", help="one host dies at half-time")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    asked = {name: getattr(options, name) for name in ("seconds", "clients", "requests")}
    load = Load(**asked, prompt=options.prompt, new=options.new)
    load = replace(load, words=stages_of(load))
    out, processes = run(load, options.kill)
    rows = []
    for name, pair in processes.items():
        memory = [f"{each.memory / 2**20:.1f}" for each in pair]
        rows.append([name, *memory, *(str(each.files) for each in pair)])
    heads = ["", "MiB after a quarter", "at the end", "files after a quarter", "at the end"]
    about = machine(torch.device("cpu"))
    text = f"{machine_line(about)}.\n\n{as_text(load, out, None)}\n\n{markdown(heads, rows)}\n"
    print(text)
    print("\n".join(out.wrong[:10]))
    values = {name: [asdict(each) for each in pair] for name, pair in processes.items()}
    result = {"machine": about, "load": asdict(load) | {"model": load.model.name}}
    result["values"] = {"counts": dict(out.counts), "figures": out.figures, "processes": values}
    write_outputs(options, result, text)
    survivors = STAGES - options.kill
    fine = is_right(out) and not grown(processes, options.kill) and len(processes) == survivors
    return 0 if fine else 1

"""Hosts for tests: forks of the process that drives them, since to start an interpreter for each
takes longer than most tests. And generations that go on while something happens to hosts."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch
from netns import Network
from on_cpu import on_cpu

from exkv import Cache, KVCache, Model, sim
from exkv.cluster import Cluster, ClusterModel
from exkv.cluster.launchers import Processes
from exkv.cluster.rendezvous import listen

#: Processes that wait to be told which host they are, and the pipes that they wait at.
_SPARES: list[tuple[int, int]] = []


def cluster_of(
    own: str,
    *others: str,
    timeout: float = 20.0,
    streamed: Collection[str] = (),
    spares: int = 0,
    network: Network | None = None,
) -> Cluster:
    """A driver with its own simulated devices and hosts with theirs, as EXKV_SIM_DEVICES spells
    them; those that are named in ``streamed`` have no copy of a checkpoint. To be called in a
    process without devices and threads (``run_sim(..., devices="")``).

    Args:
        spares: how many hosts may be started later, when this process has threads.
        network: host number i lives in its namespace number i.
    """
    _SPARES[:] = [_spare() for _ in range(spares)]
    later, _SPARES[:] = list(_SPARES), []
    if network is None:
        cluster = Cluster.local(others, timeout=timeout, start=partial(start, streamed))
    else:
        cluster = _across(network, others, timeout)
    _SPARES[:] = later
    use(own)
    return cluster


def _across(network: Network, others: Sequence[str], timeout: float) -> Cluster:
    listening, secret = listen(network.driver, 0), "of a test"

    def start_there(address: str, name: str, devices: str, secret: str) -> int:
        if pid := os.fork():
            return pid
        network.enter(int(name.removeprefix("host")))
        return _be_host(address, name, devices, secret, False)

    cards = {f"host{number}": each for number, each in enumerate(others, start=1)}
    address = f"{network.driver}:{listening.getsockname()[1]}"
    launcher = Processes(address, cards, secret, start_there)
    return Cluster._launched(listening, secret, timeout, launcher)


def use(devices: str) -> None:
    """This process's simulated devices from now on."""
    os.environ["EXKV_SIM_DEVICES"] = devices
    sim.enable_from_env()


def start(streamed: Collection[str], address: str, name: str, devices: str, secret: str) -> int:
    """Have a host begin in a process that waits, or else in a fork; the process's id."""
    told = [address, name, devices, secret, name in streamed]
    if _SPARES:
        pid, pipe = _SPARES.pop()
        os.write(pipe, json.dumps(told).encode())
        os.close(pipe)
        return pid
    return os.fork() or _be_host(*told)


def _spare() -> tuple[int, int]:
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(reading)
        return pid, writing
    for pipe in (writing, *(pipe for _, pipe in _SPARES)):
        os.close(pipe)
    told = os.read(reading, 1 << 16)
    return _be_host(*json.loads(told)) if told else os._exit(0)


def _be_host(address: str, name: str, devices: str, secret: str, stream: bool) -> int:
    status = 1
    try:
        from exkv.cluster.host import serve

        use(devices)
        serve(address, name, secret=secret, stream=stream)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# Generations --------------------------------------------------------------------------------

PROMPT = torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(3))
STEPS = 12


def alone(folder: str | Path, **options) -> Model:
    """The model on this machine."""
    return on_cpu(folder, max_input_len=16, **options)


class Decoding:
    """A greedy generation, a token a call."""

    def __init__(self, model: Model, cache: KVCache, prompt: torch.Tensor) -> None:
        self._model, self._cache = model, cache
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []
        self._say(prompt)

    def _say(self, ids: torch.Tensor) -> None:
        logits = self._model.forward(ids, self._cache, last_id_only=True).cpu()[0, -1]
        self.tokens.append(int(logits.argmax()))
        self.logits.append(logits)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self._say(torch.tensor([self.tokens[-1:]]))

    def is_like(self, other: Decoding) -> bool:
        """Whether tokens are the same, and logits but for rounding: tokens that are computed again
        run in other chunks, which was seen to change 5e-7. (Tokens alone are often the same where a
        layer of a cache holds zeros.)"""
        pairs = zip(self.logits, other.logits, strict=True)
        return self.tokens == other.tokens and all(
            torch.allclose(one, two, rtol=0, atol=1e-5) for one, two in pairs
        )


def decoded(model: Model) -> list[Decoding]:
    """What a cache, and a fork of it, are to give."""
    cache = Cache(model, 64, 1)
    first = Decoding(model, cache, PROMPT)
    second = Decoding(model, cache.fork(1, 60), PROMPT[:, :3])
    for each in (first, second):
        each.go(STEPS)
    return [first, second]


def wait_for(model: ClusterModel, *hosts: str) -> None:
    deadline = time.monotonic() + 30
    while sorted(model.cluster.waiting) != sorted(hosts):
        assert time.monotonic() < deadline, model.cluster.waiting
        time.sleep(0.01)

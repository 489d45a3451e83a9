"""Hosts for tests: forks of the process that drives them, since to start an interpreter for each
takes longer than most tests."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Collection
from functools import partial

from exkv import sim
from exkv.cluster import Cluster

#: Processes that wait to be told which host they are, and the pipes that they wait at.
_SPARES: list[tuple[int, int]] = []


def cluster_of(
    own: str,
    *others: str,
    timeout: float = 20.0,
    streamed: Collection[str] = (),
    spares: int = 0,
) -> Cluster:
    """A driver with its own simulated devices and hosts with theirs, as EXKV_SIM_DEVICES spells
    them; those that are named in ``streamed`` have no copy of a checkpoint. To be called in a
    process without devices and threads (``run_sim(..., devices="")``).

    Args:
        spares: how many hosts may be started later, when this process has threads.
    """
    _SPARES[:] = [_spare() for _ in range(spares)]
    later, _SPARES[:] = list(_SPARES), []
    cluster = Cluster.local(others, timeout=timeout, start=partial(start, streamed))
    _SPARES[:] = later
    use(own)
    return cluster


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

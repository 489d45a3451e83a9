"""Hosts for tests: forks of the process that drives them, since to start an interpreter for each
takes longer than most tests."""

from __future__ import annotations

import os
import traceback

from exkv import sim
from exkv.cluster import Cluster


def cluster_of(own: str, *others: str, timeout: float = 20.0) -> Cluster:
    """A driver with its own simulated devices and hosts with theirs, as EXKV_SIM_DEVICES spells
    them. To be called in a process without devices and threads (``run_sim(..., devices="")``)."""
    cluster = Cluster.local(others, timeout=timeout, start=start)
    use(own)
    return cluster


def use(devices: str) -> None:
    """This process's simulated devices from now on."""
    os.environ["EXKV_SIM_DEVICES"] = devices
    sim.enable_from_env()


def start(address: str, name: str, devices: str, secret: str) -> int:
    """Fork a host; its process's id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        from exkv.cluster.host import serve

        use(devices)
        serve(address, name, secret=secret)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)

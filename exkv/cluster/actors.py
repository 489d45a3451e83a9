"""Hosts started by Ray: an actor on each machine of a Ray cluster, which runs the same code as
``exkv cluster up``.

Ray lists the machines, places one actor on each with all its GPUs, detects when its process dies,
and restarts it. Hidden states, commands and tokens don't go through Ray.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from exkv import sim

from .host import serve


class HostActor:
    """The actor that runs on each machine."""

    def up(self, address: str, name: str, devices: str, secret: str, folder: str | None) -> None:
        """Be a host until the driver ends; if this process dies, Ray calls this in a new one."""
        if devices and not sim.enabled():
            os.environ["EXKV_SIM_DEVICES"] = devices
            sim.enable_from_env()
        serve(address, name, folder=None if folder is None else Path(folder), secret=secret)

    def pid(self) -> int:
        """The process id; answers as long as the process lives."""
        return os.getpid()


class Actors:
    """Launches hosts on Ray.

    Args:
        simulated: simulated devices of each host, on any machine; empty for one host on each
            machine but the driver's own, with its real devices.
        folder: the checkpoint's folder on every machine; None for the driver's own path.
    """

    def __init__(self, address: str | None, simulated: Sequence[str], folder: str | None) -> None:
        self._ray = _ray()
        self._simulated, self._folder = tuple(simulated), folder
        self._began = not self._ray.is_initialized()
        if self._began:
            _connect(self._ray, address)
        self._actors: dict[str, Any] = {}
        self._machines: dict[str, str] = {}  # name -> node id
        self._pings: dict[str, Any] = {}
        self.rendezvous = "", ""  # the driver's address, and the secret

    def address(self) -> str:
        """This machine's address towards the others; loopback if there are none."""
        own = self._ray.util.get_node_ip_address()
        others = {node["NodeManagerAddress"] for node in self._nodes()} - {own}
        return own if others else "127.0.0.1"

    def has_ended(self, name: str) -> bool:
        if name not in self._actors:
            return False
        if name not in self._pings:
            self._pings[name] = self._actors[name].pid.remote()
        if not self._ray.wait([self._pings[name]], timeout=0)[0]:
            return False
        try:
            self._ray.get(self._pings.pop(name))
        except self._ray.exceptions.RayError:  # it died, or is being restarted
            return True
        return False

    def end(self, name: str) -> None:
        self._pings.pop(name, None)
        if name in self._actors and not self.has_ended(name):  # stopped, or out of reach
            self._ray.kill(self._actors[name], no_restart=False)

    def start_missing(self, present: list[str]) -> list[str]:
        """Start actors on machines that have none; Ray itself restarts those that died."""
        living = {node["NodeID"] for node in self._nodes()}
        for name in [name for name, node in self._machines.items() if node not in living]:
            del self._machines[name], self._actors[name]
        started = [name for name, _, _ in self._missing()]
        for name, node, devices in list(self._missing()):
            self._actors[name] = self._start(name, node, devices)
            if node:
                self._machines[name] = node
        return started

    def close(self, told: Collection[str] = ()) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        if self._began:
            self._ray.shutdown()

    def _missing(self) -> Iterator[tuple[str, str, str]]:
        """Name, node ("" for any) and simulated devices of each host without an actor."""
        for number, devices in enumerate(self._simulated, start=1):
            if (name := f"host{number}") not in self._actors:
                yield name, "", devices
        if self._simulated:
            return
        for node in self._nodes():
            if node["NodeID"] not in (*self._machines.values(), self._own_node()):
                yield self._name_of(node), node["NodeID"], ""

    def _name_of(self, node: dict[str, Any]) -> str:
        name = str(node["NodeManagerHostname"])
        return f"{name}-{node['NodeID'][:6]}" if name in self._actors else name

    def _start(self, name: str, node: str, devices: str) -> Any:
        """Start an actor that runs a host; Ray restarts both whenever they die."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 2}
        if node:
            gpus = {n["NodeID"]: n["Resources"].get("GPU", 0) for n in self._nodes()}[node]
            where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options |= {"num_gpus": gpus, "scheduling_strategy": where(node, soft=False)}
        actor = self._ray.remote(**options)(HostActor).remote()
        address, secret = self.rendezvous
        up = actor.up.options(max_task_retries=-1)
        up.remote(address, name, devices, secret, self._folder)
        return actor

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _own_node(self) -> str:
        """This process's node; "" if it is a Ray client outside of the cluster."""
        if self._ray.util.client.ray.is_connected():
            return ""
        return str(self._ray.get_runtime_context().get_node_id())


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ImportError(
            'hosts on Ray need the package ray: pip install "exkv[ray]"; without it, run `exkv '
            "cluster up` on each machine, and Cluster.listen here"
        ) from None
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a Ray cluster; None for the one that this machine belongs to, or a new local
    one."""
    quiet = {"log_to_driver": False, "logging_level": "WARNING"}
    if address is not None:
        ray.init(address, **quiet)
        return
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        ray.init("local", include_dashboard=False, **quiet)

"""The driver's side of a cluster: its hosts, what they are told, and who is left when one dies."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import distributed

from exkv import sim
from exkv.planning import Budget

from .errors import ClusterError, WireError
from .host import SECRET, follow
from .rendezvous import (
    Doorkeeper,
    listen,
    parse_address,
    roll_call,
    serve_store,
    set_group,
    what_comes,
)
from .values import loads
from .wire import Wire, address_towards

#: Starts a host on this machine, from the address, its name, its simulated devices and the secret;
#: returns the process's id.
Start: TypeAlias = Callable[[str, str, str, str], int]
#: Times that a group is made anew for one failure before the cluster is given up.
_MOST_GROUPS = 5
#: Commands that may take longer than a message: hosts answer through the store, and count as gone
#: only when they send no heartbeat.
_SLOW = frozenset(("build", "add_cache", "load", "move", "unload"))


class Cluster:
    """Hosts that hold models together; this process drives them.

    >>> cluster = Cluster.listen("10.0.0.1:29500", hosts=1)  # exkv cluster up 10.0.0.1:29500
    >>> model = ClusterModel("path/to/model", cluster)
    >>> cache = Cache(model, max_seq_len=8192)
    >>> model.load_autosplit(cache)

    Attributes:
        names: of all processes in the group, the driver's first: a process's rank is its place.
        wire: the group.
        gone: hosts that died, in that order.
    """

    def __init__(
        self,
        store: distributed.Store,
        names: Sequence[str],
        address: str,
        timeout: float,
        children: dict[str, int] | None = None,
    ) -> None:
        self._store, self._address, self._timeout = store, address, timeout
        self._children = children or {}
        self._finalizer = weakref.finalize(self, _end_all, self._children)
        self._epoch = self._commands = 0
        self._awaited = "wire"
        self._simulated = False
        self.gone: list[str] = []
        self.names = ["driver", *names]
        self.wire = self._group()

    # Ways to make one ---------------------------------------------------------------------

    @classmethod
    def listen(
        cls,
        address: str = "127.0.0.1:29500",
        *,
        hosts: int,
        secret: str | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
    ) -> Cluster:
        """Wait for hosts that run ``exkv cluster up ADDRESS``.

        Args:
            address: ``HOST:PORT`` of one interface of this machine; of another than loopback only
                with a secret.
            hosts: how many beside this one.
            secret: that they must know; None for that of EXKV_CLUSTER_SECRET.
            timeout: seconds that a message may take before its sender counts as gone. It must be
                more than the slowest host's units take for a chunk.
            patience: seconds to wait for them.

        Raises:
            ValueError: an address that is none, or a missing secret.
            OSError: the address is in use, or not this machine's.
            ClusterError: too few came.
        """
        host, port = parse_address(address)
        secret = os.environ.get(SECRET, "") if secret is None else secret
        if not secret and not host.startswith("127."):
            raise ValueError(
                f"{address} can be reached from other machines: set {SECRET} to the same secret on "
                "all hosts"
            )
        return cls._gather(listen(host, port), hosts, secret, timeout, patience, {})

    @classmethod
    def local(
        cls, devices: Sequence[str], *, timeout: float = 60.0, start: Start | None = None
    ) -> Cluster:
        """Hosts as processes of this machine, to try things out: they end with this one.

        Args:
            devices: of each host its simulated devices, as EXKV_SIM_DEVICES spells them; "" for
                those of this machine.
            start: how one is started; None for a new interpreter.
        """
        secret = secrets.token_hex(16)
        listening = listen("127.0.0.1", 0)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        children: dict[str, int] = {}
        try:
            for number, cards in enumerate(devices, start=1):
                name = f"host{number}"
                children[name] = (start or _spawn)(address, name, cards, secret)
            made = cls._gather(listening, len(devices), secret, timeout, 120.0, children)
            made._simulated = any(devices)
            return made
        except BaseException:
            _end_all(children)
            raise

    @classmethod
    def from_torchrun(cls, *, folder: Path | None = None, timeout: float = 60.0) -> Cluster:
        """The cluster of the processes that torchrun started, on the one of rank 0; the others are
        its hosts until it ends, and then end, too.

        Raises:
            ValueError: torchrun did not start this process.
            SystemExit: on every other rank, when the driver has ended.
        """
        missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
        if missing:
            raise ValueError(f"torchrun sets {', '.join(missing)}, and this process has none")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

        def connect() -> distributed.Store:
            agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = distributed.TCPStore(
                host, port, is_master=not agents and rank == 0, wait_for_workers=False
            )
            run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            return distributed.PrefixStore(f"exkv/{run}", store)

        store, address = connect(), address_towards(host, port)
        if rank:
            store.wait(["timeout"])
            follow(store, connect, f"host{rank}", address, folder)
            raise SystemExit(0)
        store.set("timeout", str(timeout))
        return cls(store, [f"host{other}" for other in range(1, size)], address, timeout)

    @classmethod
    def _gather(
        cls,
        listening: Any,
        hosts: int,
        secret: str,
        timeout: float,
        patience: float,
        children: dict[str, int],
    ) -> Cluster:
        address = listening.getsockname()[0]
        store = serve_store(listening)
        store.set("timeout", str(timeout))
        names = Doorkeeper(store, secret).admit(hosts, patience)
        return cls(store, names, address, timeout, children)

    def _group(self) -> Wire:
        set_group(self._store, self._epoch, self.names)
        prefix = distributed.PrefixStore(f"wire/{self._epoch}", self._store)
        return Wire(prefix, 0, len(self.names), self._address, self._timeout)

    # What hosts are told ------------------------------------------------------------------

    @property
    def others(self) -> range:
        """The ranks of all processes but the driver."""
        return range(1, len(self.names))

    def tell(self, do: str, **args: Any) -> None:
        """Have every host carry a command out, and don't wait."""
        self._send(do, [args] * len(self.others), "")

    def send(self, do: str, **args: Any) -> None:
        """The same; :meth:`answers` waits."""
        self.send_each(do, [args] * len(self.others))

    def send_each(self, do: str, args: Sequence[dict[str, Any]]) -> None:
        """:meth:`send` with arguments for each, in the order of their ranks."""
        self._commands += 1
        # What may take minutes must not wait at the wire, which would count the host as gone.
        self._awaited = f"answer/{self._commands}" if do in _SLOW else "wire"
        self._send(do, args, self._awaited)

    def ask(self, do: str, **args: Any) -> list[Any]:
        """Have every host carry a command out -> what each has made, by rank."""
        self.send(do, **args)
        return self.answers()

    def _send(self, do: str, args: Sequence[dict[str, Any]], answer: str) -> None:
        for rank, its in zip(self.others, args, strict=True):
            self.wire.tell({"do": do, "args": its, "answer": answer}, rank)

    def answers(self) -> list[Any]:
        """What every host says to the last command, by rank.

        Raises:
            ClusterError: one could not carry it out; all have answered.
            torch.OutOfMemoryError: one ran out of memory; likewise.
            WireError: one is gone.
        """
        names = self.names[1:]
        if self._awaited == "wire":
            answers = [self.wire.hear(rank) for rank in self.others]
        else:
            came = what_comes(self._store, self._awaited, names, self._has_ended)
            if missing := [name for name in names if name not in came]:
                raise WireError(f"{', '.join(missing)} sent no heartbeat")
            answers = [loads(came[name]) for name in names]
            for name in names:
                self._store.delete_key(f"{self._awaited}/{name}")
        pairs = zip(names, answers, strict=True)
        raise_failures({name: each["failed"] for name, each in pairs if "failed" in each})
        return [answer["made"] for answer in answers]

    def offers(self, own: Sequence[Budget]) -> list[list[Budget]]:
        """What every process's devices offer now, by rank; the driver's are given.

        Raises:
            ValueError: hosts' devices are simulated, and this process has none to plan by.
        """
        if self._simulated and not sim.enabled():
            raise ValueError(
                "hosts with simulated devices need a driver with some: set EXKV_SIM_DEVICES=16M, "
                'or call exkv.sim.enable("16M") first'
            )
        return [list(own), *map(list, self.ask("offer"))]

    # When one dies ------------------------------------------------------------------------

    def regroup(self) -> dict[str, str]:
        """Make a new group of the hosts that are left, after the wire broke; ``gone`` has the
        others.

        Returns:
            What failed on hosts that are there, by name.
        """
        for _ in range(_MOST_GROUPS):
            self.wire.close()
            self._epoch += 1
            others = self.names[1:]
            there = roll_call(self._store, self._epoch, others, self._timeout, self._has_ended)
            for name in self.names[1:]:
                if name not in there:
                    self.gone.append(name)
                    _end(self._children.pop(name, None))
            self.names = ["driver", *there]
            try:
                self.wire = self._group()
            except WireError:
                continue
            return {name: failed for name, failed in there.items() if failed is not None}
        raise ClusterError(f"the hosts {', '.join(self.names[1:])} don't reach each other")

    def _has_ended(self, name: str) -> bool:
        """Whether a host was a process that this one started, and is no more."""
        pid = self._children.get(name)
        return pid is not None and _is_over(pid)

    def close(self) -> None:
        """Let the hosts go; those that this process started end."""
        try:
            for rank in self.others:
                self.wire.tell({"do": "end"}, rank)
        except WireError:
            pass
        for pid in self._children.values():
            _wait(pid)
        self._children.clear()
        self.names = ["driver"]
        self._finalizer.detach()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def raise_failures(failed: dict[str, str]) -> None:
    """One error for what failed on hosts, by name; none where nothing did."""
    if not failed:
        return
    kind = "out of memory: "
    text = "; ".join(f"{name}: {reason.removeprefix(kind)}" for name, reason in failed.items())
    if any(reason.startswith(kind) for reason in failed.values()):
        raise torch.OutOfMemoryError(text)
    raise ClusterError(text)


# Processes of this machine ------------------------------------------------------------------------


def _spawn(address: str, name: str, devices: str, secret: str) -> int:
    environment = {**os.environ, SECRET: secret, "EXKV_SIM_DEVICES": devices}
    command = [sys.executable, "-m", "exkv", "cluster", "up", address, "--name", name]
    with tempfile.TemporaryFile() as nothing:
        child = subprocess.Popen(command, env=environment, stdin=nothing)
    child.returncode = 0  # this file waits for it
    return child.pid


def _end_all(children: dict[str, int]) -> None:
    for pid in children.values():
        _end(pid)
    children.clear()


def _end(pid: int | None) -> None:
    if pid is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        _wait(pid)


def _is_over(pid: int) -> bool:
    try:
        # It stays there to be waited for, so that nothing else gets its number.
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it was waited for
        return True
    return state is not None


def _wait(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # it was waited for
        return

"""The driver's side of a cluster: gathering hosts, commands and answers, recovery."""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import distributed

from exkv import sim
from exkv.model import Model
from exkv.planning import Budget
from exkv.planning.plan import CPU, without_memory

from .errors import ClusterError, WireError, raise_failures
from .host import follow
from .launchers import SECRET, ByHand, Launcher, Processes, Start
from .model import spread
from .rendezvous import (
    Admission,
    await_values,
    digest,
    left_group,
    listen,
    parse_address,
    roll_call,
    serve_store,
    set_group,
)
from .status import announce
from .values import loads
from .wire import Wire, address_towards, form_group

#: Groups to try after one failure before it becomes a ClusterError.
_MOST_GROUPS = 5
#: Commands that may take longer than a message: hosts answer through the store, and count as dead
#: only without a heartbeat.
_SLOW = frozenset(("build", "add_cache", "load", "load_adapter", "move", "unload"))


class Cluster:
    """Hosts that run a model together, driven by this process.

    >>> cluster = Cluster.listen("10.0.0.1:29500", hosts=1)  # exkv cluster up 10.0.0.1:29500
    >>> model = ClusterModel("path/to/model", cluster)
    >>> cache = Cache(model, max_seq_len=8192)
    >>> model.load_autosplit(cache)

    Attributes:
        names: the processes of the group by rank, the driver first.
        wire: the group's transport.
        gone: hosts that died, in that order; those that came back stay in the list.
        came: hosts that joined with this group.
        launcher: starts and ends hosts.
    """

    def __init__(
        self,
        store: distributed.Store,
        names: Sequence[str],
        address: str,
        timeout: float,
        admission: Admission | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._store, self._address, self._timeout = store, address, timeout
        self._admission, self.launcher = admission, launcher or ByHand()
        self._finalizer = weakref.finalize(self, self.launcher.close)
        self._epoch = self._commands = 0
        self._awaited: tuple[str, list[str]] = ("wire", [])
        self._simulated = False
        self._caps: dict[str, Sequence[int]] = {}
        self._offered: dict[str, Sequence[Budget]] = {}
        self._memory = False  # whether hosts offer their memory beside their cards
        self._holds: weakref.ref[Model] | None = None
        self.gone: list[str] = []
        self.came: list[str] = []
        self._order = ["driver", *names]  # as hosts were first seen
        self.names = ["driver", *names]
        self.wire = self._group()

    # Constructors -------------------------------------------------------------------------

    @classmethod
    def listen(
        cls,
        address: str = "127.0.0.1:29500",
        *,
        hosts: int,
        secret: str | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        caps: Mapping[str, Sequence[int]] | None = None,
    ) -> Cluster:
        """Wait for hosts that run ``exkv cluster up ADDRESS``.

        Args:
            address: ``HOST:PORT`` of one interface of this machine; of another than loopback only
                with a secret.
            hosts: how many, besides this one.
            secret: the shared secret; None for EXKV_CLUSTER_SECRET.
            timeout: seconds that a message may take before its sender counts as dead; more than the
                slowest host's units take for a chunk.
            patience: seconds to wait for the hosts.
            caps: host name -> upper bounds in bytes for its devices in order; devices beyond the
                last are not used.

        Raises:
            ValueError: a malformed address, or a missing secret.
            OSError: the address is in use, or not this machine's.
            ClusterError: too few joined.
        """
        host, port = parse_address(address)
        secret = os.environ.get(SECRET, "") if secret is None else secret
        if not secret and not host.startswith("127."):
            raise ValueError(
                f"{address} can be reached from other machines: set {SECRET} to the same secret on "
                "all hosts"
            )
        made = cls._gather(listen(host, port), hosts, secret, timeout, patience, ByHand())
        made._caps = dict(caps or {})
        return made

    @classmethod
    def local(
        cls,
        devices: Sequence[str],
        *,
        timeout: float = 60.0,
        start: Start | None = None,
        names: Sequence[str] = (),
    ) -> Cluster:
        """Hosts as processes of this machine, for tests and trials; they end with this process.

        Args:
            devices: simulated devices of each host, in the format of EXKV_SIM_DEVICES; "" for
                this machine's real ones.
            start: starts a host; None for a new interpreter.
            names: of the hosts; host1, host2 and so on by default.
        """
        secret, listening = secrets.token_hex(16), listen("127.0.0.1", 0)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        names = names or [f"host{number + 1}" for number in range(len(devices))]
        cards = dict(zip(names, devices, strict=True))
        made = cls._launched(listening, secret, timeout, Processes(address, cards, secret, start))
        made._simulated = any(devices)
        return made

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        devices: Sequence[str] = (),
        folder: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        caps: Mapping[str, Sequence[int]] | None = None,
    ) -> Cluster:
        """Hosts on the other machines of a Ray cluster, one on each; Ray starts them, and restarts
        them when they die. Needs ``pip install "exkv[ray]"``.

        Args:
            address: of the Ray cluster, ``ray://HOST:10001`` or ``HOST:6379``; None for the one
                that this machine belongs to, or a new local one.
            devices: simulated devices of each host, as for :meth:`local`; for trials.
            folder: the checkpoint's folder on every machine; None for the driver's own path.
            caps: as for :meth:`listen`.

        Raises:
            ImportError: ray is not installed.
            ConnectionError: there is no Ray cluster at this address.
            ValueError: it has no other machine.
            ClusterError: a host did not join.
        """
        from .actors import Actors  # imports Ray

        actors = Actors(address, devices, None if folder is None else os.fspath(folder))
        listening = listen(actors.address(), 0)
        secret = secrets.token_hex(16)
        actors.rendezvous = "{}:{}".format(*listening.getsockname()), secret
        made = cls._launched(listening, secret, timeout, actors)
        made._simulated = any(devices)
        made._caps = dict(caps or {})
        return made

    @classmethod
    def from_torchrun(
        cls,
        *,
        folder: Path | None = None,
        timeout: float = 60.0,
        caps: Mapping[str, Sequence[int]] | None = None,
    ) -> Cluster:
        """The cluster of torchrun's processes. Rank 0 gets the cluster; the others become its hosts
        host1, host2 and so on, and exit when it ends. ``caps`` are as for :meth:`listen`.

        Raises:
            ValueError: torchrun did not start this process, or it runs on several machines and
                EXKV_CLUSTER_SECRET is not set. torchrun's store listens on all interfaces; the
                secret, the same on all machines, hides the keys in it. Nothing is encrypted.
            SystemExit: on every other rank, when the driver has ended.
        """
        missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
        if missing:
            raise ValueError(f"{', '.join(missing)} not set: start this process with torchrun")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keys = _torchrun_keys()

        def connect() -> distributed.Store:
            agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = distributed.TCPStore(
                host, port, is_master=not agents and rank == 0, wait_for_workers=False
            )
            return distributed.PrefixStore(keys, store)

        store, address = connect(), address_towards(host, port)
        if rank:
            store.wait(["timeout"])
            follow(store, connect, f"host{rank}", address, folder)
            raise SystemExit(0)
        store.set("timeout", str(timeout))
        made = cls(store, [f"host{other}" for other in range(1, size)], address, timeout)
        made._caps = dict(caps or {})
        return made

    @classmethod
    def _launched(
        cls, listening: socket.socket, secret: str, timeout: float, launcher: Launcher
    ) -> Cluster:
        """Gather hosts that the launcher starts; ends them all if one doesn't join."""
        try:
            hosts = launcher.start_missing([])
            if not hosts:
                raise ValueError("there is no machine but this one, and no devices were simulated")
            return cls._gather(listening, len(hosts), secret, timeout, 120.0, launcher)
        except BaseException:
            launcher.close()
            raise

    @classmethod
    def _gather(
        cls,
        listening: socket.socket,
        hosts: int,
        secret: str,
        timeout: float,
        patience: float,
        launcher: Launcher,
    ) -> Cluster:
        address = listening.getsockname()[0]
        store = serve_store(listening)
        store.set("timeout", str(timeout))
        announce(store, "driver")
        admission = Admission(store, secret)
        # host2 before host10, whatever the order of joining, so that plans are reproducible.
        names = sorted(admission.admit(hosts, patience), key=lambda name: (len(name), name))
        return cls(store, names, address, timeout, admission, launcher)

    def _group(self) -> Wire:
        set_group(self._store, self._epoch, self.names)
        where = self._address, self._timeout, self.launcher.has_ended
        return form_group(self._store, self._epoch, self.names, "driver", *where)

    # Commands -----------------------------------------------------------------------------

    @property
    def others(self) -> range:
        """The ranks of all processes but the driver."""
        return range(1, len(self.names))

    def tell(self, do: str, **args: Any) -> None:
        """Send a command to every host, without an answer."""
        self._send(do, [args] * len(self.others), "")

    def send(self, do: str, **args: Any) -> None:
        """Send a command to every host; :meth:`answers` waits for the answers."""
        self.send_each(do, [args] * len(self.others))

    def send_each(self, do: str, args: Sequence[dict[str, Any] | None]) -> None:
        """:meth:`send` with arguments for each host by rank; None skips a host."""
        self._commands += 1
        concerned = [n for n, its in zip(self.names[1:], args, strict=True) if its is not None]
        # A wait of minutes would exceed the wire's time-out, and the host would count as dead.
        where = f"answer/{self._commands}" if do in _SLOW else "wire"
        self._awaited = where, concerned
        self._send(do, args, where)

    def ask(self, do: str, **args: Any) -> list[Any]:
        """Send a command to every host and wait -> the results by rank."""
        self.send(do, **args)
        return self.answers()

    def ask_some(self, names: Collection[str], do: str, **args: Any) -> list[Any]:
        """:meth:`ask` only these hosts -> the results by rank."""
        self.send_each(do, [args if name in names else None for name in self.names[1:]])
        return self.answers()

    def _send(self, do: str, args: Sequence[dict[str, Any] | None], answer: str) -> None:
        for rank, its in zip(self.others, args, strict=True):
            if its is not None:
                self.wire.tell({"do": do, "args": its, "answer": answer}, rank)

    def answers(self) -> list[Any]:
        """Wait for the answers to the last command -> the results by rank.

        Raises:
            ClusterError: a host failed; all have answered.
            torch.OutOfMemoryError: a host ran out of memory; all have answered.
            WireError: a host is gone.
        """
        where, names = self._awaited
        if where == "wire":
            answers = [self.wire.hear(self.names.index(name)) for name in names]
        else:
            came = await_values(self._store, where, names, self._has_left)
            if missing := [name for name in names if name not in came]:
                raise WireError(f"{', '.join(missing)} sent no heartbeat or left the group")
            announce(self._store, "driver")
            answers = [loads(came[name]) for name in names]
            for name in names:
                self._store.delete_key(f"{where}/{name}")
        pairs = zip(names, answers, strict=True)
        raise_failures({name: each["failed"] for name, each in pairs if "failed" in each})
        return [answer["made"] for answer in answers]

    def _has_left(self, name: str) -> bool:
        """Whether a host has left this group: it ended, or it already waits for the next group
        since it couldn't reach all members."""
        return self.launcher.has_ended(name) or left_group(self._store, self._epoch, name)

    def offers(self, own: Sequence[Budget], *, now: bool = False) -> list[list[Budget]]:
        """Budgets of every process's devices by rank; the driver's are ``own``. If these include
        host memory beside cards, so do the others'.

        Args:
            now: ask every host again, which must have no model loaded; else only those whose
                budgets are unknown.

        Raises:
            ValueError: hosts' devices are simulated, and this process has none to plan by.
        """
        if self._simulated and not sim.enabled():
            raise ValueError(
                "hosts with simulated devices need a driver with some: set EXKV_SIM_DEVICES=16M, "
                'or call exkv.sim.enable("16M") first'
            )
        others, memory = self.names[1:], self._memory
        if own:
            self._memory = len(without_memory(own)) < len(own)
        now = now or self._memory != memory
        lacking = [name for name in others if now or name not in self._offered]
        if lacking:
            offered = self.ask_some(lacking, "offer", memory=self._memory)
            answers = zip(lacking, offered, strict=True)
            self._offered |= dict(answers)
        pairs = ((self._offered[name], self._caps.get(name)) for name in others)
        return [list(own), *(_capped(*pair) for pair in pairs)]

    @property
    def model(self) -> Model | None:
        """The model that the hosts have built; None if there is none, or it has been collected."""
        return None if self._holds is None else self._holds()

    @model.setter
    def model(self, model: Model | None) -> None:
        self._holds = None if model is None else weakref.ref(model)

    def spread(self, model: Model) -> None:
        """Distribute an unloaded model and its caches over these hosts; it becomes a
        ``ClusterModel``. Errors as of that."""
        spread(model, self)

    # Recovery -----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[str]:
        """Hosts that wait to join with the next plan, which ``model.replan()`` makes. Their secret
        is checked then."""
        return [] if self._admission is None else self._admission.waiting()

    def restore(self) -> list[str]:
        """Restart hosts that ended, if this program or Ray started them -> their names. They wait
        until the next plan admits them."""
        return self.launcher.start_missing(self.names[1:])

    def regroup(self, *, welcome: bool = False) -> dict[str, str]:
        """Form a new group of the remaining hosts after the wire broke; the others are added to
        ``gone``. Admits waiting hosts if one is gone, or if ``welcome`` is set.

        Returns:
            The failures on the remaining hosts, by name.
        """
        self.came = []
        for _ in range(_MOST_GROUPS):
            self.wire.close()
            self._epoch += 1
            others, ended = self.names[1:], self.launcher.has_ended
            there = roll_call(self._store, self._epoch, others, self._timeout, ended)
            lost = [name for name in others if name not in there]
            for name in lost:
                self.gone.append(name)
                self.launcher.end(name)
            self._name_members(list(there), welcome or bool(lost))
            try:
                self.wire = self._group()
            except WireError:
                continue
            return {name: failed for name, failed in there.items() if failed is not None}
        raise ClusterError(f"hosts {', '.join(self.names[1:])} can't reach each other")

    def _name_members(self, there: list[str], welcome: bool) -> None:
        """Set the members of the next group, in the order in which hosts first joined."""
        if welcome and self._admission is not None:
            new = self._admission.admit_waiting(there, self._epoch)
            self.came = [name for name in self.came if name in there] + new
            self._order += [name for name in new if name not in self._order]
            for name in new:
                self._offered.pop(name, None)
            there = [*there, *new]
        self.names = ["driver", *sorted(there, key=self._order.index)]

    def close(self) -> None:
        """Release the hosts; those that this process started end."""
        told = self.names[1:]
        try:
            for rank in self.others:
                self.wire.tell({"do": "end"}, rank)
        except WireError:
            told = []
        self.launcher.close(told)
        self.names = ["driver"]
        self._finalizer.detach()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _torchrun_keys() -> str:
    """An unguessable prefix for the keys in torchrun's store."""
    secret = os.environ.get(SECRET, "")
    if not secret and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "torchrun's store can be reached from other machines: set "
            f"{SECRET} to the same secret on all of them"
        )
    run = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return f"exkv/{digest(secret, *run)}"


def _capped(offer: Sequence[Budget], caps: Sequence[int] | None) -> list[Budget]:
    if caps is None:
        return list(offer)
    capped = [replace(budget, cap=cap) for budget, cap in zip(offer, caps, strict=False)]
    return [*capped, *(each for each in offer[len(capped) :] if each.device == CPU)]

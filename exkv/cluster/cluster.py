"""The driver's side of a cluster: its hosts, what they are told, and who is left when one dies."""

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

from .errors import ClusterError, WireError, raise_failures
from .host import follow
from .launchers import SECRET, ByHand, Launcher, Processes, Start
from .model import spread
from .rendezvous import (
    Admission,
    digest,
    left_group,
    listen,
    parse_address,
    roll_call,
    serve_store,
    set_group,
    what_comes,
)
from .status import announce
from .values import loads
from .wire import Wire, address_towards

#: Times that a group is made anew for one failure before the cluster is given up.
_MOST_GROUPS = 5
#: Commands that may take longer than a message: hosts answer through the store, and count as gone
#: only when they send no heartbeat.
_SLOW = frozenset(("build", "add_cache", "load", "load_adapter", "move", "unload"))


class Cluster:
    """Hosts that hold models together; this process drives them.

    >>> cluster = Cluster.listen("10.0.0.1:29500", hosts=1)  # exkv cluster up 10.0.0.1:29500
    >>> model = ClusterModel("path/to/model", cluster)
    >>> cache = Cache(model, max_seq_len=8192)
    >>> model.load_autosplit(cache)

    Attributes:
        names: of all processes in the group, the driver's first: a process's rank is its place.
        wire: the group.
        gone: hosts that died, in that order; one that has come back stays in the list.
        came: hosts that are in this group, and were not in the one before.
        launcher: what starts and ends hosts.
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
        self._holds: weakref.ref[Model] | None = None
        self.gone: list[str] = []
        self.came: list[str] = []
        self._order = ["driver", *names]  # as hosts were first seen
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
        caps: Mapping[str, Sequence[int]] | None = None,
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
            caps: name of a host -> bytes to use at most of its devices, one after the other; those
                behind the last are not used.

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
        """Hosts as processes of this machine, to try things out: they end with this one.

        Args:
            devices: of each host its simulated devices, as EXKV_SIM_DEVICES spells them; "" for
                those of this machine.
            start: how one is started; None for a new interpreter.
            names: of the hosts; host1, host2 and so on where there are none.
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
        """A host on each other machine of a Ray cluster, which Ray starts, and starts again where
        it dies: ``pip install "exkv[ray]"``.

        Args:
            address: of the Ray cluster, ``ray://HOST:10001`` or ``HOST:6379``; None for the one
                that this machine belongs to, or else a new one of this machine alone.
            devices: to try things out, of each host its simulated devices, as for :meth:`local`.
            folder: of the checkpoint on every machine; None for the driver's own path.
            caps: as for :meth:`listen`.

        Raises:
            ImportError: there is no package ray.
            ConnectionError: there is no Ray cluster at this address.
            ValueError: it has no other machine.
            ClusterError: a host did not come.
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
        """The cluster of the processes that torchrun started, on the one of rank 0; the others are
        its hosts, host1 and so on, until it ends, and then end, too. ``caps`` are as for
        :meth:`listen`.

        Raises:
            ValueError: torchrun did not start this process, or started some on other machines and
                EXKV_CLUSTER_SECRET is not set. torchrun's store listens on all interfaces; the
                secret, the same on all machines, hides the keys in it. Nothing is encrypted.
            SystemExit: on every other rank, when the driver has ended.
        """
        missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
        if missing:
            raise ValueError(f"torchrun sets {', '.join(missing)}, and this process has none")
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
        """Hosts that the launcher starts; all end where one doesn't come."""
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
        # However they come: host2 before host10, and a plan is the same every time.
        names = sorted(admission.admit(hosts, patience), key=lambda name: (len(name), name))
        return cls(store, names, address, timeout, admission, launcher)

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

    def send_each(self, do: str, args: Sequence[dict[str, Any] | None]) -> None:
        """:meth:`send` with arguments for each, in the order of their ranks; None for a host that
        is not concerned."""
        self._commands += 1
        concerned = [n for n, its in zip(self.names[1:], args, strict=True) if its is not None]
        # What may take minutes must not wait at the wire, which would count the host as gone.
        where = f"answer/{self._commands}" if do in _SLOW else "wire"
        self._awaited = where, concerned
        self._send(do, args, where)

    def ask(self, do: str, **args: Any) -> list[Any]:
        """Have every host carry a command out -> what each has made, by rank."""
        self.send(do, **args)
        return self.answers()

    def ask_some(self, names: Collection[str], do: str, **args: Any) -> list[Any]:
        """:meth:`ask` hosts of these names alone, and in the order of their ranks."""
        self.send_each(do, [args if name in names else None for name in self.names[1:]])
        return self.answers()

    def _send(self, do: str, args: Sequence[dict[str, Any] | None], answer: str) -> None:
        for rank, its in zip(self.others, args, strict=True):
            if its is not None:
                self.wire.tell({"do": do, "args": its, "answer": answer}, rank)

    def answers(self) -> list[Any]:
        """What every host says to the last command, by rank.

        Raises:
            ClusterError: one could not carry it out; all have answered.
            torch.OutOfMemoryError: one ran out of memory; likewise.
            WireError: one is gone.
        """
        where, names = self._awaited
        if where == "wire":
            answers = [self.wire.hear(self.names.index(name)) for name in names]
        else:
            came = what_comes(self._store, where, names, self._has_left)
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
        """Whether a host is no longer in this group: it ended, or waits for the next group, as one
        does that did not reach all members while the driver did."""
        return self.launcher.has_ended(name) or left_group(self._store, self._epoch, name)

    def offers(self, own: Sequence[Budget], *, now: bool = False) -> list[list[Budget]]:
        """What every process's devices offer a model, by rank; the driver's are given.

        Args:
            now: ask the hosts, on which no model may be loaded; else they are asked that have not
                said it so far.

        Raises:
            ValueError: hosts' devices are simulated, and this process has none to plan by.
        """
        if self._simulated and not sim.enabled():
            raise ValueError(
                "hosts with simulated devices need a driver with some: set EXKV_SIM_DEVICES=16M, "
                'or call exkv.sim.enable("16M") first'
            )
        others = self.names[1:]
        lacking = [name for name in others if now or name not in self._offered]
        if lacking:
            said = zip(lacking, self.ask_some(lacking, "offer"), strict=True)
            self._offered |= dict(said)
        pairs = ((self._offered[name], self._caps.get(name)) for name in others)
        return [list(own), *(_capped(*pair) for pair in pairs)]

    @property
    def model(self) -> Model | None:
        """The model that the hosts have built; None for none, and where nobody uses it any more."""
        return None if self._holds is None else self._holds()

    @model.setter
    def model(self, model: Model | None) -> None:
        self._holds = None if model is None else weakref.ref(model)

    def spread(self, model: Model) -> None:
        """Have a model that is not loaded, and its caches, lie over these hosts; it is a
        ``ClusterModel`` from then on. Errors as of that."""
        spread(model, self)

    # When one dies ------------------------------------------------------------------------

    @property
    def waiting(self) -> list[str]:
        """Hosts that ask to be taken in, and are with the next plan: ``model.replan()`` makes it.
        Whether they know the secret is found out then."""
        return [] if self._admission is None else self._admission.waiting()

    def restore(self) -> list[str]:
        """Start the hosts once more that ended, where this program or Ray had started them -> their
        names. They wait until they are taken in."""
        return self.launcher.start_missing(self.names[1:])

    def regroup(self, *, welcome: bool = False) -> dict[str, str]:
        """Make a new group of the hosts that are left, after the wire broke; ``gone`` has the
        others. Where one is gone, or ``welcome`` says so, hosts that wait are taken in.

        Returns:
            What failed on hosts that are there, by name.
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
        raise ClusterError(f"the hosts {', '.join(self.names[1:])} don't reach each other")

    def _name_members(self, there: list[str], welcome: bool) -> None:
        """Who is in the next group, in the order in which hosts were first seen."""
        if welcome and self._admission is not None:
            new = self._admission.admit_waiting(there, self._epoch)
            self.came = [name for name in self.came if name in there] + new
            self._order += [name for name in new if name not in self._order]
            for name in new:
                self._offered.pop(name, None)
            there = [*there, *new]
        self.names = ["driver", *sorted(there, key=self._order.index)]

    def close(self) -> None:
        """Let the hosts go; those that this process started end."""
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
    """The beginning of all keys in torchrun's store, which a stranger can't guess."""
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
    return [replace(budget, cap=cap) for budget, cap in zip(offer, caps, strict=False)]

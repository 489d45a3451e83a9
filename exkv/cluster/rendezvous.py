"""How hosts find each other: keys in a torch.distributed store, which the driver serves.

A joining host and the driver prove to each other by digests that they know the secret. Whenever the
members change, a new group is formed. docs/cluster.md says what is encrypted.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

import exkv_ext
from exkv.version import __version__

from .errors import ClusterError, LeftOut, WireError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two heartbeats, and seconds without one after which a host counts as dead.
BEAT, _PATIENCE = 0.5, 6.0
#: Seconds to wait for a store that isn't there yet.
_CONNECT = 60.0
#: Most join requests to examine; anybody who can reach the store can add some.
_MOST_REQUESTS = 1000


def parse_address(address: str) -> tuple[str, int]:
    """Host and port; ValueError if it isn't ``HOST:PORT``, or names all interfaces."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address: give HOST:PORT, e.g. 127.0.0.1:29500")
    if host in ("0.0.0.0", "::", "[::]", "*"):
        raise ValueError(
            f"{address}: a cluster listens on one interface, since traffic between hosts is not "
            "encrypted: give the address of the interface that reaches the other hosts"
        )
    return host, int(port)


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to this address only, for :func:`serve_store`; OSError if it is
    unavailable."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def serve_store(listening: socket.socket) -> distributed.Store:
    """Serve the store in this process, on a socket that the store takes over; by default it would
    listen on all interfaces."""
    host, port = listening.getsockname()
    store = distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        timeout=timedelta(seconds=_CONNECT),
    )
    return distributed.PrefixStore("exkv", store)


def connect_store(host: str, port: int, seconds: float = _CONNECT) -> distributed.Store:
    """Connect to a driver's store; waits up to ``seconds`` for it.

    Raises:
        ClusterError: nothing listens there.
    """
    _wait_for_listener(host, port, seconds)
    try:
        store = distributed.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=seconds)
        )
    except (RuntimeError, distributed.DistStoreError) as error:
        raise ClusterError(f"no driver answers at {host}:{port}: {error}") from None
    return distributed.PrefixStore("exkv", store)


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a port accepts connections; the store's own client would print a stack trace every
    few seconds meanwhile."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"no driver answers at {host}:{port} after {seconds:g} s ({error}): start it, "
                    "or check the address and the firewall"
                ) from None
            time.sleep(0.2)


def digest(secret: str, *parts: str) -> str:
    """Authenticate texts with the secret (HMAC, RFC 2104, with SHA-256)."""
    text = json.dumps(parts).encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Request:
    """A join request: the host's name, a nonce, the proof that it knows the secret, and its
    software versions."""

    name: str
    nonce: str
    proof: str
    build: Mapping[str, str]

    @classmethod
    def read(cls, text: bytes) -> Request | None:
        """Parse a request; None if it is malformed: anybody who reaches the store can write one."""
        try:
            values = json.loads(text)
            name, nonce, proof = (values[key] for key in ("name", "nonce", "proof"))
            build = values.get("build", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        texts = [name, nonce, proof, *(build.values() if isinstance(build, dict) else [None])]
        return cls(name, nonce, proof, build) if all(isinstance(x, str) for x in texts) else None


def requests(store: distributed.Store) -> Iterator[tuple[int, Request | None]]:
    """The newest :data:`_MOST_REQUESTS` join requests by number, oldest first. A host that died
    between taking a number and writing its request leaves a gap."""
    newest = store.add("joined", 0)
    for number in range(max(1, newest - _MOST_REQUESTS + 1), newest + 1):
        if store.check([f"join/{number}"]):
            yield number, Request.read(store.get(f"join/{number}"))


def own_build() -> dict[str, str]:
    """The software versions of this process that hosts of a cluster should share."""
    kernels = [exkv_ext.cpu_isa() or "no kernels"]
    kernels += ["CUDA"] if exkv_ext.loaded()["_cuda"] else []
    return {"exkv": __version__, "torch": torch.__version__, "kernels": " and ".join(kernels)}


class Admission:
    """The driver's side of joining.

    Args:
        secret: the shared secret.
    """

    def __init__(self, store: distributed.Store, secret: str) -> None:
        self._store, self._secret = store, secret
        self._challenge = secrets.token_hex(16)
        self._answered: set[int] = set()  # request numbers
        store.set("challenge", self._challenge)

    def admit(self, wanted: int, timeout: float) -> list[str]:
        """Wait for ``wanted`` hosts -> their names.

        Raises:
            ClusterError: fewer came within ``timeout`` seconds.
        """
        names: list[str] = []
        deadline = time.monotonic() + timeout
        while len(names) < wanted:
            if time.monotonic() > deadline:
                there = ", ".join(names) or "none"
                raise ClusterError(
                    f"{wanted} hosts were expected to join within {timeout:g} s; joined: {there}"
                )
            new = self._open()
            for number, request in new[:1]:  # a second one might exceed the number wanted
                names += self._welcome(number, request, names, 0)
            if not new:
                time.sleep(0.01)
        return names

    def waiting(self) -> list[str]:
        """The names of hosts that wait to join; their proofs are unchecked."""
        return [request.name for _, request in self._open() if request is not None]

    def admit_waiting(self, names: Sequence[str], epoch: int) -> list[str]:
        """Admit the hosts that wait and are still alive -> their names.

        Args:
            names: the present members.
            epoch: of the new hosts' first group.
        """
        came: list[str] = []
        while new := self._open():
            for number, request in new:
                if request is None or self._still_waits(number):
                    came += self._welcome(number, request, [*names, *came], epoch)
                self._answered.add(number)
        return came

    def _open(self) -> list[tuple[int, Request | None]]:
        """Unanswered requests."""
        return [pair for pair in requests(self._store) if pair[0] not in self._answered]

    def _still_waits(self, number: int) -> bool:
        before, deadline = self._store.add(f"waits/{number}", 0), time.monotonic() + 4 * BEAT
        while self._store.add(f"waits/{number}", 0) == before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _welcome(
        self, number: int, request: Request | None, names: Sequence[str], epoch: int
    ) -> list[str]:
        """Answer a request -> the host's name, if admitted."""
        self._answered.add(number)
        refusal = self._refusal(request, names)
        if refusal or request is None:
            self._store.set(f"welcome/{number}", json.dumps({"refused": refusal}))
            return []
        proof = digest(self._secret, "driver", request.nonce, self._challenge, str(epoch))
        self._store.set(f"welcome/{number}", json.dumps({"proof": proof, "epoch": epoch}))
        return [request.name]

    def _refusal(self, request: Request | None, names: Sequence[str]) -> str:
        """The reason to refuse a host; "" to admit it."""
        if request is None:
            return "its request can't be read"
        expected = digest(self._secret, "host", self._challenge, request.nonce, request.name)
        if not hmac.compare_digest(expected.encode(), request.proof.encode()):
            return "its secret differs from the driver's"
        if request.name in names or request.name == "driver":
            return f"a host {request.name!r} has joined already"
        own = own_build()
        if (version := request.build.get("exkv", "of an older version")) != own["exkv"]:
            return f"it runs exkv {version}, and the driver {own['exkv']}: install the same on both"
        for what in ("torch", "kernels"):
            if (its := request.build.get(what)) != own[what]:
                logger.warning(
                    "host %s has %s %s and the driver %s: its results may differ in the last bits",
                    request.name, what, its, own[what],
                )  # fmt: skip
        return ""


def join(store: distributed.Store, name: str, secret: str) -> int:
    """Ask to join, and wait for the answer -> the epoch of the first group.

    Raises:
        ClusterError: the driver refuses, doesn't know the secret itself, or is gone.
    """
    challenge, nonce = store.get("challenge").decode(), secrets.token_hex(16)
    proof = digest(secret, "host", challenge, nonce, name)
    number = store.add("joined", 1)
    request = {"name": name, "nonce": nonce, "proof": proof, "build": own_build()}
    store.set(f"join/{number}", json.dumps(request))
    answer = json.loads(_awaited(store, number))
    if "refused" in answer:
        raise ClusterError(f"the driver refuses host {name!r}: {answer['refused']}")
    epoch = int(answer.get("epoch", 0))
    expected = digest(secret, "driver", nonce, challenge, str(epoch))
    if not hmac.compare_digest(expected, str(answer["proof"])):
        raise ClusterError("the process that answers doesn't know the secret: it is not the driver")
    return epoch


def asking(store: distributed.Store) -> dict[int, str]:
    """Hosts that wait to join: request number -> name."""
    return {
        number: request.name
        for number, request in requests(store)
        if request is not None and not store.check([f"welcome/{number}"])
    }


def silent(
    store: distributed.Store, members: Collection[str], asking: Mapping[int, str]
) -> set[str]:
    """The members and waiting hosts that sent no heartbeat for a second."""
    keys = {f"beat/{name}": name for name in members}
    keys |= {f"waits/{number}": name for number, name in asking.items()}
    before = {key: store.add(key, 0) for key in keys}
    time.sleep(2 * BEAT)
    return {name for key, name in keys.items() if store.add(key, 0) == before[key]}


def _awaited(store: distributed.Store, number: int) -> bytes:
    """Wait for the driver's answer; a returning host gets it with the next plan."""
    key, beaten = f"welcome/{number}", 0.0
    try:
        while not store.check([key]):
            if time.monotonic() - beaten > BEAT:
                beaten = time.monotonic()
                store.add(f"waits/{number}", 1)
            time.sleep(0.01)
        return bytes(store.get(key))
    except RuntimeError:
        raise ClusterError("the driver is gone") from None


def beat(connect: Callable[[], distributed.Store], name: str) -> None:
    """Send heartbeats from a background thread until the store is gone, or the program ends."""
    over = threading.Event()

    def run() -> None:
        store = connect()
        while not over.is_set():
            try:
                store.add(f"beat/{name}", 1)
            except RuntimeError:
                return
            over.wait(BEAT)

    thread = threading.Thread(target=run, name="exkv-beat", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(_PATIENCE)

    # If the interpreter ends while a thread is in the store's native code, the process aborts.
    atexit.register(end)


class Heartbeats:
    """Hosts' heartbeats, as of the last look at each."""

    def __init__(self, store: distributed.Store) -> None:
        self._store = store
        self._last: dict[str, tuple[int, float]] = {}

    def silent(self, name: str) -> bool:
        """Whether no new heartbeat has come for :data:`_PATIENCE` seconds."""
        count, now = self._store.add(f"beat/{name}", 0), time.monotonic()
        if self._last.get(name, (-1, 0.0))[0] != count:
            self._last[name] = count, now
        return now - self._last[name][1] > _PATIENCE


# Groups -----------------------------------------------------------------------------------------


def set_group(store: distributed.Store, epoch: int, names: Sequence[str]) -> None:
    """Publish the members of the next group, rank 0 first."""
    store.set(f"group/{epoch}", json.dumps(list(names)))
    store.set("epoch", str(epoch))


def group_now(store: distributed.Store) -> list[str]:
    """The members of the newest group; [] while the driver waits for hosts."""
    if not store.check(["epoch"]):
        return []
    return [str(name) for name in json.loads(store.get(f"group/{int(store.get('epoch'))}"))]


def members(store: distributed.Store, epoch: int, name: str, timeout: float) -> list[str]:
    """Wait for the members of this host's group, by rank.

    Raises:
        LeftOut: the group presumed it dead.
        ClusterError: the driver is gone.
    """
    try:
        store.wait([f"group/{epoch}"], timedelta(seconds=timeout))
        names = json.loads(store.get(f"group/{epoch}"))
    except RuntimeError:
        raise ClusterError("the driver is gone") from None
    if name not in names:
        raise LeftOut(f"host {name!r} sent no heartbeat for too long, and was dropped")
    return [str(member) for member in names]


def while_alive(
    store: distributed.Store,
    names: Sequence[str],
    ended: Callable[[str], bool],
    make: Callable[[], T],
) -> T:
    """Return or raise what ``make`` does, unless one of these hosts dies meanwhile: connecting to a
    dead host waits for minutes.

    Raises:
        WireError: a host has ended, or sends no heartbeat; ``make`` continues in a thread of its
            own, and its result is dropped.
        ClusterError: the driver is gone.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="exkv-connect", daemon=True).start()
    beats = Heartbeats(store)
    while not wait([made], timeout=0.05).done:
        try:
            silent = [name for name in names if ended(name) or beats.silent(name)]
        except RuntimeError:
            raise ClusterError("the driver is gone") from None
        if silent:
            raise WireError(f"{', '.join(silent)} died while the hosts connected")
    return made.result()


def report(store: distributed.Store, epoch: int, name: str, failed: str | None) -> None:
    """Register for the next group, with this host's failure in the last one, if any."""
    try:
        store.set(f"here/{epoch}/{name}", json.dumps({"failed": failed}))
    except RuntimeError:
        raise ClusterError("the driver is gone") from None


def left_group(store: distributed.Store, epoch: int, name: str) -> bool:
    """Whether a host of this epoch's group has already registered for the next one."""
    return store.check([f"here/{epoch + 1}/{name}"])


def roll_call(
    store: distributed.Store,
    epoch: int,
    names: Sequence[str],
    timeout: float,
    ended: Callable[[str], bool],
) -> dict[str, str | None]:
    """Wait for hosts to register for the next group -> each one's failure, if any. They have
    ``timeout`` seconds while they send heartbeats. ``ended`` is as for :func:`await_values`."""
    there = await_values(store, f"here/{epoch}", names, ended, timeout + _PATIENCE)
    return {name: json.loads(text)["failed"] for name, text in there.items()}


def await_values(
    store: distributed.Store,
    what: str,
    names: Sequence[str],
    ended: Callable[[str], bool],
    limit: float = float("inf"),
) -> dict[str, bytes]:
    """Wait for hosts' values under ``what/NAME`` in the store -> values by name. Leaves out hosts
    that have ended according to ``ended``, that send no heartbeat for :data:`_PATIENCE` seconds, or
    that take longer than ``limit`` seconds."""
    beats = Heartbeats(store)
    missing, started = set(names), time.monotonic()
    while missing and time.monotonic() - started < limit:
        missing = {name for name in missing if not store.check([f"{what}/{name}"])}
        if all([beats.silent(name) or ended(name) for name in missing]):
            break
        time.sleep(0.01)
    return {name: store.get(f"{what}/{name}") for name in names if name not in missing}

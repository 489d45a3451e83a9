"""Machines for tests: network namespaces that a bridge joins, with delay, loss and cables that can
be cut. It takes root on Linux, and ``ip`` (iproute2).

Delay and loss are ``tc netem``'s. Where the kernel has none, a process stands in for it: it carries
frames between two TAP devices, each after the delay, and drops some.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    try:
        _ip("netns", "add", f"exkv{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    _ip("netns", "delete", f"exkv{os.getpid()}")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How a namespace is reached.

    Attributes:
        delay: seconds for each direction.
        loss: share of frames that are lost, in each direction.
    """

    delay: float = 0.0
    loss: float = 0.0


@contextlib.contextmanager
def network(*links: Link) -> Iterator[Network]:
    """Namespaces 1, 2, ... on a bridge, by such links. They go when it is left."""
    made = Network()
    try:
        made.build(links)
        yield made
    finally:
        made.close()


class Network:
    """See :func:`network`.

    Attributes:
        driver: the address of the bridge, which is this process's own machine.
        how: what makes delay and loss.
    """

    def __init__(self) -> None:
        self._name = f"exkv{os.getpid() % 100_000}"  # several may be there at once
        self._prefix = f"10.213.{os.getpid() % 250}"
        self.driver = f"{self._prefix}.254"
        self._relays: list[int] = []
        self._names: list[str] = []
        self.how = "nothing"

    def build(self, links: tuple[Link, ...]) -> None:
        _ip("link", "add", self._name, "type", "bridge")
        _ip("address", "add", f"{self.driver}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for number, link in enumerate(links, start=1):
            name, inside, outside = self._ends(number)
            _ip("netns", "add", name)
            self._names.append(name)
            self._join(name, inside, outside, link)
            _ip("-n", name, "address", "add", f"{self._prefix}.{number}/24", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "set", outside, "master", self._name)
            _ip("link", "set", outside, "up")

    def _ends(self, number: int) -> tuple[str, str, str]:
        """A namespace, and the ends of its cable, in it and at the bridge."""
        return f"{self._name}n{number}", f"{self._name}i{number}", f"{self._name}o{number}"

    def _join(self, name: str, inside: str, outside: str, link: Link) -> None:
        """Lay a cable."""
        _ip("link", "add", outside, "type", "veth", "peer", inside, "netns", name)
        if link == Link():
            return
        try:
            for where, device in (([], outside), (["-n", name], inside)):
                delay = ["delay", f"{link.delay * 1000}ms", "loss", f"{link.loss:.2%}"]
                _run("tc", *where, "qdisc", "add", "dev", device, "root", "netem", *delay)
            self.how = "tc netem"
        except (subprocess.CalledProcessError, FileNotFoundError):
            _ip("link", "delete", outside)
            self._relay(inside, outside, name, link)
            self.how = "a relay in user space, since the kernel has no netem"

    def _relay(self, inside: str, outside: str, name: str, link: Link) -> None:
        ends = _tap(inside), _tap(outside)
        _ip("link", "set", inside, "netns", name)
        if pid := os.fork():
            self._relays.append(pid)
            for end in ends:
                os.close(end)
            return
        try:
            _carry(ends, link)
        finally:
            os._exit(0)

    def enter(self, number: int) -> None:
        """Have this process, which has no threads, live in a namespace from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._ends(number)[0]}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self, number: int) -> None:
        """Pull a namespace's cable."""
        _ip("link", "set", self._ends(number)[2], "down")

    def mend(self, number: int) -> None:
        _ip("link", "set", self._ends(number)[2], "up")

    def close(self) -> None:
        for pid in self._relays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for number, name in enumerate(self._names, start=1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", self._ends(number)[2])
            _ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._name)


def _tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _carry(ends: tuple[int, int], link: Link) -> None:
    """Bring frames from each end to the other, until killed."""
    chance, under_way, count = random.Random(1), [], 0
    to = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        wait = None if not under_way else max(under_way[0][0] - time.monotonic(), 0.0)
        for end in select.select(ends, [], [], wait)[0]:
            frame, count = os.read(end, 65536), count + 1
            if chance.random() >= link.loss:
                heapq.heappush(under_way, (time.monotonic() + link.delay, count, to[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # the cable is cut
                os.write(end, frame)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)

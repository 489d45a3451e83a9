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

#: Of the bridge, which is this process's machine, and of namespace number i.
DRIVER, HOST = "10.213.7.254", "10.213.7.{}"
_BRIDGE, _NAMESPACE = "exkvbr", "exkvns{}"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    try:
        _ip("netns", "add", "exkvprobe")
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    _ip("netns", "delete", "exkvprobe")
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
    """See :func:`network`."""

    def __init__(self) -> None:
        self._relays: list[int] = []
        self._names: list[str] = []
        self.how = "veth"

    def build(self, links: tuple[Link, ...]) -> None:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{DRIVER}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for number, link in enumerate(links, start=1):
            name = _NAMESPACE.format(number)
            _ip("netns", "add", name)
            self._names.append(name)
            self._join(number, name, link)
            _ip("-n", name, "address", "add", f"{HOST.format(number)}/24", "dev", f"exkvin{number}")
            _ip("-n", name, "link", "set", f"exkvin{number}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "set", f"exkvout{number}", "master", _BRIDGE)
            _ip("link", "set", f"exkvout{number}", "up")

    def _join(self, number: int, name: str, link: Link) -> None:
        """A cable from ``exkvin`` in the namespace to ``exkvout`` here."""
        inside, outside = f"exkvin{number}", f"exkvout{number}"
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
        with open(f"/run/netns/{_NAMESPACE.format(number)}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self, number: int) -> None:
        """Pull a namespace's cable."""
        _ip("link", "set", f"exkvout{number}", "down")

    def mend(self, number: int) -> None:
        _ip("link", "set", f"exkvout{number}", "up")

    def close(self) -> None:
        for pid in self._relays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for number, name in enumerate(self._names, start=1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", f"exkvout{number}")
            _ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", _BRIDGE)


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

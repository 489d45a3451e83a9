"""Launchers start hosts, detect their end, and end them: by hand (``exkv cluster up``), as local
processes, or by Ray (``actors.py``)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeAlias

#: Seconds for a process to exit by itself.
_GRACE = 10.0
#: The environment variable with the cluster's shared secret.
SECRET = "EXKV_CLUSTER_SECRET"
#: Starts a host on this machine from address, name, simulated devices and secret; returns its pid.
Start: TypeAlias = Callable[[str, str, str, str], int]


class Launcher(Protocol):
    """Starts and ends hosts by name; it may not know all of them."""

    def has_ended(self, name: str) -> bool:
        """Whether a host is known to have ended."""

    def end(self, name: str) -> None:
        """End a host that no longer belongs to the cluster, if possible."""

    def start_missing(self, present: list[str]) -> list[str]:
        """Restart the hosts that aren't among these -> their names."""

    def close(self, told: Collection[str] = ()) -> None:
        """End all hosts; those in ``told`` have been told to, and exit by themselves."""


class ByHand:
    """Hosts that users start and end."""

    def has_ended(self, name: str) -> bool:
        return False

    def end(self, name: str) -> None:
        """Do nothing: the host notices by itself."""

    def start_missing(self, present: list[str]) -> list[str]:
        return []

    def close(self, told: Collection[str] = ()) -> None:
        """Do nothing: hosts exit by themselves after the driver."""


class Processes:
    """Hosts as processes of this machine.

    Args:
        address: the driver's.
        devices: name -> simulated devices, "" for this machine's real ones.
        start: starts a host; None for a new interpreter.

    Attributes:
        pids: of the hosts started and not yet ended.
    """

    def __init__(
        self, address: str, devices: Mapping[str, str], secret: str, start: Start | None
    ) -> None:
        self._address, self._devices, self._secret = address, dict(devices), secret
        self._start = start or _spawn
        self.pids: dict[str, int] = {}

    def has_ended(self, name: str) -> bool:
        return name in self.pids and _is_over(self.pids[name])

    def end(self, name: str) -> None:
        if name in self.pids:
            _end(self.pids.pop(name))

    def start_missing(self, present: list[str]) -> list[str]:
        missing = [name for name in self._devices if name not in present]
        for name in missing:
            if name not in self.pids or self.has_ended(name):
                cards = self._devices[name]
                self.pids[name] = self._start(self._address, name, cards, self._secret)
        return missing

    def close(self, told: Collection[str] = ()) -> None:
        deadline = time.monotonic() + _GRACE
        while any(not self.has_ended(name) for name in told) and time.monotonic() < deadline:
            time.sleep(0.005)
        for name in list(self.pids):
            self.end(name)


def _spawn(address: str, name: str, devices: str, secret: str) -> int:
    environment = {**os.environ, SECRET: secret, "EXKV_SIM_DEVICES": devices}
    command = [sys.executable, "-m", "exkv", "cluster", "up", address, "--name", name]
    with tempfile.TemporaryFile() as nothing:
        child = subprocess.Popen(command, env=environment, stdin=nothing)
    child.returncode = 0  # keep Popen from waiting for it: _end does
    return child.pid


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # reaped already
        os.waitpid(pid, 0)


def _is_over(pid: int) -> bool:
    try:
        # WNOWAIT leaves the zombie, so that its pid is not reused.
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped already
        return True
    return state is not None

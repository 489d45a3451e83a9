"""What starts hosts, sees that they have ended, and ends them: nobody, where somebody runs ``exkv
cluster up`` by hand; this program, for processes beside it; or Ray (``actors.py``)."""

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

#: Seconds that a process has to end by itself.
_LEAVE = 10.0
#: The environment variable with the secret that all hosts of a cluster know.
SECRET = "EXKV_CLUSTER_SECRET"
#: Starts a host on this machine, from the address, its name, its simulated devices and the secret;
#: returns the process's id.
Start: TypeAlias = Callable[[str, str, str, str], int]


class Launcher(Protocol):
    """Hosts by their names, of which some may be unknown to it."""

    def has_ended(self, name: str) -> bool:
        """Whether a host is known to be no more."""

    def end(self, name: str) -> None:
        """A host belongs to the cluster no longer, whatever it does: end it, where that can be."""

    def start_missing(self, present: list[str]) -> list[str]:
        """Start the hosts once more that aren't among these -> their names."""

    def close(self, told: Collection[str] = ()) -> None:
        """End all; those of these names were told to, and do so by themselves."""


class ByHand:
    """For hosts that somebody else starts and ends."""

    def has_ended(self, name: str) -> bool:
        return False

    def end(self, name: str) -> None:
        """It finds out by itself."""

    def start_missing(self, present: list[str]) -> list[str]:
        return []

    def close(self, told: Collection[str] = ()) -> None:
        """They end by themselves when the driver has."""


class Processes:
    """Hosts that are processes of this machine.

    Args:
        address: where the driver listens.
        devices: name -> its simulated devices, "" for those of this machine.
        start: starts one; None for a new interpreter.

    Attributes:
        pids: of the hosts that were started and not ended by this.
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
        deadline = time.monotonic() + _LEAVE
        while any(not self.has_ended(name) for name in told) and time.monotonic() < deadline:
            time.sleep(0.005)
        for name in list(self.pids):
            self.end(name)


def _spawn(address: str, name: str, devices: str, secret: str) -> int:
    environment = {**os.environ, SECRET: secret, "EXKV_SIM_DEVICES": devices}
    command = [sys.executable, "-m", "exkv", "cluster", "up", address, "--name", name]
    with tempfile.TemporaryFile() as nothing:
        child = subprocess.Popen(command, env=environment, stdin=nothing)
    child.returncode = 0  # this file waits for it
    return child.pid


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # it was waited for
        os.waitpid(pid, 0)


def _is_over(pid: int) -> bool:
    try:
        # It stays there to be waited for, so that nothing else gets its number.
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it was waited for
        return True
    return state is not None


__all__ = ["SECRET", "ByHand", "Launcher", "Processes", "Start"]

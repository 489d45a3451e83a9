"""A host other than the driver: it joins the cluster and runs the driver's commands until the
driver ends.

>>> python -m exkv cluster up 10.0.0.1:29500 --name b
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from exkv.errors import is_out_of_memory

from .errors import ClusterError, LeftOut, WireError
from .launchers import SECRET
from .rendezvous import (
    beat,
    connect_store,
    join,
    members,
    parse_address,
    report,
)
from .replica import COMMANDS, Replica
from .status import announce
from .values import dumps
from .wire import Wire, address_towards, form_group

logger = logging.getLogger(__name__)

#: Seconds that a host waits for the driver to form a new group, beyond the wire's time-out.
_REGROUP = 120.0


def serve(
    address: str,
    name: str,
    *,
    folder: Path | None = None,
    stream: bool = False,
    secret: str | None = None,
) -> None:
    """Be a host of the driver at ``HOST:PORT`` until the driver ends.

    Args:
        folder: the checkpoint's folder here; None for the driver's own path.
        stream: have the driver send weights even if there is a copy here.
        secret: the shared secret; None for EXKV_CLUSTER_SECRET.

    Raises:
        ClusterError: the driver refuses this host, can't be reached, or died.
    """
    host, port = parse_address(address)
    secret = os.environ.get(SECRET, "") if secret is None else secret
    store = connect_store(host, port)
    announce(store, name)
    epoch = join(store, name, secret)
    beat(lambda: connect_store(host, port), name)
    while True:
        try:
            made = Follower(store, name, address_towards(host, port), epoch)
            made.run(folder, stream=stream)
            return
        except LeftOut as error:
            logger.warning("%s; it asks to join again", error)
        epoch = join(store, name, secret)


def follow(
    store: distributed.Store,
    connect: Callable[[], distributed.Store],
    name: str,
    address: str,
    folder: Path | None = None,
) -> None:
    """Run the loop of a host that needs no admission, such as one under torchrun."""
    beat(connect, name)
    Follower(store, name, address, 0).run(folder)


class Follower:
    """Runs the driver's commands.

    If a command without an answer fails, the host leaves the group: every process notices it on the
    wire, and they form the next group, in which the driver learns the reason.
    """

    def __init__(self, store: distributed.Store, name: str, address: str, epoch: int) -> None:
        self._store, self._name, self._address = store, name, address
        self._epoch = epoch
        self._timeout = float(store.get("timeout"))

    def _join_group(self) -> Wire:
        names = members(self._store, self._epoch, self._name, self._timeout + _REGROUP)
        return form_group(self._store, self._epoch, names, self._name, self._address, self._timeout)

    def run(self, folder: Path | None = None, *, stream: bool = False) -> None:
        """Be a host until the driver ends it; releases all memory. ``folder`` and ``stream`` are as
        for :func:`serve`.

        Raises:
            LeftOut: the group went on without this host.
            ClusterError: the driver is gone.
        """
        replica = Replica(self._join_next_group(None), folder, stream=stream)
        try:
            self._run_commands(replica)
        finally:
            replica.close()

    def _run_commands(self, replica: Replica) -> None:
        while True:
            try:
                command = replica.wire.hear(0, idle=True)
                if command["do"] == "end":
                    return
                failed = self._execute(replica, command)
            except WireError:
                failed = None
            else:
                if failed is None:
                    continue
            replica.wire.close()
            self._epoch += 1
            report(self._store, self._epoch, self._name, failed)
            replica.wire = self._join_next_group(failed)

    def _execute(self, replica: Replica, command: dict[str, Any]) -> str | None:
        """Run a command -> the failure because of which the host must leave the group, if any."""
        do, args = command["do"], command["args"]
        if do not in COMMANDS:
            raise ClusterError(f"unknown command {do!r}: the driver runs another version of exkv")
        try:
            answer = {"made": getattr(replica, do)(**args)}
        except WireError:
            raise
        except Exception as error:
            if do in ("forward", "rebuild") or not command["answer"]:
                logger.warning("%s failed: %s", do, error)
                return f"{_kind(error)}{error}"
            answer = {"failed": f"{_kind(error)}{error}"}
        if command["answer"] == "wire":
            replica.wire.tell(answer, 0)
        elif command["answer"]:
            announce(self._store, self._name)
            self._store.set(f"{command['answer']}/{self._name}", dumps(answer).decode())
        return None

    def _join_next_group(self, failed: str | None) -> Wire:
        """Join the next group, or a later one if members are missing."""
        while True:
            try:
                return self._join_group()
            except WireError:
                self._epoch += 1
                report(self._store, self._epoch, self._name, failed)


def _kind(error: Exception) -> str:
    """The prefix by which the driver recognizes the kind of a failure."""
    return "out of memory: " if is_out_of_memory(error) else ""

"""A host that isn't the driver: it joins, and does what the driver says until that one ends.

>>> python -m exkv cluster up 10.0.0.1:29500 --name b
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from .errors import ClusterError, LeftOut, WireError
from .launchers import SECRET
from .rendezvous import beat, connect_store, join, parse_address, rank_in, report
from .replica import COMMANDS, Replica
from .status import announce
from .values import dumps
from .wire import Wire, address_towards

logger = logging.getLogger(__name__)

#: Seconds that a host waits for the driver to make a new group, beside the wire's time-out.
_REGROUP = 120.0


def serve(
    address: str,
    name: str,
    *,
    folder: Path | None = None,
    stream: bool = False,
    secret: str | None = None,
) -> None:
    """Be a host of the driver at ``HOST:PORT`` until it ends.

    Args:
        folder: of the checkpoint here; None for the driver's own path.
        stream: have the driver send weights, also where a copy lies here.
        secret: None for that of the environment.

    Raises:
        ClusterError: it refuses this host, is not there, or died.
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
            logger.warning("%s; it asks to be taken in again", error)
        epoch = join(store, name, secret)


def follow(
    store: distributed.Store,
    connect: Callable[[], distributed.Store],
    name: str,
    address: str,
    folder: Path | None = None,
) -> None:
    """The loop of a host that is known from the start."""
    beat(connect, name)
    Follower(store, name, address, 0).run(folder)


class Follower:
    """Carries the driver's commands out.

    A command that fails in a way that the driver could not foresee leaves the group: every process
    learns of it from the wire, and they meet again in the next one, where the driver hears why.
    """

    def __init__(self, store: distributed.Store, name: str, address: str, epoch: int) -> None:
        self._store, self._name, self._address = store, name, address
        self._epoch = epoch
        self._timeout = float(store.get("timeout"))

    def _meet(self) -> Wire:
        rank, size = rank_in(self._store, self._epoch, self._name, self._timeout + _REGROUP)
        prefix = distributed.PrefixStore(f"wire/{self._epoch}", self._store)
        return Wire(prefix, rank, size, self._address, self._timeout)

    def run(self, folder: Path | None = None, *, stream: bool = False) -> None:
        """Be a host until the driver says otherwise; nothing stays allocated. ``folder`` and
        ``stream`` are as for :func:`serve`.

        Raises:
            LeftOut: the others went on without this host.
            ClusterError: the driver is gone.
        """
        replica = Replica(self._meet_until_all_do(None), folder, stream=stream)
        try:
            self._obey(replica)
        finally:
            replica.let_go()

    def _obey(self, replica: Replica) -> None:
        while True:
            try:
                command = replica.wire.hear(0, idle=True)
                if command["do"] == "end":
                    return
                failed = self._carry_out(replica, command)
            except WireError:
                failed = None
            else:
                if failed is None:
                    continue
            replica.wire.close()
            self._epoch += 1
            report(self._store, self._epoch, self._name, failed)
            replica.wire = self._meet_until_all_do(failed)

    def _carry_out(self, replica: Replica, command: dict[str, Any]) -> str | None:
        """What failed so that the group must meet again, if anything did."""
        do, args = command["do"], command["args"]
        if do not in COMMANDS:
            raise ClusterError(f"the driver wants {do!r}, which this version of exkv doesn't know")
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

    def _meet_until_all_do(self, failed: str | None) -> Wire:
        """The next group; the one after it where somebody is missing, and so on."""
        while True:
            try:
                return self._meet()
            except WireError:
                self._epoch += 1
                report(self._store, self._epoch, self._name, failed)


def _kind(error: Exception) -> str:
    """What the driver tells kinds of failures by."""
    return "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""


__all__ = ["SECRET", "ClusterError", "Follower", "follow", "serve"]

"""The status of a running cluster: ``exkv cluster status HOST:PORT``, from any machine that reaches
the driver. Each host publishes its free memory in the driver's store when it asks to join, and
whenever it changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch import distributed

from exkv.planning import make_budgets
from exkv.sizes import human

from .rendezvous import asking, connect_store, group_now, parse_address, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """A host's state, and a line for each of its devices."""

    name: str
    state: str
    devices: tuple[str, ...]


def own_devices() -> tuple[str, ...]:
    """This machine's devices and their free memory, a line each."""
    return tuple(
        f"{budget.device}: {human(budget.limit)} of {human(budget.capacity)} free"
        for budget in make_budgets(None)
    )


def announce(store: distributed.Store, name: str) -> None:
    """Publish this machine's free memory."""
    store.set(f"offers/{name}", json.dumps(own_devices()))


def cluster_status(address: str, *, patience: float = 5.0) -> list[HostStatus]:
    """The hosts of the driver at ``HOST:PORT``: the driver, the members, then those that wait for
    the next plan. Takes a second, to watch for heartbeats.

    Args:
        patience: seconds to wait for the driver.

    Raises:
        ValueError: not an address.
        ClusterError: nothing listens there.
    """
    store = connect_store(*parse_address(address), seconds=patience)
    members, asked = group_now(store), asking(store)
    quiet = silent(store, members[1:], asked)  # not the driver: it serves the store
    states = {name: "sends no heartbeat" if name in quiet else "there" for name in members}
    for name in asked.values():
        if name not in quiet and name not in states:
            states[name] = "waits for the next plan"
    return [
        HostStatus(name=name, state=state, devices=_devices(store, name))
        for name, state in states.items()
    ]


def _devices(store: distributed.Store, name: str) -> tuple[str, ...]:
    key = f"offers/{name}"
    return tuple(map(str, json.loads(store.get(key)))) if store.check([key]) else ()

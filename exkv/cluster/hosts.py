"""One plan for the devices of several hosts, and each process's part of it.

A plan identifies a device by its host and its name there; the driver's host name is "".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from exkv.devices import ELSEWHERE, Memory
from exkv.loading.report import DeviceReport
from exkv.planning import Budget, Place, Plan
from exkv.planning.plan import PlacedUnit, role_of

_UNKNOWN = Memory(capacity=0, in_use=0, in_use_by_others=0)


def host_name(names: Sequence[str], rank: int) -> str:
    """The host name of a rank in plans."""
    return names[rank] if rank else ""


def by_host(names: Sequence[str], offers: Sequence[Sequence[Budget]]) -> tuple[Budget, ...]:
    """The budgets of all processes, given by rank, as one list."""
    return tuple(
        replace(budget, host=host_name(names, rank))
        for rank, offer in enumerate(offers)
        for budget in offer
    )


def owners(plan: Plan, names: Sequence[str]) -> list[int]:
    """Each unit's rank in a plan."""
    ranks = {host_name(names, rank): rank for rank in range(len(names))}
    return [ranks[unit.host] for unit in plan.units]


def part(plan: Plan, host: str) -> Plan:
    """A process's part of a plan: its own units with local device names, all others elsewhere."""
    ledgers = (each for each in plan.ledgers if each.place.host == host)
    return replace(
        plan,
        units=tuple(_here(unit, host) for unit in plan.units),
        ledgers=tuple(replace(each, budget=replace(each.budget, host="")) for each in ledgers),
        role=role_of(host, plan.places),
    )


def reported(
    plan: Plan, names: Sequence[str], measured: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[DeviceReport, ...]:
    """A report of a plan, one row for each device that holds units.

    Args:
        names: the processes by rank.
        measured: each other host's answer to a load; empty if unknown.
    """
    known = {
        Place(torch.device(row["device"]), name): row["measured"]
        for name, rows in zip(names[1:], measured, strict=False)
        for row in rows
    }
    return tuple(
        DeviceReport(ledger=ledger, measured=known.get(ledger.place, {}), after=_UNKNOWN)
        for ledger in plan.ledgers
        if ledger.units
    )


def _here(unit: PlacedUnit, host: str) -> PlacedUnit:
    if unit.host == host:
        return replace(unit, host="")
    device: torch.device = ELSEWHERE
    return PlacedUnit(name=unit.name, device=device, weights=0, cache=0, workspace=0, logits=0)

"""One plan for the devices of several hosts, and what of it each process carries out.

A plan knows a device by its host and its name there; the driver is the host without a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from exkv.devices import ELSEWHERE
from exkv.planning import Budget, Plan
from exkv.planning.plan import PlacedUnit, role_of


def host_name(names: Sequence[str], rank: int) -> str:
    """What plans call the process of this rank."""
    return names[rank] if rank else ""


def by_host(names: Sequence[str], offers: Sequence[Sequence[Budget]]) -> tuple[Budget, ...]:
    """What processes offer, by rank, as one list."""
    return tuple(
        replace(budget, host=host_name(names, rank))
        for rank, offer in enumerate(offers)
        for budget in offer
    )


def owners(plan: Plan, names: Sequence[str]) -> list[int]:
    """The rank of the process that each unit of a plan is in."""
    ranks = {host_name(names, rank): rank for rank in range(len(names))}
    return [ranks[unit.host] for unit in plan.units]


def part(plan: Plan, host: str) -> Plan:
    """What of a plan a process carries out: its own units in its own names of devices, and all
    others elsewhere."""
    ledgers = (each for each in plan.ledgers if each.place.host == host)
    return replace(
        plan,
        units=tuple(_here(unit, host) for unit in plan.units),
        ledgers=tuple(replace(each, budget=replace(each.budget, host="")) for each in ledgers),
        role=role_of(host, plan.places),
    )


def _here(unit: PlacedUnit, host: str) -> PlacedUnit:
    if unit.host == host:
        return replace(unit, host="")
    device: torch.device = ELSEWHERE
    return PlacedUnit(name=unit.name, device=device, weights=0, cache=0, workspace=0, logits=0)

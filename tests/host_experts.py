"""Loads models with chosen experts in host memory, whatever a plan would choose."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from exkv import Cache, Model
from exkv.loading import loader


def hosted(model: Model, placement: str) -> dict[str, tuple[int, ...]]:
    """Experts of each unit in host memory."""
    found = {}
    for unit in model.units:
        count = len(unit.expert_bytes)
        of = {"all": (), "half": range(unit.index % 2, count, 2), "one": range(1, count)}
        found[unit.name] = tuple(of.get(placement, range(count))) if count else ()
    return found


def load(model: Model, cache: Cache, placement: str, way=None, **options) -> None:
    """Load it with these experts in host memory."""
    experts, planned = hosted(model, placement), loader.planned
    model.set_host_experts(experts)

    def with_experts(scenario):
        scenario, (plan,), costs = planned(scenario)
        units = tuple(replace(u, host_experts=experts[u.name]) for u in plan.units)
        return scenario, (replace(plan, units=units),), costs

    with mock.patch.object(loader, "planned", with_experts):
        way(**options) if way else model.load_autosplit(cache)

"""The devices of a load's units: as planned, until a device turns out to be full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from exkv import devices
from exkv.errors import PlacementError
from exkv.planning import Budget, Plan, UnitCost
from exkv.planning.ledgers import plan_where
from exkv.planning.plan import CPU, Place
from exkv.planning.search.experts import with_experts_apart
from exkv.planning.search.placement import place_units
from exkv.sizes import human


class Route:
    """A device for every unit of a model.

    Args:
        plan: the plan to begin with.
        costs: of the units, in their order.

    Attributes:
        devices, costs: of the units, in their order.
    """

    def __init__(self, plan: Plan, costs: Sequence[UnitCost]) -> None:
        self.devices = list(plan.devices)
        self._plan, self.costs = plan, list(costs)
        #: Of the devices that remaining units may be placed on: not of a host that has experts
        #: only, for which no calls are planned.
        self._budgets = [
            replace(each.budget, in_use=each.budget.in_use + each.transport)
            for each in plan.ledgers
            if all(each.device.type in cost.workspace for cost in costs)
        ]

    def carried_out(self) -> Plan:
        """The plan of the final placement."""
        plan = self._plan
        budgets = [ledger.budget for ledger in plan.ledgers]
        where = [Place(device) for device in self.devices]
        placed = plan_where(self.costs, budgets, where, plan.objective, plan.order, plan.role)
        return replace(placed.promising(plan), link=plan.link)

    def with_more_on_host(self, index: int) -> tuple[int, ...] | None:
        """Move the coldest half of a unit's experts on a full device to host memory -> all that lie
        there from now on. None if the unit has none left, the host no room for them, or the plan
        no buffers of their size."""
        before = self.costs[index]
        there = sorted(
            set(range(len(before.experts))).difference(before.host_experts),
            key=lambda expert: (before.chosen[expert], expert),
        )
        buffers = max(cost.staging for cost in self.costs)
        if not there or 2 * max(before.experts) > buffers:
            return None
        more = there[: -(-len(there) // 2)]
        whole = replace(before, weights=before.weights + before.host_weights)
        self.costs[index] = with_experts_apart(whole, (*before.host_experts, *more))
        host = (ledger for ledger in self.carried_out().ledgers if ledger.device == CPU)
        if any(ledger.headroom < 0 for ledger in host):
            self.costs[index] = before
            return None
        return self.costs[index].host_experts

    def go_on_after(self, index: int, why: str) -> None:
        """Replan this unit, whose device is full (``why`` is the error), and those after it for the
        next devices.

        Raises:
            PlacementError: there are none, or they have no room for the rest.
        """
        full = self.devices[index]
        self._budgets = self._behind(full, set(self.devices[:index]))
        if not self._budgets:
            raise self._out_of_devices(self.costs[index], full, why)
        # A unit tied to one that is already placed no longer shares its weights.
        rest = [_without_placed(cost, index) for cost in self.costs[index:]]
        try:
            plan = place_units(
                rest, self._budgets, objective=self._plan.objective, order=self._plan.order
            )
        except PlacementError as error:
            raise PlacementError(
                f"{full} ran out of memory at {self.costs[index].name}, for which the plan had "
                f"room (another program may have taken it), and the devices after it have {error}. "
                f"The error was: {why}",
                unit=error.unit,
                device=error.device,
                needed=error.needed,
                available=error.available,
                plan=error.plan,
            ) from None
        self.devices[index:] = plan.devices
        assert self.devices[index] != full, f"{full} is full, and is offered again"

    def _behind(self, full: torch.device, taken: set[torch.device]) -> list[Budget]:
        """Budgets of the devices listed after the full one, or if any order will do, of those that
        hold nothing yet."""
        if self._plan.order == "any":
            return [b for b in self._budgets if b.device not in {full, *taken}]
        position = next((i for i, b in enumerate(self._budgets) if b.device == full), None)
        return [] if position is None else self._budgets[position + 1 :]

    def _out_of_devices(self, cost: UnitCost, device: torch.device, why: str) -> PlacementError:
        cache, workspace = cost.cache_on(device), cost.workspace[device.type]
        needed, available = cost.weights + cache + workspace, devices.available_memory(device)
        return PlacementError(
            f"{device} ran out of memory at {cost.name}, and no device is left after it: the unit "
            f"takes {needed:,} bytes there (weights {human(cost.weights)}, cache {human(cache)}, "
            f"workspace {human(workspace)}), and {available:,} were free. Another program may hold "
            "memory that was free when the load was planned; raise reserve_vram, add 'cpu' as the "
            f"last device, or use a shorter or an 8-bit cache. The error was: {why}",
            unit=cost.name,
            device=str(device),
            needed=needed,
            available=available,
        )


def _without_placed(cost: UnitCost, first: int) -> UnitCost:
    """A unit's cost when only the units from ``first`` on are placed."""
    there = {other - first: both for other, both in cost.shared_cache.items() if other >= first}
    return replace(cost, shared={}, shared_cache=there)

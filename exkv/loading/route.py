"""Where the units of a load go: as planned, until a device turns out to be full."""

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
        plan: what was planned.
        costs: of the units, in their order.

    Attributes:
        devices, costs: of the units, in their order.
    """

    def __init__(self, plan: Plan, costs: Sequence[UnitCost]) -> None:
        self.devices = list(plan.devices)
        self._plan, self.costs = plan, list(costs)
        #: Of the devices that the rest of the units may be placed on: not of a host that has
        #: experts alone, for which no calls are planned.
        self._budgets = [
            replace(each.budget, in_use=each.budget.in_use + each.transport)
            for each in plan.ledgers
            if all(each.device.type in cost.workspace for cost in costs)
        ]

    def carried_out(self) -> Plan:
        """The plan of what is placed where in the end."""
        plan = self._plan
        budgets = [ledger.budget for ledger in plan.ledgers]
        where = [Place(device) for device in self.devices]
        placed = plan_where(self.costs, budgets, where, plan.objective, plan.order, plan.role)
        return replace(placed.promising(plan), link=plan.link)

    def with_more_on_host(self, index: int) -> tuple[int, ...] | None:
        """The experts of a unit that lie in host memory from now on, since its device is full: half
        of those that were to be on the device, too, the coldest of them. None where the unit
        has no others, the host no room for them, or the plan no buffers for their size."""
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
        """The device of this unit is full, as the error ``why`` says: plan the unit and those after
        it for the next devices.

        Raises:
            PlacementError: there are none, or they have no room for the rest.
        """
        full = self.devices[index]
        self._budgets = self._behind(full, set(self.devices[:index]))
        if not self._budgets:
            raise self._out_of_devices(self.costs[index], full, why)
        # What is tied to a unit that is placed already is not there beside it.
        rest = [_without_placed(cost, index) for cost in self.costs[index:]]
        try:
            plan = place_units(
                rest, self._budgets, objective=self._plan.objective, order=self._plan.order
            )
        except PlacementError as error:
            raise PlacementError(
                f"{full} ran out of memory at {self.costs[index].name}, where the plan had room "
                f"for it (another program may have taken it), and behind it there is {error}. It "
                f"ran out with: {why}",
                unit=error.unit,
                device=error.device,
                needed=error.needed,
                available=error.available,
                plan=error.plan,
            ) from None
        self.devices[index:] = plan.devices
        assert self.devices[index] != full, f"{full} is full, and is offered again"

    def _behind(self, full: torch.device, taken: set[torch.device]) -> list[Budget]:
        """Those listed after the full device, or where any order will do, those that hold nothing
        yet."""
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
            f"last device, or use a shorter or an 8-bit cache. It ran out with: {why}",
            unit=cost.name,
            device=str(device),
            needed=needed,
            available=available,
        )


def _without_placed(cost: UnitCost, first: int) -> UnitCost:
    """What a unit costs among those from the ``first`` on alone."""
    there = {other - first: both for other, both in cost.shared_cache.items() if other >= first}
    return replace(cost, shared={}, shared_cache=there)

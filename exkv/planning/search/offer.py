"""What devices offer for ranges of units, beside pinned units and the transport between hosts; for
``ranges`` and ``choose``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..plan import Budget, Role, UnitCost
from .orders import Orders, any_order, listed

#: Every role that a host may have.
ROLES = tuple(Role(one, two) for one in (True, False) for two in (True, False))


def canonical(budgets: Sequence[Budget], costs: Sequence[UnitCost]) -> list[Budget]:
    """The budgets in an order that depends only on what they are, host by host: large ones first,
    except for the host on which units are pinned."""
    homes = {cost.pinned.host for cost in costs if cost.pinned is not None}

    def device(budget: Budget) -> tuple:
        return -budget.limit, budget.device.type, budget.device.index or 0

    hosts = [sorted((budgets[d] for d in host), key=device) for host in by_host(budgets)]
    hosts.sort(key=lambda host: (host[0].host not in homes, [*map(device, host)], host[0].host))
    return [budget for host in hosts for budget in host]


def by_host(budgets: Sequence[Budget]) -> list[list[int]]:
    """The positions of each host's devices; ValueError where others are between them."""
    positions = range(len(budgets))
    hosts = [list(group) for _, group in itertools.groupby(positions, lambda d: budgets[d].host)]
    names = [budgets[host[0]].host for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the devices of host {name!r} are listed apart: list them together")
    return hosts


class Offer:
    """Devices, and what they hold whichever ranges are placed there.

    Args:
        budgets: the devices, those of a host together.
        costs: of all units.
        order: "listed", or "any" if the devices may be filled in any order.

    Attributes:
        hosts: the positions of each host's devices.
        limits: bytes for ranges on each device, if its host's role takes none.
        floors: workspace that each needs whatever is placed there.
        room: for each device, by its host's role if that makes a difference, bytes for ranges.
        may_be_empty: likewise, whether what the device holds in any case fits.
        first: the position of the host on which units are pinned, if there are several hosts.
        order: "listed" or "any".
    """

    def __init__(
        self, budgets: Sequence[Budget], costs: Sequence[UnitCost], order: str = "listed"
    ) -> None:
        self.budgets, self.hosts = budgets, by_host(budgets)
        devices = range(len(budgets))
        self.pinned = [[cost for cost in costs if cost.pinned == each.place] for each in budgets]
        #: Bytes of experts in host memory wherever their units are placed, and of the buffers of
        #: any card that has such units.
        self._host_weights = sum(cost.host_weights for cost in costs)
        self._staging = max((cost.staging for cost in costs), default=0)
        self.limits = [self._limit(device) for device in devices]
        self.floors = [self._floor(device) for device in devices]
        several = len(self.hosts) > 1
        self._hidden = max((cost.hidden for cost in costs), default=0) if several else 0
        roles = {device: self._roles(host) for host in self.hosts for device in host}
        self.room = [
            {role: self._room(device, role) for role in roles[device]} for device in devices
        ]
        self.may_be_empty = [
            {role: self._may_be_empty(device, role) for role in roles[device]} for device in devices
        ]
        self.first = self._home(costs) if several else None
        self.order = order

    def _home(self, costs: Sequence[UnitCost]) -> int | None:
        """The position of the host on which units are pinned."""
        homes = {cost.pinned.host for cost in costs if cost.pinned is not None}
        names = [self.budgets[host[0]].host for host in self.hosts]
        return next((position for position, name in enumerate(names) if name in homes), None)

    def _limit(self, device: int) -> int:
        budget = self.budgets[device]
        experts = self._host_weights if self._is_memory(device) else self._staging
        return budget.room - experts - sum(cost.held_on(budget) for cost in self.pinned[device])

    def _floor(self, device: int) -> int:
        budget = self.budgets[device]
        peaks = (cost.call_on(budget) for cost in self.pinned[device])
        return max([budget.promised_workspace, *peaks])

    def _roles(self, host: Sequence[int]) -> Sequence[Role | None]:
        """The host's roles that affect what its devices have room for."""
        return ROLES if self._has_transport(host) else (None,)

    def _has_transport(self, host: Sequence[int]) -> bool:
        """Whether the buffers of its transport, if it has one, lie on a device on offer."""
        return self._hidden > 0 and any(self._is_memory(device) for device in host)

    def _is_memory(self, device: int) -> bool:
        return self.budgets[device].place == self.budgets[device].place.memory

    def _room(self, device: int, role: Role | None) -> int:
        return self.limits[device] - self._transport(device, role)

    def _transport(self, device: int, role: Role | None) -> int:
        return role.transport(self._hidden) if role and self._is_memory(device) else 0

    def _may_be_empty(self, device: int, role: Role | None) -> bool:
        held = self.pinned[device] or self._transport(device, role)
        return not held or self.floors[device] <= self._room(device, role)

    def _kind(self, device: int) -> tuple:
        """A key; devices of one kind are interchangeable, and one with pinned units is unique."""
        budget = self.budgets[device]
        alone = budget.place if self.pinned[device] else None
        limit, floor = self.limits[device], self.floors[device]
        return budget.device.type, budget.segmented, limit, floor, budget.bandwidth, alone

    def orders(self) -> Orders | None:
        """Orders in which the devices may be filled; None if there are too many to try all."""
        if self.order == "listed":
            return self.in_order(self.hosts)
        by_role = [self._has_transport(host) for host in self.hosts]
        kinds = [self._kind(device) for device in range(len(self.budgets))]
        return any_order(self.hosts, by_role, self.first, kinds)

    def in_order(self, hosts: Sequence[Sequence[int]]) -> Orders:
        """The single order of devices listed this way, host by host."""
        by_role = [self._has_transport(host) for host in hosts]
        home = None if self.first is None else set(self.hosts[self.first])
        first = next((at for at, host in enumerate(hosts) if set(host) == home), None)
        return listed(hosts, by_role, first)

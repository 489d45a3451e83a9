"""Where every unit goes: arithmetic on bytes, no device touched, nothing read.

``place`` fills the devices in order. What a device must hold is a sum of three lines, the ledger:
weights and cache of its units, and the largest workspace that any of them needs, since units run
one after the other. ``exkv.loader`` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from exkv.errors import PlacementError

#: The limit of a device that no budget was given for: a pinned unit stands there regardless.
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What one unit takes, in bytes.

    Attributes:
        name: the unit's name.
        weights: of its own tensors, each rounded up as allocators do.
        cache: of its layer in all caches.
        workspace: device type -> peak of one forward call through it.
        shared: index of another unit -> bytes of ``weights`` that cost nothing beside it.
        pinned: the device that it must stand on, whatever the budgets.
    """

    name: str
    weights: int
    cache: int
    workspace: Mapping[str, int]
    shared: Mapping[int, int] = field(default_factory=dict)
    pinned: torch.device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one device offers, in bytes.

    Attributes:
        available: what this process can still take there.
        reserve: to be left free.
        cap: the most that may be used, or None for no other limit.
    """

    device: torch.device
    available: int
    reserve: int = 0
    cap: int | None = None

    @property
    def limit(self) -> int:
        free = max(self.available - self.reserve, 0)
        return free if self.cap is None else min(free, self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a plan puts on one device, in bytes."""

    device: torch.device
    limit: int
    reserve: int
    weights: int = 0
    cache: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Bytes in use at the peak of a forward call."""
        return self.weights + self.cache + self.workspace

    @property
    def headroom(self) -> int:
        return self.limit - self.total

    def with_unit(self, cost: UnitCost, shared: int) -> Ledger:
        """The ledger once this unit stands here too."""
        return replace(
            self,
            weights=self.weights + cost.weights - shared,
            cache=self.cache + cost.cache,
            workspace=max(self.workspace, cost.workspace[self.device.type]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A device for every unit, in order, and the ledger of every device that was offered."""

    devices: tuple[torch.device, ...]
    ledgers: tuple[Ledger, ...]


def place(
    costs: Sequence[UnitCost],
    budgets: Sequence[Budget],
    *,
    placed: Sequence[torch.device] = (),
) -> Plan:
    """Fill devices in order with contiguous runs of units.

    Args:
        costs: every unit of the model.
        budgets: the devices in the order in which they are filled.
        placed: the devices of the first units, which stand already and are in no budget here.

    Raises:
        PlacementError: they do not fit; it names the first unit without a place.
    """
    ledgers = {b.device: Ledger(device=b.device, limit=b.limit, reserve=b.reserve) for b in budgets}
    order, current = [b.device for b in budgets], 0
    chosen = dict(enumerate(placed))
    for index in range(len(placed), len(costs)):
        cost = costs[index]
        if cost.pinned is not None:
            ledger = ledgers.get(cost.pinned) or _unbounded(cost.pinned)
            ledgers[cost.pinned] = ledger.with_unit(cost, 0)
            chosen[index] = cost.pinned
            continue
        while True:
            device = order[current]
            shared = sum(n for other, n in cost.shared.items() if chosen.get(other) == device)
            filled = ledgers[device].with_unit(cost, shared)
            if filled.headroom >= 0:
                break
            current += 1
            if current == len(order):
                raise _no_place(cost, filled, costs[len(placed) :], budgets)
        ledgers[device] = filled
        chosen[index] = device
    return Plan(devices=tuple(chosen.values()), ledgers=tuple(ledgers.values()))


def _unbounded(device: torch.device) -> Ledger:
    return Ledger(device=device, limit=UNBOUNDED, reserve=0)


def _no_place(
    cost: UnitCost, filled: Ledger, costs: Sequence[UnitCost], budgets: Sequence[Budget]
) -> PlacementError:
    weights, cache = sum(c.weights for c in costs), sum(c.cache for c in costs)
    offered = ", ".join(f"{budget.device} {human(budget.limit)}" for budget in budgets)
    return PlacementError(
        f"no room for {cost.name}: {filled.device} would have to hold {filled.total:,} bytes "
        f"(weights {human(filled.weights)}, cache {human(filled.cache)}, workspace "
        f"{human(filled.workspace)}) and has {filled.limit:,} for this model, "
        f"{-filled.headroom:,} too few. In all: weights {human(weights)} and cache "
        f"{human(cache)} on {offered}",
        unit=cost.name,
        device=str(filled.device),
        needed=filled.total,
        available=filled.limit,
    )


def human(nbytes: int) -> str:
    """Bytes as people write them, binary units: 1536 -> ``1.5 KiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"

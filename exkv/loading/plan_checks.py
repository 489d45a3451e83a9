"""Checks of an existing plan before a load, and of every device after it: both compare a device's
ledger with its current memory. Also warns of devices without kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from exkv import devices
from exkv.devices import Memory
from exkv.errors import MissingKernelsWarning, PlacementError
from exkv.planning import Budget, Ledger, Plan, UnitCost
from exkv.planning.budgets import present_budget
from exkv.planning.from_disk import mapped_bytes
from exkv.planning.launches import missing_kernels
from exkv.planning.ledgers import plan_where
from exkv.planning.model import ModelShape
from exkv.planning.plan import UNBOUNDED
from exkv.planning.scenario import Workload
from exkv_ext import Missing

#: Warnings that this process has had.
_warned: set[Missing] = set()


def check_devices(plan: Plan) -> None:
    """ValueError if a device of the plan isn't on this machine, even one that holds nothing: it is
    next when another is full."""
    if named := [host for host in plan.hosts if host]:
        raise ValueError(
            f"the plan is for host {', '.join(named)}: a process on each host carries out its own "
            f"part, such as plan.on({named[0]!r})"
        )
    for ledger in plan.ledgers:
        try:
            devices.check_usable(*devices.resolve_devices([ledger.device]))
        except ValueError as error:
            raise ValueError(
                f"the plan can't be carried out here, make a new one: {error}"
            ) from None


def check_plan(plan: Plan, costs: Sequence[UnitCost]) -> None:
    """Refuse a plan that was made for something else, or that no longer fits.

    Args:
        costs: of the model's units, as they are now.

    Raises:
        ValueError: it was made for another model, other caches or longer chunks.
        PlacementError: a device has less memory than it had then, and too little.
    """
    if len(costs) != len(plan.units):
        raise ValueError(f"the plan has {len(plan.units)} units, and the model {len(costs)}")
    budgets = [present_budget(ledger.device) for ledger in plan.ledgers if ledger.has_weights]
    now = plan_where(costs, budgets, plan.places, plan.objective, plan.order, plan.role)
    for unit, planned in zip(now.units, plan.units, strict=True):
        if unit != planned:
            raise ValueError(
                f"the plan was made for another model, other caches or another max_input_len: it "
                f"has {planned} in place of {unit}"
            )
    for ledger in now.ledgers:
        then = next(old.budget for old in plan.ledgers if old.device == ledger.device)
        _check_limit(ledger, then, now)


def _check_limit(ledger: Ledger, then: Budget, now: Plan) -> None:
    """PlacementError if a device that offered ``then`` now has too little for its ledger."""
    kept = replace(ledger.budget, reserve=then.reserve, margin=then.margin, cap=then.cap)
    if then.disk:
        kept = replace(kept, disk=then.disk)
    ledger = replace(ledger, budget=kept).with_disk()
    lacking = ledger.total - kept.limit
    if lacking > 0:
        others = "".join(f"; {line}" for line in kept.others)
        raise PlacementError(
            f"the plan puts {ledger.total:,} bytes on {ledger.device}, which offered "
            f"{then.limit:,} when it was made and offers {kept.limit:,} now, {lacking:,} too "
            f"few{others}: free memory there, or make a new plan",
            unit=_first_unit(now, ledger),
            device=str(ledger.device),
            needed=ledger.total,
            available=kept.limit,
            plan=now,
        )


def check_mapped(plan: Plan, model: ModelShape) -> None:
    """ValueError if a plan leaves experts on disk that can't be read from the model's files."""
    found = mapped_bytes(model)
    for unit in plan.units:
        if unit.mapped != found.get(unit.name, 0):
            raise ValueError(
                f"the plan was made for other files: it leaves {unit.mapped:,} bytes of each "
                f"expert of {unit.name} on disk, and in {model.config.path} only "
                f"{found.get(unit.name, 0):,} can stay there: make a new plan"
            )


def check_room(plan: Plan, ledger: Ledger, held: int, before: Memory) -> None:
    """Check that a device has the memory planned for calls, now that all units are placed.

    On an accelerator this is exact. The host's figures are the system's, which fluctuate a little;
    the plan was made from the same ones. Where the plan has no limit, because a unit is pinned
    there in any case, nothing was promised.

    Args:
        held: bytes of the ledger that are allocated already.
        before: the device's memory when the load began.

    Raises:
        PlacementError: less is free than calls may need: another program took memory meanwhile.
    """
    now, needed = devices.memory(ledger.device), ledger.total - held - ledger.resident
    if needed <= now.available or ledger.budget.capacity == UNBOUNDED:
        return
    taken = now.in_use_by_others - before.in_use_by_others
    remedy = "" if ledger.device.type == "cpu" else ", or raise reserve_vram"
    raise PlacementError(
        f"a call may need {needed:,} bytes on {ledger.device}, and {now.available:,} are free: "
        f"memory was taken there while the model was loaded (by other programs {taken:,} bytes). "
        f"Load again when they are done{remedy}",
        unit=_first_unit(plan, ledger),
        device=str(ledger.device),
        needed=needed,
        available=now.available,
    )


def _first_unit(plan: Plan, ledger: Ledger) -> str:
    """The name of the first unit on the ledger's device, or with experts there."""
    on_host = ledger.device.type == "cpu"
    return next(
        unit.name
        for unit in plan.units
        if unit.device == ledger.device or (on_host and unit.host_experts)
    )


def warn_of_missing_kernels(plan: Plan, workload: Workload) -> None:
    """Warn, once a process, of missing kernels for devices that hold units, and their cost."""
    devices_used = [
        ledger.device
        for ledger in plan.ledgers
        if ledger.has_weights and not ledger.budget.host and ledger.device != devices.ELSEWHERE
    ]
    lacks = missing_kernels(workload.model, workload.promise, devices_used)
    for lack, sentences in lacks.items():
        if lack not in _warned:
            _warned.add(lack)
            warnings.warn(sentences, MissingKernelsWarning, stacklevel=2)

"""Carry a plan out: read each unit to its device, give its caches their storage, probe, and go
on to the next device where memory really runs out.

The way through this file: ``load_units`` checks the files, makes the plan (``exkv.planning.solve``)
or checks the one that it is given, and stages one unit after the other. A unit is staged whole or
not at all. Whatever ends the load early, an error, Ctrl-C or a generator that is dropped, every
device is left as it was found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator
from dataclasses import replace

import torch

from exkv import devices
from exkv.batch import Batch
from exkv.cache import CacheLayer
from exkv.checkpoint import Checkpoint, WeightReader
from exkv.errors import PlacementError
from exkv.models import Transformer, Unit
from exkv.planning import Budget, Ledger, Plan, Scenario
from exkv.planning.budgets import LOADED, present_budget
from exkv.planning.placement import place_units, plan_where
from exkv.planning.solve import plans_for
from exkv.planning.workspace import run_unit
from exkv.sizes import human

from .report import LoadReport, ReportBuilder

logger = logging.getLogger(__name__)


def load_units(
    model: Transformer,
    scenario: Scenario,
    *,
    plan: Plan | None = None,
    checkpoint: WeightReader | None = None,
    lazy: bool,
) -> Generator[int]:
    """Load the model; yields each unit's index before it is staged, and the total at the end.

    Args:
        scenario: the model with what it is promised, and the devices.
        plan: to be carried out; None to make one from the scenario.
        checkpoint: where the weights are; None for the config's folder.
        lazy: place only; a unit reads its weights when it is first used.

    Raises:
        ValueError: the model is loaded already, or has no checkpoint, or the plan is another's.
        CheckpointError: the files are damaged, or contradict the config.
        PlacementError: no room, or somebody took what a call needs meanwhile; nothing is loaded.
    """
    if model.loaded:
        raise ValueError("the model is loaded: call unload() first to load it elsewhere")
    checkpoint = checkpoint or _checkpoint_of(model)
    complete = False
    try:
        _check_contents(model, checkpoint)
        if plan is None:
            (plan,) = plans_for(scenario)
        else:
            _check_plan(plan, scenario)
        model.checkpoint = checkpoint
        loading = _Loading(model, scenario, plan, lazy=lazy)
        yield from loading.run()
        model.plan, model.report = loading.result()
        LOADED.add(model)
        yield len(model.units)
        complete = True
    finally:
        if not complete:
            model.unload()
        if not complete or not lazy:
            checkpoint.close()


def _checkpoint_of(model: Transformer) -> Checkpoint:
    if model.config.path is None:
        raise ValueError("the config came from no folder, so there are no weights to load")
    return Checkpoint(model.config.path)


def _check_plan(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan that was made for something else, or that no longer fits."""
    (workload,) = scenario.workloads
    for ledger in plan.ledgers:  # those that hold nothing too: they are the next if one is full
        try:
            devices.resolve_devices([ledger.device])
        except ValueError as error:
            raise ValueError(
                f"the plan can't be carried out here, make a new one: {error}"
            ) from None
    costs = workload.costs(workload.peaks(scenario.budgets))
    if len(costs) != len(plan.units):
        raise ValueError(f"the plan has {len(plan.units)} units, and the model {len(costs)}")
    budgets = [present_budget(ledger.device) for ledger in plan.ledgers if ledger.units]
    now = plan_where(costs, budgets, plan.devices, plan.objective, plan.order)
    for unit, planned in zip(now.units, plan.units, strict=True):
        if unit != planned:
            raise ValueError(
                f"the plan was made for another model, other caches or another max_input_len: it "
                f"says {planned} where this is {unit}"
            )
    for ledger in now.ledgers:
        then = next(old for old in plan.ledgers if old.device == ledger.device)
        reserve, margin = then.budget.reserve, then.budget.margin
        limit = replace(ledger.budget, reserve=reserve, margin=margin, cap=then.budget.cap).limit
        if ledger.total > limit:
            raise PlacementError(
                f"the plan puts {ledger.total:,} bytes on {ledger.device}, which had "
                f"{then.limit:,} for them when it was made and has {limit:,} now, "
                f"{ledger.total - limit:,} too few: free memory there, or make a new plan",
                unit=next(u.name for u in plan.units if u.device == ledger.device),
                device=str(ledger.device),
                needed=ledger.total,
                available=limit,
                plan=now,
            )


def _check_contents(model: Transformer, checkpoint: WeightReader) -> None:
    """CheckpointError where the tensors aren't the config's: by name, shape, or kind of number."""
    checkpoint.expect(model.stored_tensors())


class _Loading:
    """One load under way."""

    def __init__(self, model: Transformer, scenario: Scenario, plan: Plan, *, lazy: bool) -> None:
        (workload,) = scenario.workloads
        self.model = model
        self.promise = workload.promise
        self.costs = workload.costs(workload.peaks(scenario.budgets))
        self.plan = plan
        self.where = list(plan.devices)
        self.budgets = [ledger.budget for ledger in plan.ledgers]
        self.lazy = lazy
        # Held for the length of the load, so that none can disappear half-way.
        self.caches = model.caches
        self.before = {b.device: devices.memory(b.device) for b in self.budgets}
        self.measured = ReportBuilder(self.before)

    def run(self) -> Iterator[int]:
        for unit in self.model.units:
            yield unit.index
            while not self._try_stage(unit, self.where[unit.index]):
                self._go_on_after(unit)

    def result(self) -> tuple[Plan, LoadReport]:
        """The plan as it was carried out, and what was measured."""
        budgets = [ledger.budget for ledger in self.plan.ledgers]
        plan = plan_where(self.costs, budgets, self.where, self.plan.objective, self.plan.order)
        plan = replace(plan, last_id_only=self.promise.last_id_only)
        for ledger in plan.ledgers:
            if ledger.units and ledger.device in self.before:
                self._check_room(ledger)
        report = self.measured.finish(plan)
        for complaint in report.surprises():
            logger.warning("%s", complaint)
        return plan, report

    def _check_room(self, ledger: Ledger) -> None:
        """PlacementError where calls won't find what was planned for them. The host's memory is
        everybody's: what is free there says nothing of what can be had."""
        device = ledger.device
        if device.type == "cpu":
            return
        now, before = devices.memory(device), self.before[device]
        needed = ledger.total - self._cache_there(device) - (0 if self.lazy else ledger.weights)
        if needed > now.available:
            taken = now.in_use_by_others - before.in_use_by_others
            raise PlacementError(
                f"a call may need {needed:,} bytes on {device}, and {now.available:,} are free: "
                f"memory was taken there while the model was loaded (by other programs {taken:,} "
                "bytes). Load again when they are done, or raise reserve_vram",
                unit=next(unit.name for unit in self.model.units if unit.device == device),
                device=str(device),
                needed=needed,
                available=now.available,
            )

    def _cache_there(self, device: torch.device) -> int:
        """Bytes of the caches on the device; what grows is small now."""
        tensors = (t for c in self.caches for layer in c.layers for t in layer.tensors.values())
        return sum(devices.rounded(t.nbytes) for t in tensors if t.device == device)

    def _try_stage(self, unit: Unit, device: torch.device) -> bool:
        """Stage the unit; on out-of-memory take all of it back and return False.

        The clean-up stands outside the ``except``: there the error's traceback, whose frames
        hold the tensors that were made, is gone.
        """
        try:
            self._stage(unit, device)
            return True
        except torch.OutOfMemoryError as error:
            reason = str(error)
        unit.release()
        self._free_caches(unit)
        devices.release_idle_memory()
        logger.warning("%s did not fit on %s and was taken back: %s", unit.name, device, reason)
        return False

    def _stage(self, unit: Unit, device: torch.device) -> None:
        """Weights, caches, and one forward call at the worst shape that was promised."""
        if self.lazy:
            unit.device = device
        else:
            with self.measured.allocation(device, "weights"):
                self.model.read_unit(unit, device)
        layers = [] if unit.spec.layer is None else [c.layers[unit.spec.layer] for c in self.caches]
        with self.measured.allocation(device, "cache"):
            for layer in layers:
                layer.allocate(device)
                self._grow(layer, device)
        # The host raises no out-of-memory error that could be caught: nothing to find out there.
        if device.type != "cpu" and not self.lazy:
            self._probe(unit, device)
        for layer in layers:
            layer.give_room_back()

    def _grow(self, layer: CacheLayer, device: torch.device) -> None:
        """See that a layer which grows can grow to the end."""
        if device.type == "cpu":
            return
        layer.make_room(layer.spec.growth.last_room(layer.spec.capacity))
        with contextlib.nullcontext() if self.lazy else self.measured.growth(device):
            layer.make_room(layer.spec.capacity)

    @torch.no_grad()
    def _probe(self, unit: Unit, device: torch.device) -> None:
        for shape, lengths in self.promise.worst_calls():
            store = shape.layers[unit.spec.layer] if shape and unit.spec.layer is not None else None
            last = unit is self.model.units[-1]
            with self.measured.probe(device, logits=last):
                batch = Batch.on(device, lengths, self.model.rotary, self.model.dtype)
                out = run_unit(
                    self.model,
                    unit,
                    unit.module,
                    store,
                    batch,
                    last_id_only=self.promise.last_id_only,
                )
                del batch
            del out

    def _free_caches(self, unit: Unit) -> None:
        if unit.spec.layer is not None:
            for cache in self.caches:
                cache.layers[unit.spec.layer].free()

    def _go_on_after(self, unit: Unit) -> None:
        """Plan this unit and those after it for the devices behind the one that was full."""
        full = self.where[unit.index]
        self.budgets = self._behind(full, set(self.where[: unit.index]))
        if not self.budgets:
            raise self._out_of_devices(unit, full)
        # What is tied to a unit that stands already is not there beside it.
        rest = [replace(cost, shared={}) for cost in self.costs[unit.index :]]
        try:
            plan = place_units(
                rest, self.budgets, objective=self.plan.objective, order=self.plan.order
            )
        except PlacementError as error:
            raise PlacementError(
                f"{full} ran out of memory at {unit.name}, where the plan had room for it "
                f"(another program may have taken it), and behind it there is {error}",
                unit=error.unit,
                device=error.device,
                needed=error.needed,
                available=error.available,
                plan=error.plan,
            ) from None
        self.where[unit.index :] = plan.devices

    def _behind(self, full: torch.device, taken: set[torch.device]) -> list[Budget]:
        """The devices that the rest may stand on: those listed after the full one, or where any
        order will do, those that hold nothing yet."""
        if self.plan.order == "any":
            return [b for b in self.budgets if b.device not in {full, *taken}]
        position = next((i for i, b in enumerate(self.budgets) if b.device == full), None)
        return [] if position is None else self.budgets[position + 1 :]

    def _out_of_devices(self, unit: Unit, device: torch.device) -> PlacementError:
        cost, available = self.costs[unit.index], devices.available_memory(device)
        needed = cost.weights + cost.cache_on(device) + cost.workspace[device.type]
        return PlacementError(
            f"{device} ran out of memory at {unit.name}, and no device is left after it: the "
            f"unit takes {needed:,} bytes there (weights {human(cost.weights)}, cache "
            f"{human(cost.cache_on(device))}, workspace {human(cost.workspace[device.type])}), and "
            f"{available:,} were free. Another program may hold memory that was free when the "
            "load was planned; raise reserve_vram, add 'cpu' as the last device, or use a "
            "shorter or an 8-bit cache",
            unit=unit.name,
            device=str(device),
            needed=needed,
            available=available,
        )

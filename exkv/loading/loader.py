"""Carry out a plan: read each unit to its device, allocate its part of every cache, probe it.

``load_units`` is the whole load. It stages one unit after the other, whole or not at all; a unit
that runs out of memory is rolled back and goes to the next device. If that doesn't help, because
another program took memory during the load, everything is rolled back and replanned over the memory
that is left. However a load ends early, by an error, Ctrl-C or a dropped generator, every device is
left as it was found.

Beside this file: ``plan_checks`` refuses a plan that no longer holds, ``route`` replans behind a
full device, ``report`` holds the measurements.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from dataclasses import replace

import torch

from exkv import devices
from exkv.batch import Batch
from exkv.cache import CacheLayer
from exkv.checkpoint import Checkpoint, open_checkpoint
from exkv.errors import Attempt, PlacementError
from exkv.layers.split_experts import worst_case
from exkv.models import Transformer, Unit
from exkv.models.adapters import adapted
from exkv.planning import Budget, Ledger, Plan, Scenario, UnitCost, Workload
from exkv.planning.best import planned
from exkv.planning.budgets import present_budget
from exkv.planning.expected_time import expected
from exkv.planning.plan import UNBOUNDED
from exkv.planning.unit_call import run_unit

from .plan_checks import (
    check_devices,
    check_mapped,
    check_plan,
    check_room,
    warn_of_missing_kernels,
)
from .report import LoadReport, ReportBuilder
from .route import Route

logger = logging.getLogger(__name__)


def load_units(
    model: Transformer,
    scenario: Scenario,
    *,
    plan: Plan | None = None,
    checkpoint: Checkpoint | None = None,
    lazy: bool,
    on_loaded: Callable[[Plan, LoadReport], object],
) -> Generator[int]:
    """Load the model; yields each unit's index before it is staged, and the total at the end.

    Args:
        scenario: the model with its workload, and the devices.
        plan: to carry out; None to make one from the scenario.
        checkpoint: the weights; None for those in the config's folder.
        lazy: place only; a unit reads its weights when it is first used.
        on_loaded: called with the plan that was carried out and the report, before the total is
            yielded.

    Raises:
        ValueError: the model is already loaded or has no checkpoint, or the plan is another's.
        CheckpointError: the files are damaged, or contradict the config.
        PlacementError: no room, or another program took what a call needs; nothing is loaded.
    """
    if model.loaded:
        raise ValueError("the model is loaded: call unload() first to load it elsewhere")
    checkpoint = checkpoint or _checkpoint_of(model)
    complete = False
    try:
        checkpoint.expect(model.stored_tensors(), model.unused_modules())
        load = _begin(model, scenario, plan, lazy=lazy)
        model.checkpoint = checkpoint
        tries = len(scenario.budgets) if plan is None else 0
        while (failed := (yield from load.stage_all())) is not None:
            _roll_back(model)
            now = tuple(map(_present, scenario.budgets))
            scenario, before = replace(scenario, budgets=now), scenario
            tries -= 1
            if tries < 0 or not _lost_memory(before, scenario):
                raise failed
            logger.warning("replanning over the memory that is left: %s", failed)
            try:
                load = _begin(model, scenario, None, lazy=lazy)
            except PlacementError:
                raise failed from None
        on_loaded(*load.done)
        yield len(model.units)
        complete = True
    finally:
        if not complete:
            model.unload()
        if not complete or not lazy:
            checkpoint.close()


def _begin(model: Transformer, scenario: Scenario, plan: Plan | None, *, lazy: bool) -> _Load:
    """Start a load by this plan, or by the best one."""
    if plan is None:
        scenario, (plan,), (costs,) = planned(scenario)
        if (choice := scenario.workloads[0].model.choice) != model.choice:
            model.choose(choice)
    else:
        costs = _checked_costs(scenario, plan)
    model.set_host_experts({unit.name: unit.host_experts for unit in plan.units})
    (workload,) = scenario.workloads
    warn_of_missing_kernels(plan, workload)
    model.fit_calls(workload.promise.max_input_len, workload.promise.logits_len)
    return _Load(model, workload, plan, costs, lazy=lazy)


def _roll_back(model: Transformer) -> None:
    """Release what a load has taken so far; the checkpoint stays open."""
    for unit in model.units:
        unit.release()
    model.set_host_experts({})  # they are another plan's
    for cache in model.caches:
        cache.free()
    devices.release_idle_memory()


def _present(budget: Budget) -> Budget:
    if budget.host or budget.capacity == UNBOUNDED:
        return budget
    now = present_budget(budget.device)
    return replace(budget, in_use=now.in_use, in_use_by_others=now.in_use_by_others)


def _lost_memory(before: Scenario, now: Scenario) -> bool:
    """Whether a device has less memory than before, so that the plan may change."""
    pairs = zip(before.budgets, now.budgets, strict=True)
    return any(after.limit < earlier.limit for earlier, after in pairs)


def _release_idle_memory(device: torch.device) -> None:
    """Release idle segments. Else the next lasting allocation would take a piece of a segment that
    conversions or calls used, and leave the rest unusable."""
    if devices.allocator_rules(device.type) is not None:
        devices.release_idle_memory()


def move_units(model: Transformer, scenario: Scenario, plan: Plan) -> Plan:
    """Move a loaded model's units and experts to where another plan places them: units that stay
    are unchanged, the others are read again, and their caches hold zeros.

    Raises:
        CheckpointError: the files are damaged, or aren't those that the model was loaded from.
        PlacementError: no room.
    """
    moving = []
    for unit, placed in zip(model.units, plan.units, strict=True):
        if (unit.device, unit.host_experts) == (placed.device, frozenset(placed.host_experts)):
            continue
        moving.append(unit)
        unit.release()
        unit.put_on_host(placed.host_experts)
        if (layer := unit.spec.layer) is not None:
            for cache in model.caches:
                for part in cache.layers[layer].parts:
                    part.move_out()
    devices.release_idle_memory()
    (costs,) = scenario.costs(scenario.peaks())
    (workload,) = scenario.workloads
    with _checkpoint_of(model) as checkpoint:
        checkpoint.expect(model.stored_tensors(), model.unused_modules())
        model.checkpoint = checkpoint
        load = _Load(model, workload, plan, costs, lazy=False)
        for unit in moving:
            load.stage(unit)
    return load.route.carried_out()


def _checkpoint_of(model: Transformer) -> Checkpoint:
    if model.config.path is None:
        raise ValueError("the config came from no folder, so there are no weights to load")
    return open_checkpoint(model.config.path)


def _checked_costs(scenario: Scenario, plan: Plan) -> list[UnitCost]:
    """Check an existing plan -> the units' current costs."""
    check_devices(plan)
    (costs,) = scenario.costs(scenario.peaks())
    check_plan(plan, costs)
    if plan.from_disk:
        check_mapped(plan, scenario.workloads[0].model)
    return costs


class _Load:
    """A load in progress."""

    def __init__(
        self,
        model: Transformer,
        workload: Workload,
        plan: Plan,
        costs: list[UnitCost],
        *,
        lazy: bool,
    ) -> None:
        self.model, self.workload, self.lazy = model, workload, lazy
        self.route = Route(plan, costs)
        # Referenced throughout the load, so that none can be collected half-way.
        self.caches = model.caches
        self.before = {ledger.device: devices.memory(ledger.device) for ledger in plan.ledgers}
        self.measured = ReportBuilder(self.before)
        self.done: tuple[Plan, LoadReport]
        self._leave_on_disk()

    def stage_all(self) -> Generator[int, None, PlacementError | None]:
        """Stage every unit; yields each one's index before.

        Returns:
            The error if memory ran out; None if ``done`` has the result.
        """
        try:
            for unit in self.model.units:
                yield unit.index
                self.stage(unit)
            self.done = self.finish()
        except PlacementError as error:
            return error
        return None

    def stage(self, unit: Unit) -> None:
        """Stage the unit on its device; if that is full, with fewer of its experts there, or on a
        later device."""
        while why := self._try_stage(unit, self.route.devices[unit.index]):
            if (experts := self.route.with_more_on_host(unit.index)) is not None:
                unit.put_on_host(experts)
            else:
                self.route.go_on_after(unit.index, why)
            self._leave_on_disk()

    def _leave_on_disk(self) -> None:
        """Limit the experts that units read from now on to those the plan has memory for."""
        ledgers = self.route.carried_out().ledgers
        disk, mapped = (sum(getattr(x, n) for x in ledgers) for n in ("from_disk", "mapped"))
        self.model.resident = 1 - disk / mapped if disk else 1.0

    def _try_stage(self, unit: Unit, device: torch.device) -> str:
        """Stage the unit; where memory runs out, roll it back and return the reason."""
        with Attempt() as attempt, self.measured.attempt():
            self._stage(unit, device)
            return ""
        unit.release()
        for layer in self._cache_layers(unit):
            layer.free()
        devices.release_idle_memory()
        why = attempt.why
        logger.warning("%s did not fit on %s and was rolled back: %s", unit.name, device, why)
        return why

    def _stage(self, unit: Unit, device: torch.device) -> None:
        """Read the weights, allocate the caches, and run one forward call of the largest promised
        shape."""
        if device == devices.ELSEWHERE:
            unit.device = device
            return
        if device == devices.CPU:
            unit.put_on_host(())  # with the rest of the unit
        if self.lazy:
            unit.device = device
        else:
            with self.measured.allocation(device, "staging"):
                staging = self.model.expert_staging(unit, device)
            with self.measured.allocation(device, "weights"):
                self.model.read_unit(unit, device)
            del staging  # the unit holds it if it needs it
            _release_idle_memory(device)
        layers = self._cache_layers(unit)
        with self.measured.allocation(device, "cache"):
            for layer in layers:
                layer.allocate(device)
                self._grow(layer, device)
        if (index := unit.spec.layer) is not None:
            for cache in self.caches:
                cache.share_layer(index)
        # The host raises no out-of-memory error that could be caught, so there is nothing to probe.
        if device.type != "cpu" and not self.lazy:
            self._probe(unit, device)
        for layer in layers:
            layer.shrink()
        _release_idle_memory(device)

    def _cache_layers(self, unit: Unit) -> list[CacheLayer]:
        """The unit's part of every cache."""
        if (index := unit.spec.layer) is None:
            return []
        return [part for cache in self.caches for part in cache.layers[index].parts]

    def _grow(self, layer: CacheLayer, device: torch.device) -> None:
        """Check that a growing layer can grow to its full length."""
        if device.type == "cpu":
            return
        layer.make_room(layer.spec.growth.last_room(layer.spec.capacity))
        with contextlib.nullcontext() if self.lazy else self.measured.growth(device):
            layer.make_room(layer.spec.capacity)

    @torch.no_grad()
    def _probe(self, unit: Unit, device: torch.device) -> None:
        """Run the unit's part of the largest promised calls, and measure their memory."""
        assert unit.module is not None
        kept = unit is self.model.units[-1] or unit.spec.is_mtp
        for shape, lengths in self.workload.promise.worst_calls():
            store = shape.layers[unit.spec.layer] if shape and unit.spec.layer is not None else None
            kept_of = unit.index if kept else None
            with self.measured.probe(device, kept_of=kept_of), worst_case():
                batch = Batch.on(device, lengths, self.model.rotary, self.model.dtype)
                out = run_unit(
                    self.workload.model,
                    unit,
                    adapted(unit.module, unit.low_rank, lengths.adapters),
                    store,
                    batch,
                    self.workload.promise.logits,
                )
                del batch
            del out

    def finish(self) -> tuple[Plan, LoadReport]:
        """The final plan and the report, once all units are staged.

        Raises:
            PlacementError: calls won't find the memory that was planned for them.
        """
        plan = self.route.carried_out()
        for ledger in plan.ledgers:
            if ledger.units and ledger.device in self.before:
                check_room(plan, ledger, self._allocated_bytes(ledger), self.before[ledger.device])
        report = self.measured.finish(plan, self._disk_warning(plan))
        for complaint in report.surprises():
            logger.warning("%s", complaint)
        return plan, report

    def _disk_warning(self, plan: Plan) -> str:
        if not plan.from_disk:
            return ""
        budgets = [ledger.budget for ledger in plan.ledgers]
        said = expected(plan, self.route.costs, budgets, self.workload.rows).from_disk
        logger.warning("%s", said)
        return said

    def _allocated_bytes(self, ledger: Ledger) -> int:
        """Bytes of the ledger that are already allocated on its device.

        On the host these are pages, which count once they are written to: what this process uses
        beyond its use at the start is the model's.
        """
        device = ledger.device
        if device.type == "cpu":
            more = devices.memory(device).in_use - self.before[device].in_use
            return min(max(more, 0), ledger.weights + ledger.cache)
        layers = [layer for cache in self.caches for layer in cache.layers]
        tensors = [tensor for layer in layers for tensor in layer.tensors.values()]
        caches = sum(devices.rounded(t.nbytes) for t in tensors if t.device == device)
        read = 0 if self.lazy else ledger.weights + ledger.staging
        return caches + ledger.segments + read

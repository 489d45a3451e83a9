"""Carry a plan out: read each unit to its device, give its caches their storage, probe, and go
on to the next device where memory really runs out.

The way through this file: ``load_units`` plans (``unit_costs``, ``exkv.placement.place``), then
stages one unit after the other. A unit is staged whole or not at all. Whatever ends the load
early, an error, Ctrl-C or a generator that is dropped, every device is left as it was found.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import torch

from exkv import devices
from exkv.checkpoint import Checkpoint, CheckpointError
from exkv.errors import PlacementError
from exkv.models import Transformer, Unit
from exkv.placement import Budget, Plan, UnitCost, human, place
from exkv.report import LoadReport, ReportBuilder
from exkv.workspace import Promise, predict_workspaces, run_unit

logger = logging.getLogger(__name__)

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_units(
    model: Transformer, budgets: Sequence[Budget], *, lazy: bool, last_id_only: bool
) -> Generator[int]:
    """Load the model; yields each unit's index before it is staged, and the total at the end.

    Args:
        budgets: the devices in the order in which they are filled.
        lazy: place only; a unit reads its weights when it is first used.
        last_id_only: plan for logits of the last token only.

    Raises:
        ValueError: the model is loaded already, or has no checkpoint.
        CheckpointError: the files are damaged, or contradict the config.
        PlacementError: no room; nothing is loaded.
    """
    if model.loaded:
        raise ValueError("the model is loaded: call unload() first to load it elsewhere")
    if model.config.path is None:
        raise ValueError("the config came from no folder, so there are no weights to load")
    promise = Promise.of(model, last_id_only=last_id_only)
    checkpoint = Checkpoint(model.config.path)
    complete = False
    try:
        _check_contents(model, checkpoint)
        costs = unit_costs(model, promise, budgets)
        plan = _plan_or_explain(model, promise, costs, budgets)
        model.checkpoint = checkpoint
        loading = _Loading(model, promise, costs, budgets, plan, lazy=lazy)
        yield from loading.run()
        model.report = loading.report()
        complete = True
    finally:
        if not complete:
            model.unload()
        if not complete or not lazy:
            checkpoint.close()
    yield len(model.units)


def _check_contents(model: Transformer, checkpoint: Checkpoint) -> None:
    """CheckpointError where the tensors aren't the config's: by name, shape, or kind of number."""
    shapes = {
        source: tuple(unit.shapes[name].shape)
        for unit in model.units
        for name, source in unit.spec.tensors.items()
    }
    checkpoint.expect(shapes)
    for name in shapes:
        info = checkpoint.info(name)
        if info.dtype not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} holds {info.dtype}, and weights must be float32, "
                "float16 or bfloat16: if this checkpoint is quantized, use the original one"
            )


def unit_costs(model: Transformer, promise: Promise, budgets: Sequence[Budget]) -> list[UnitCost]:
    """The ledger lines of every unit, for the device types on offer."""
    types = {budget.device.type for budget in budgets} | ({"cpu"} if model.embed_cpu else set())
    workspaces = {kind: predict_workspaces(model, promise, kind) for kind in types}
    return [
        UnitCost(
            name=unit.name,
            weights=sum(_nbytes(tensor) for tensor in unit.shapes.values()),
            cache=_cache_bytes(unit, promise),
            workspace={kind: peaks[unit.index] for kind, peaks in workspaces.items()},
            shared={
                other: _nbytes(unit.shapes[name]) for name, (other, _) in unit.spec.tied.items()
            },
            pinned=devices.CPU if model.embed_cpu and unit.index == 0 else None,
        )
        for unit in model.units
    ]


def _nbytes(tensor: torch.Tensor) -> int:
    return devices.rounded(tensor.numel() * tensor.element_size())


def _cache_bytes(unit: Unit, promise: Promise) -> int:
    if unit.spec.layer is None:
        return 0
    return sum(cache.layers[unit.spec.layer].bytes_needed() for cache in promise.caches)


class _Loading:
    """One load under way."""

    def __init__(
        self,
        model: Transformer,
        promise: Promise,
        costs: Sequence[UnitCost],
        budgets: Sequence[Budget],
        plan: Plan,
        *,
        lazy: bool,
    ) -> None:
        self.model = model
        self.promise = promise
        self.costs = costs
        self.budgets = list(budgets)
        self.plan = list(plan.devices)
        self.lazy = lazy
        # Held for the length of the load, so that none can disappear half-way.
        self.caches = model.caches
        self.measured = ReportBuilder(plan.ledgers)

    def run(self) -> Iterator[int]:
        for unit in self.model.units:
            yield unit.index
            while not self._try_stage(unit, self.plan[unit.index]):
                self._go_on_after(unit)

    def report(self) -> LoadReport:
        return self.measured.finish(self.costs, self.plan)

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
        with self.measured.allocation(device, "weights"):
            if self.lazy:
                unit.device = device
            else:
                self.model.read_unit(unit, device)
        with self.measured.allocation(device, "cache"):
            if unit.spec.layer is not None:
                for cache in self.caches:
                    cache.layers[unit.spec.layer].allocate(device)
        # The host raises no out-of-memory error that could be caught: nothing to find out there.
        if device.type != "cpu" and not self.lazy:
            self._probe(unit, device)

    @torch.no_grad()
    def _probe(self, unit: Unit, device: torch.device) -> None:
        for shape, lengths in self.promise.worst_calls():
            store = shape.layers[unit.spec.layer] if shape and unit.spec.layer is not None else None
            with self.measured.peak(device):
                run_unit(
                    self.model,
                    unit,
                    unit.module,
                    store,
                    lengths,
                    device,
                    last_id_only=self.promise.last_id_only,
                )

    def _free_caches(self, unit: Unit) -> None:
        if unit.spec.layer is not None:
            for cache in self.caches:
                cache.layers[unit.spec.layer].free()

    def _go_on_after(self, unit: Unit) -> None:
        """Plan this unit and those after it for the devices behind the one that was full."""
        full = self.plan[unit.index]
        position = next((i for i, b in enumerate(self.budgets) if b.device == full), None)
        if position is None or position + 1 == len(self.budgets):
            raise self._out_of_devices(unit, full)
        self.budgets = self.budgets[position + 1 :]
        try:
            rest = place(self.costs, self.budgets, placed=self.plan[: unit.index])
        except PlacementError as error:
            raise PlacementError(
                f"{full} ran out of memory at {unit.name}, where the plan had room for it "
                f"(another program may have taken it), and behind it there is {error}",
                unit=error.unit,
                device=error.device,
                needed=error.needed,
                available=error.available,
            ) from None
        self.plan = list(rest.devices)
        self.measured.replan(rest.ledgers)

    def _out_of_devices(self, unit: Unit, device: torch.device) -> PlacementError:
        cost, available = self.costs[unit.index], devices.available_memory(device)
        needed = cost.weights + cost.cache + cost.workspace[device.type]
        return PlacementError(
            f"{device} ran out of memory at {unit.name}, and no device is left after it: the "
            f"unit takes {needed:,} bytes there (weights {human(cost.weights)}, cache "
            f"{human(cost.cache)}, workspace {human(cost.workspace[device.type])}), and "
            f"{available:,} were free. Another program may hold memory that was free when the "
            "load was planned; raise reserve_vram, add 'cpu' as the last device, or use a "
            "shorter or an 8-bit cache",
            unit=unit.name,
            device=str(device),
            needed=needed,
            available=available,
        )


def _plan_or_explain(
    model: Transformer, promise: Promise, costs: Sequence[UnitCost], budgets: Sequence[Budget]
) -> Plan:
    """The plan, or the error that says what would fit instead."""
    try:
        return place(costs, budgets)
    except PlacementError as error:
        suggestions = tuple(_what_would_fit(model, promise, budgets))
        remedy = "; ".join(suggestions) or "no single change would; use a smaller model"
        raise PlacementError(
            f"{error}. What would fit: {remedy}",
            unit=error.unit,
            device=error.device,
            needed=error.needed,
            available=error.available,
            suggestions=suggestions,
        ) from None


def _what_would_fit(
    model: Transformer, promise: Promise, budgets: Sequence[Budget]
) -> Iterator[str]:
    """Single changes that make the model fit, each one planned, mildest first."""

    def fits(changed: Promise, offered: Sequence[Budget] = budgets) -> bool:
        try:
            place(unit_costs(model, changed, offered), offered)
        except PlacementError:
            return False
        return True

    longest = max((cache.max_seq_len for cache in promise.caches), default=0)

    def shortened(length: int) -> Promise:
        caches = (cache.with_length(min(cache.max_seq_len, length)) for cache in promise.caches)
        return replace(promise, caches=tuple(caches))

    length = _largest(longest - 1, lambda n: fits(shortened(n)))
    if length:
        yield f"a cache of max_seq_len={length}"
    quantized = replace(promise, caches=tuple(cache.in_8_bits() for cache in promise.caches))
    if promise.caches and fits(quantized):
        yield "Cache8bit at the same length"
    for chunk in (512, 128):
        if chunk < promise.max_input_len and fits(replace(promise, max_input_len=chunk)):
            yield f"Model(config, max_input_len={chunk})"
            break
    if any(b.reserve for b in budgets) and fits(promise, [replace(b, reserve=0) for b in budgets]):
        yield "a lower reserve_vram"
    if all(budget.device.type != "cpu" for budget in budgets):
        host = Budget(device=devices.CPU, available=devices.available_memory(devices.CPU))
        if fits(promise, [*budgets, host]):
            yield "'cpu' as the last of devices"


def _largest(high: int, fits) -> int:
    """The largest n in 1..high that fits, 0 if none does; what fits at n fits below it."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

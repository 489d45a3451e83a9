"""``exkv plan --simulate``: carry out the plan on simulated devices of the same sizes.

The devices run dry: tensors are counted but have no memory. So the loader's own code runs without
the devices and without the weights, and its report shows measured next to predicted bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TextIO

import torch
from rich.console import Console

from exkv import sim
from exkv.cache import KVCache
from exkv.checkpoint import Checkpoint, TensorInfo
from exkv.checkpoint.safetensors import CONFIG_NAME
from exkv.loading import LoadReport, load_units
from exkv.models.transformer import Transformer
from exkv.planning import Budget, Place, Plan, Scenario, Workload
from exkv.planning.ledgers import plan_where

from .picture import fitted

_WIDTH = 160


class HollowCheckpoint(Checkpoint):
    """A checkpoint that has the config's shapes but no values."""

    hollow = True
    fingerprint = ""

    def __init__(self, model: Transformer) -> None:
        self._stored = model.stored_tensors()
        super().__init__(CONFIG_NAME)

    def _open(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(
                name=name,
                dtype=tensor.dtypes[0],
                shape=tensor.shape,
                nbytes=math.prod(tensor.shape) * tensor.dtypes[0].itemsize,
                file=self.folder,
                offset=0,
            )
            for name, tensor in self._stored.items()
        }


def simulate(
    scenario: Scenario,
    plans: Sequence[Plan],
    models: Mapping[str, Transformer],
    out: TextIO = sys.stdout,
) -> None:
    """Load the models one after the other by their plans, and print reports.

    Simulated devices run the host's kernels, so the workspace is that of the host, not of a GPU.

    Raises:
        ValueError: the simulated devices are not built.
    """
    cards = [budget for budget in scenario.budgets if budget.device.type != "cpu"]
    free = [budget.capacity - budget.in_use - budget.in_use_by_others for budget in cards]
    try:
        segmented = any(budget.segmented for budget in cards)
        sim.enable(free, dry=True, allocator="cuda" if segmented else "exact")
    except RuntimeError as error:
        raise ValueError(f"--simulate: {error}") from None
    stand_ins = {b.place: Place(torch.device("sim", i)) for i, b in enumerate(cards)}
    budgets = tuple(_simulated(scenario.budgets, stand_ins))
    console = Console(file=out) if out.isatty() else Console(file=out, width=_WIDTH)
    alive: list[KVCache] = []  # with their models, which stay loaded beside the next
    for workload, plan, name in zip(scenario.workloads, plans, models, strict=True):
        model = models[name]
        model.choose(workload.model.choice)
        shapes = workload.promise.caches
        caches = [each.kind(model, each.max_seq_len, each.batch_size) for each in shapes]
        real = Workload.under(plan, model, caches)
        where = [stand_ins.get(place, Place(place.device)) for place in plan.places]
        costs = real.costs(real.peaks(budgets))
        same = plan_where(costs, budgets, where, plan.objective, plan.order)
        alone = replace(scenario, workloads=(real,), budgets=budgets)
        _carry_out(console, model, alone, same, name)
        alive += caches
        budgets = tuple(same.remaining())


def _simulated(budgets: Sequence[Budget], stand_ins: Mapping[Place, Place]) -> Iterator[Budget]:
    """Empty devices of the same sizes, all on this host, which gets the memory of all hosts."""
    memory = [budget for budget in budgets if budget.place not in stand_ins]
    for budget in budgets:
        if budget.place in stand_ins:
            yield _emptied([budget], stand_ins[budget.place])
    if memory:
        yield _emptied(memory, Place(memory[0].device))


def _emptied(budgets: Sequence[Budget], place: Place) -> Budget:
    """One empty device with the free memory of several."""
    free = sum(b.capacity - b.in_use - b.in_use_by_others for b in budgets)
    return replace(
        budgets[0],
        device=place.device,
        host=place.host,
        capacity=free,
        in_use=0,
        in_use_by_others=0,
        models={},
    )


def _carry_out(
    console: Console, model: Transformer, scenario: Scenario, plan: Plan, name: str
) -> None:
    def show(plan: Plan, report: LoadReport) -> None:
        console.print(f"The {name}, carried out on simulated devices:", highlight=False)
        for table in fitted(report.table(), console):
            console.print(table)
        for surprise in report.surprises():
            console.print(surprise, style="bold red", highlight=False)

    checkpoint = HollowCheckpoint(model)
    steps = load_units(
        model, scenario, plan=plan, checkpoint=checkpoint, lazy=False, on_loaded=show
    )
    for _ in steps:
        pass

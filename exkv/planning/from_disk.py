"""Experts that host memory has no room for: left on disk, and read as tokens choose them.

Experts that the file stores in the kernels' layout are used in place in the mapped file, so the
system may drop their pages and read them again, and a model can be larger than its machine's
memory. Everything else is planned as usual; of these experts, the ones chosen most often count as
in memory, as the system keeps what is used most. The bytes that remain on disk are the ledger's
line ``from_disk``. It is the last resort: smaller calls, and experts in host memory in place of a
card's, come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from exkv.checkpoint import (
    Checkpoint,
    CheckpointError,
    has_tensors,
    measured_rate,
    open_checkpoint,
)
from exkv.models import Unit
from exkv.sizes import human
from exkv.weights import Source
from exkv.weights.expert_groups import expert_of
from exkv.weights.read_parameters import mapped_parameters

from .model import ModelShape
from .plan import CPU, Plan
from .scenario import Scenario, Workload

#: Precision, in bytes, of the search for the least on disk.
_STEP = 16 << 20


# What may be left there ---------------------------------------------------------------------------


def mapped_bytes(model: ModelShape) -> dict[str, int]:
    """Unit -> bytes of one of its routed experts, which are alike, that is used in place in the
    checkpoint's files; for units that have any. Files are opened, but nothing is read except one
    layer's tensors of each layout that must be converted."""
    if model.choice is not None or model.losses() is not None or not _has_files(model):
        return {}
    assert model.config.path is not None
    units = [unit for unit in model.units if len(set(unit.expert_bytes)) == 1]
    try:
        with open_checkpoint(model.config.path) as checkpoint:
            found = dict(_mapped_in(checkpoint, units))
    except CheckpointError:  # loading will report it
        return {}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _has_files(model: ModelShape) -> bool:
    """Whether the model's storage is known; with a config alone it isn't."""
    return has_tensors(model.config, "")


def _mapped_in(checkpoint: Checkpoint, units: Sequence[Unit]) -> Iterator[tuple[str, int]]:
    known: dict[object, int] = {}
    for unit in units:
        first, all_of = (_kinds(checkpoint, _sources(unit, those)) for those in (range(1), None))
        layout = unit.layout, unit.spec.kind, first
        if layout not in known:
            known[layout] = _mapped_of_one(checkpoint, unit)
        yield unit.name, known[layout] if first == all_of else 0


def _sources(unit: Unit, experts: range | None) -> list[Source]:
    """Sources of these experts' parameters; None for all experts'."""
    of = range(len(unit.expert_bytes)) if experts is None else experts
    return [s for s in unit.spec.sources if any(expert_of(each) in of for each in s.parameters)]


def _kinds(checkpoint: Checkpoint, sources: Sequence[Source]) -> frozenset[object]:
    """How tensors are stored: their types, and whether they can be used in place."""
    names = {name for source in sources for name in source.stored}
    return frozenset((checkpoint.info(n).dtype, checkpoint.mapping(n) is None) for n in names)


def _mapped_of_one(checkpoint: Checkpoint, unit: Unit) -> int:
    mapped = mapped_parameters(checkpoint, _sources(unit, range(1)), unit.shapes)
    return sum(unit.nbytes[name] for name in mapped if expert_of(name) == 0)


def may_be_left(scenario: Scenario) -> Scenario | None:
    """The scenario with everything on disk that may be there, or None if nothing may: because the
    user said so, no file has such experts, or host memory isn't on offer."""
    memory = [budget for budget in scenario.budgets if budget.place == budget.place.memory]
    models = [workload.model for workload in scenario.workloads]
    elsewhere = scenario.over_hosts or any(model.elsewhere for model in models)
    if not scenario.disk_experts or elsewhere or not memory or any(b.disk for b in memory):
        return None
    workloads = tuple(replace(w, mapped=mapped_bytes(w.model)) for w in scenario.workloads)
    total = sum(map(_mapped_total, workloads))
    if not total:
        return None
    return with_disk(replace(scenario, workloads=workloads), total)


def _mapped_total(workload: Workload) -> int:
    units = workload.model.units
    return sum(workload.mapped.get(u.name, 0) * len(u.expert_bytes) for u in units)


def with_rate(scenario: Scenario) -> Scenario:
    """The scenario with the bandwidth of the disk that holds the experts, measured unless known."""
    if any(budget.disk_bandwidth for budget in scenario.budgets):
        return scenario
    model = next(workload.model for workload in scenario.workloads if workload.mapped)
    unit = next(unit for unit in reversed(model.units) if unit.expert_bytes)
    assert model.config.path is not None
    with open_checkpoint(model.config.path) as checkpoint:
        name = next(iter(_sources(unit, range(1))[0].stored))
        rate = measured_rate(checkpoint.info(name).file)
    return _with_host(scenario, disk_bandwidth=rate)


def with_disk(scenario: Scenario, nbytes: int) -> Scenario:
    """The scenario with at most ``nbytes`` on disk."""
    return _with_host(scenario, disk=nbytes)


def _with_host(scenario: Scenario, **lines: int | float | None) -> Scenario:
    """The scenario with these fields of the host's budget changed."""
    budgets = (
        replace(budget, **lines) if budget.device == CPU else budget  # type: ignore[arg-type]
        for budget in scenario.budgets
    )
    return replace(scenario, budgets=tuple(budgets))


def in_memory(scenario: Scenario) -> Scenario:
    """The scenario with nothing on disk."""
    return with_disk(scenario.each(lambda workload: replace(workload, mapped={})), 0)


def most_on_disk(scenario: Scenario) -> int:
    """Bytes that may be on disk."""
    return max(budget.disk for budget in scenario.budgets)


def least_on_disk(scenario: Scenario) -> int:
    """The fewest bytes on disk with which a scenario fits, if it fits with all that may be there:
    so cards are filled before anything is left on disk."""
    most = most_on_disk(scenario)
    if all(budget.device == CPU for budget in scenario.budgets):
        return most  # the ledger says how many
    costs = scenario.costs(scenario.peaks())
    if not scenario.has_room(costs):
        return most
    low, high = 0, most
    while high - low > _STEP:
        middle = (low + high) // 2
        if with_disk(scenario, middle).has_room(costs):
            high = middle
        else:
            low = middle
    return high


def allowed(plan: Plan, most: int) -> Plan:
    """The plan, allowing up to ``most`` bytes on disk in case memory shrinks before the load."""
    ledgers = (
        replace(ledger, budget=replace(ledger.budget, disk=most)) if ledger.budget.disk else ledger
        for ledger in plan.ledgers
    )
    return replace(plan, ledgers=tuple(ledgers))


# In words -----------------------------------------------------------------------------------------


def why_not(scenario: Scenario) -> str:
    """The part of a refusal that says why experts on disk don't make it fit; empty where nobody
    would expect them to."""
    models = [workload.model for workload in scenario.workloads if _has_files(workload.model)]
    total = sum(sum(unit.expert_bytes) for model in models for unit in model.units)
    memory = any(budget.place == budget.place.memory for budget in scenario.budgets)
    if not total or not memory or scenario.over_hosts:
        return ""
    if not scenario.disk_experts:
        return "; no experts are to be read from disk (disk_experts)"
    found = may_be_left(in_memory(scenario))
    nbytes = sum(map(_mapped_total, found.workloads)) if found else 0
    if nbytes == total:
        return f"; even with all {human(total)} of experts read from disk"
    return (
        f"; {human(nbytes)} of {human(total)} of experts can be read from disk, those that the "
        "file stores as kernels take them: a GGUF file of K types, or floats in the model's "
        "dtype, stores all of them so"
    )

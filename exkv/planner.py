"""From models, caches and devices to a plan, and the questions that plans answer.

``place`` is the way in. Behind it a ``Scenario`` says what is to stand where: models with what
they are promised, and budgets. Every question is a pure function of a scenario: its plans, the
longest context that still fits, the largest batch, the least lossy cache, the extra memory that
it lacks, and the nearest scenarios that would fit. No device is touched, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exkv import devices as accelerators
from exkv.budgets import Devices, Sizes, make_budgets, present_budget
from exkv.cache import CACHES, KVCache
from exkv.errors import PlacementError
from exkv.models import Transformer, Unit
from exkv.placement import fits_units, place_units, plan_where
from exkv.plan import Budget, Plan, UnitCost, human
from exkv.workspace import CacheShape, Promise, predict_workspaces

#: Rows that a search for the largest batch goes up to.
MAX_BATCH = 4096
#: Chunk sizes that a refusal tries as its remedy.
_SMALLER_CHUNKS = (1024, 512, 256, 128)

#: Device type -> for each unit, its workspace and its output's bytes: int64 (units, 2).
Peaks = Mapping[str, np.ndarray]


def place(
    model: Transformer,
    caches: Sequence[KVCache] | KVCache = (),
    devices: Devices | None = None,
    objective: str = "pack",
    order: str = "listed",
    *,
    reserve: Sizes | None = None,
    cap: Sizes | None = None,
    margin: Sizes | None = None,
    cpu: bool | int | str = False,
    bandwidth: Sequence[float] | None = None,
    last_id_only: bool = False,
    beside: Plan | None = None,
) -> Plan:
    """Say what would stand where, before a byte is loaded.

    Args:
        model: built from a config; loaded or not makes no difference.
        caches: that are to stand beside it. (Those of :attr:`Model.caches` are not added here.)
        devices, reserve, cap, margin, cpu, bandwidth: see :func:`exkv.budgets.make_budgets`.
        objective: "pack", "balance", "fewest" or "speed"; see ``exkv.plan.OBJECTIVES``.
        order: "listed", or "any" where the devices may be filled in any order.
        last_id_only: plan for logits of each row's last token only.
        beside: another model's plan, for the same devices, that is carried out first.

    Returns:
        The plan; ``model.load(plan=plan)`` carries it out.

    Raises:
        ValueError: a device, size or word that is none.
        PlacementError: it does not fit; ``suggestions`` would, and ``plan`` is the attempt.
    """
    if beside is not None:
        if devices is not None:
            raise ValueError("devices follow from the plan that is given as beside")
        budgets = beside.remaining()
    else:
        budgets = make_budgets(
            devices, reserve=reserve, cap=cap, margin=margin, cpu=cpu, bandwidth=bandwidth
        )
    caches = [caches] if isinstance(caches, KVCache) else caches
    workload = Workload.of(model, caches, last_id_only=last_id_only)
    scenario = Scenario(
        workloads=(workload,), budgets=tuple(budgets), objective=objective, order=order
    )
    return scenario.plans()[0]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and what it is promised."""

    model: Transformer
    promise: Promise

    @classmethod
    def of(
        cls, model: Transformer, caches: Sequence[KVCache], *, last_id_only: bool = False
    ) -> Workload:
        promise = Promise(
            max_input_len=model.max_input_len,
            caches=tuple(map(CacheShape.of, caches)),
            last_id_only=last_id_only,
        )
        return cls(model, promise)

    def peaks(self, budgets: Sequence[Budget]) -> Peaks:
        """Predicted for the types of devices on offer."""
        return {kind: self._peaks_on(kind) for kind in self._types(budgets)}

    def no_peaks(self, budgets: Sequence[Budget]) -> Peaks:
        none = np.zeros((len(self.model.units), 2), dtype=np.int64)
        return dict.fromkeys(self._types(budgets), none)

    def _types(self, budgets: Sequence[Budget]) -> set[str]:
        pinned = {"cpu"} if self.model.embed_cpu else set()
        return {budget.device.type for budget in budgets} | pinned

    def _peaks_on(self, device_type: str) -> np.ndarray:
        predicted = predict_workspaces(self.model, self.promise, device_type)
        return np.array([(peak.workspace, peak.output) for peak in predicted])

    def costs(self, peaks: Peaks) -> list[UnitCost]:
        """The ledger lines of every unit."""
        return [self._cost(unit, peaks) for unit in self.model.units]

    def _cost(self, unit: Unit, peaks: Peaks) -> UnitCost:
        weights = sum(unit.nbytes.values())
        cache = self._cache_bytes(unit)
        last = unit is self.model.units[-1]
        return UnitCost(
            name=unit.name,
            weights=weights,
            cache=cache,
            workspace={kind: int(table[unit.index, 0]) for kind, table in peaks.items()},
            logits=max(int(table[-1, 1]) for table in peaks.values()) if last else 0,
            traffic=weights + cache if unit.index else 0,  # of the embedding a few rows
            shared={other: unit.nbytes[name] for name, (other, _) in unit.spec.tied.items()},
            pinned=accelerators.CPU if self.model.embed_cpu and unit.index == 0 else None,
        )

    def _cache_bytes(self, unit: Unit) -> int:
        if unit.spec.layer is None:
            return 0
        return sum(cache.nbytes(unit.spec.layer) for cache in self.promise.caches)

    def promised(self, **changes: object) -> Workload:
        return replace(self, promise=replace(self.promise, **changes))

    def resized(self, **sizes: int) -> Workload:
        """With every cache of another ``batch_size`` or ``max_seq_len``."""
        return self.promised(caches=tuple(c.resized(**sizes) for c in self.promise.caches))

    def shortened(self, max_seq_len: int) -> Workload:
        """With no cache longer than this."""
        caches = self.promise.caches
        shorter = (c.resized(max_seq_len=min(c.max_seq_len, max_seq_len)) for c in caches)
        return self.promised(caches=tuple(shorter))

    def as_kind(self, kind: type[KVCache]) -> Workload:
        return self.promised(caches=tuple(c.as_kind(kind) for c in self.promise.caches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is to stand where.

    Attributes:
        workloads: placed one after the other, each around those before it: a draft model that
            comes second never displaces the first.
        budgets: the devices.
        objective, order: as :func:`exkv.placement.place_units` takes them.
    """

    workloads: tuple[Workload, ...]
    budgets: tuple[Budget, ...]
    objective: str = "pack"
    order: str = "listed"

    def peaks(self) -> list[Peaks]:
        return [workload.peaks(self.budgets) for workload in self.workloads]

    def attempt(self, peaks: Sequence[Peaks] | None = None) -> tuple[Plan, ...]:
        """A plan for each workload; PlacementError, without remedies, where one does not fit."""
        budgets, plans = self.budgets, []
        for workload, known in zip(self.workloads, peaks or self.peaks(), strict=True):
            costs = workload.costs(known)
            plan = place_units(costs, budgets, objective=self.objective, order=self.order)
            plans.append(replace(plan, last_id_only=workload.promise.last_id_only))
            budgets = plans[-1].remaining()
        return tuple(plans)

    def plans(self) -> tuple[Plan, ...]:
        """A plan for each workload.

        Raises:
            PlacementError: one does not fit; the error says by how much, where, and lists the
                nearest changes that would make it fit.
        """
        try:
            return self.attempt()
        except PlacementError as error:
            raise self._with_remedies(error) from None

    def fits(self, peaks: Sequence[Peaks] | None = None) -> bool:
        """Whether there is a plan; with peaks that are known, or else predicted, which takes
        longer, so it is first seen whether weights and caches alone would fit."""
        if peaks is None:
            return self.fits(self.no_peaks()) and self.fits(self.peaks())
        if len(self.workloads) == 1:
            return fits_units(self.workloads[0].costs(peaks[0]), self.budgets, self.order)
        try:
            self.attempt(peaks)
        except PlacementError:
            return False
        return True

    def no_peaks(self) -> list[Peaks]:
        """As if calls took no workspace: what does not fit then does not fit."""
        return [workload.no_peaks(self.budgets) for workload in self.workloads]

    def _with_remedies(self, error: PlacementError) -> PlacementError:
        found = tuple(nearest_changes(self))
        remedy = "; ".join(found) or "no single change would; use a smaller model"
        return PlacementError(
            f"{error}. What would fit: {remedy}",
            unit=error.unit,
            device=error.device,
            needed=error.needed,
            available=error.available,
            suggestions=found,
            plan=error.plan,
        )

    # The same with one thing changed -------------------------------------------------------

    def _each(self, change: Callable[[Workload], Workload]) -> Scenario:
        return replace(self, workloads=tuple(map(change, self.workloads)))

    def resized(self, **sizes: int) -> Scenario:
        """With every cache of another ``batch_size`` or ``max_seq_len``."""
        return self._each(lambda workload: workload.resized(**sizes))

    def shortened(self, max_seq_len: int) -> Scenario:
        return self._each(lambda workload: workload.shortened(max_seq_len))

    def as_kind(self, kind: type[KVCache]) -> Scenario:
        return self._each(lambda workload: workload.as_kind(kind))

    def in_chunks_of(self, tokens: int) -> Scenario:
        return self._each(lambda workload: workload.promised(max_input_len=tokens))

    def with_more(self, device: int, nbytes: int) -> Scenario:
        """With a larger device at this position, and no cap in the way."""
        budget = self.budgets[device]
        cap = None if budget.cap is None else budget.cap + nbytes
        larger = replace(budget, capacity=budget.capacity + nbytes, cap=cap)
        return replace(self, budgets=_changed(self.budgets, device, larger))

    def with_reserve(self, most: int) -> Scenario:
        """With no reserve above this."""
        lower = (replace(b, reserve=min(b.reserve, most)) for b in self.budgets)
        return replace(self, budgets=tuple(lower))

    def with_host(self) -> Scenario:
        """With what the host has free as overflow."""
        now = accelerators.memory(accelerators.CPU)
        host = Budget(
            device=accelerators.CPU,
            capacity=now.capacity,
            in_use_by_others=now.in_use + now.in_use_by_others,
        )
        return replace(self, budgets=(*self.budgets, host))


def _changed(budgets: tuple[Budget, ...], position: int, budget: Budget) -> tuple[Budget, ...]:
    return (*budgets[:position], budget, *budgets[position + 1 :])


# A second cache ---------------------------------------------------------------------------------


def check_new_cache(model: Transformer, plan: Plan, cache: KVCache) -> None:
    """Whether a cache fits beside a loaded model, with the calls that it promises.

    Raises:
        PlacementError: it does not; the message says where, by how much, and what would fit.
    """
    budgets = tuple(
        replace(present_budget(b.device), reserve=b.reserve, margin=b.margin, cap=b.cap)
        for b in plan.remaining()
    )
    addition = _Addition(model, plan, budgets, CacheShape.of(cache))
    ledger = min(addition.plan(addition.peaks()).ledgers, key=lambda ledger: ledger.headroom)
    if ledger.headroom >= 0:
        return
    length = _largest(addition.resized, cache.max_seq_len - 1)
    remedy = f"max_seq_len={length} would fit" if length else "no length would fit"
    raise PlacementError(
        f"no room for {cache!r} on {ledger.device}: its layers there take {ledger.cache:,} bytes "
        f"and a call with it up to {ledger.workspace:,}; {ledger.limit:,} are left, "
        f"{-ledger.headroom:,} too few. {remedy}; a cache that is built before load_autosplit is "
        "planned with the model",
        unit=f"cache on {ledger.device}",
        device=str(ledger.device),
        needed=ledger.total,
        available=ledger.limit,
        suggestions=(remedy,) if length else (),
    )


def with_caches(model: Transformer, plan: Plan) -> Plan:
    """A loaded model's plan, with the caches that live now."""
    workload = Workload.of(model, model.caches, last_id_only=plan.last_id_only)
    budgets = [ledger.budget for ledger in plan.ledgers]
    costs = workload.costs(workload.peaks(budgets))
    now = plan_where(costs, budgets, plan.devices, plan.objective, plan.order)
    return replace(now, last_id_only=plan.last_id_only)


@dataclass(frozen=True, slots=True)
class _Addition:
    """A cache that comes to a model that stands; asked like a scenario."""

    model: Transformer
    standing: Plan
    budgets: tuple[Budget, ...]
    cache: CacheShape

    def resized(self, max_seq_len: int) -> _Addition:
        return replace(self, cache=self.cache.resized(max_seq_len=max_seq_len))

    def peaks(self) -> list[Peaks]:
        return [self._workload().peaks(self.budgets)]

    def no_peaks(self) -> list[Peaks]:
        return [self._workload().no_peaks(self.budgets)]

    def plan(self, peaks: Sequence[Peaks]) -> Plan:
        """What the cache adds: its own bytes, and workspace where its calls need more."""
        costs = [
            replace(cost, weights=0, logits=0, shared={}, cache=self._bytes(unit))
            for cost, unit in zip(self._workload().costs(peaks[0]), self.model.units, strict=True)
        ]
        standing = self.standing
        return plan_where(costs, self.budgets, standing.devices, standing.objective, standing.order)

    def fits(self, peaks: Sequence[Peaks]) -> bool:
        return self.plan(peaks).fits

    def _bytes(self, unit: Unit) -> int:
        return 0 if unit.spec.layer is None else self.cache.nbytes(unit.spec.layer)

    def _workload(self) -> Workload:
        return Workload.of(self.model, self.model.caches).promised(
            caches=(*map(CacheShape.of, self.model.caches), self.cache),
            last_id_only=self.standing.last_id_only,
        )


# Solving for one unknown ------------------------------------------------------------------------


def longest(scenario: Scenario, limit: int) -> int:
    """The largest ``max_seq_len`` up to ``limit`` that all caches can have; 0 if none fits."""
    return _largest(lambda n: scenario.resized(max_seq_len=n), limit)


def largest_batch(scenario: Scenario, limit: int = MAX_BATCH) -> int:
    """The largest ``batch_size`` up to ``limit`` that all caches can have; 0 if none fits."""
    high = 1
    while high < limit and scenario.resized(batch_size=high).fits():
        high = min(high * 2, limit)
    return _largest(lambda n: scenario.resized(batch_size=n), high)


def least_lossy(scenario: Scenario) -> str | None:
    """The first kind of ``exkv.CACHES``, which lists the exact one first, that fits."""
    return next((name for name, kind in CACHES.items() if scenario.as_kind(kind).fits()), None)


def extra_memory(scenario: Scenario) -> tuple[int, int]:
    """The least memory that one more device part would have to have: ``(position, bytes)``, the
    device on which the fewest bytes more would do, and how many; ``(0, 0)`` where all fits."""
    peaks = scenario.peaks()
    if scenario.fits(peaks):
        return 0, 0
    lacks = [_lacking(scenario, device, peaks) for device in range(len(scenario.budgets))]
    return min(enumerate(lacks), key=lambda pair: pair[1])


def _lacking(scenario: Scenario, device: int, peaks: Sequence[Peaks]) -> int:
    """Bytes that this device lacks for everything to fit."""
    high = 1 << 20
    while not scenario.with_more(device, high).fits(peaks):
        high *= 2
    return 1 + _last(0, high, lambda more: not scenario.with_more(device, more).fits(peaks))


def _largest(vary: Callable[[int], Scenario | _Addition], high: int) -> int:
    """The largest n in 1..high that fits, 0 if none does; what fits at n fits below it.

    Predicting workspaces takes far longer than placing, and between two lengths they are all but
    linear. So each step searches with workspaces drawn between those of the bounds, and only
    its answer is predicted; in the end n was found to fit and n + 1 not to, both exactly.
    """
    known: dict[int, list[Peaks]] = {}

    def fits(n: int) -> bool:
        known[n] = vary(n).peaks()
        return vary(n).fits(known[n])

    def drawn(n: int) -> bool:
        return vary(n).fits(_between(n, low, high, known[low], known[high]))

    high = _last(0, high + 1, lambda n: vary(n).fits(vary(n).no_peaks()))
    if high == 0 or not fits(1):
        return 0
    if fits(high):
        return high
    low = 1
    while high - low > 1:
        guess = max(_last(low, high, drawn), low + 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return low


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The last n that fits, of low, which does, to high, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _between(
    n: int, low: int, high: int, below: Sequence[Peaks], above: Sequence[Peaks]
) -> list[Peaks]:
    """Peaks at n on the line between those at two bounds."""
    share = (n - low) / (high - low)
    return [
        {kind: (one[kind] + (two[kind] - one[kind]) * share).astype(np.int64) for kind in one}
        for one, two in zip(below, above, strict=True)
    ]


# What would fit ---------------------------------------------------------------------------------


def nearest_changes(scenario: Scenario) -> Iterator[str]:
    """Single changes that would make it fit, each one planned; those that leave every answer as
    it is come first, then those that shorten what can be said, then those that round it."""
    yield from _smaller_chunks(scenario)
    yield from _lower_reserve(scenario)
    yield from _layers_on_the_host(scenario)
    caches = [c for workload in scenario.workloads for c in workload.promise.caches]
    if caches:
        longest_now = max(cache.max_seq_len for cache in caches)
        length = _largest(scenario.shortened, longest_now - 1)
        if length:
            yield f"a cache of max_seq_len={length}"
        for kind in list(CACHES.values())[1:]:
            if scenario.as_kind(kind).fits():
                yield f"{kind.__name__} at the same length"
                break


def _smaller_chunks(scenario: Scenario) -> Iterator[str]:
    chunk = max(workload.promise.max_input_len for workload in scenario.workloads)
    smaller = [n for n in _SMALLER_CHUNKS if n < chunk]
    if smaller and scenario.in_chunks_of(smaller[-1]).fits():
        tokens = next(n for n in smaller if scenario.in_chunks_of(n).fits())
        yield f"chunks of {tokens} tokens (max_input_len={tokens}): the same answers"


def _lower_reserve(scenario: Scenario) -> Iterator[str]:
    peaks = scenario.peaks()
    high = max(budget.reserve for budget in scenario.budgets)
    if not high or not scenario.with_reserve(0).fits(peaks):
        return
    low = _last(0, high, lambda most: scenario.with_reserve(most).fits(peaks))
    yield f"a reserve_vram of {human(low)} ({low:,} bytes): the same answers"


def _layers_on_the_host(scenario: Scenario) -> Iterator[str]:
    if any(budget.device.type == "cpu" for budget in scenario.budgets):
        return
    try:
        plans = scenario.with_host().attempt()
    except PlacementError:
        return
    moved = sum(device.type == "cpu" for plan in plans for device in plan.devices)
    yield f"'cpu' as the last of devices, with {moved} units on it: the same answers, slower"

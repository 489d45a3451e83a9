"""What to place where: models with their promised caches and calls, and devices; a frozen value.

Everything here is a pure function of shapes and budgets: no device is touched, and no weight is
read. ``exkv.planning.solve`` searches among scenarios, ``exkv.planning.place`` is the entry point.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from exkv import devices as accelerators
from exkv.cache import CacheLayer, KVCache
from exkv.caching_allocator import ROUND_LARGE, Rules
from exkv.errors import PlacementError
from exkv.models import Transformer, Unit
from exkv.models.units import staging_bytes
from exkv.sizes import human
from exkv.weights.on_load import BITS, INTEGERS

from .ledgers import plan_where
from .model import ModelShape
from .plan import CPU, EMBEDDED_IN_FLIGHT, Budget, Link, Place, Plan, UnitCost, without_memory
from .reserved import Allocated, reserved_for
from .search.experts import fits_experts
from .search.placement import fits_units, place_units
from .workspace import CacheShape, Promise, predict_workspaces

#: Device type -> for each unit, its workspace, its output's bytes, and what a call reserves where
#: memory comes in segments: int64 (units, 3).
Peaks = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and the caches and calls that it is promised.

    Attributes:
        embed_cpu: whether its embedding is pinned to host memory; None to let the plan decide.
        slices: whether a plan may run the head on slices of a chunk.
        fitted: what differs from the defaults so that it fits, in words.
        where: the place of each unit, where it was chosen together with the experts in host memory
            (``exkv.planning.host_experts``).
        gap: of that choice, as in :class:`Plan`.
        mapped: by unit, as in :class:`UnitCost`; empty where nothing may be read from disk.
    """

    model: ModelShape
    promise: Promise
    embed_cpu: bool | None
    slices: bool = False
    fitted: tuple[str, ...] = ()
    where: tuple[Place, ...] = ()
    gap: float = 0.0
    mapped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Transformer | ModelShape,
        caches: Sequence[KVCache | CacheShape],
        *,
        last_id_only: bool | None = None,
    ) -> Workload:
        """
        Args:
            last_id_only: whether logits are only wanted for each row's last token; None for all
                tokens' logits, which a plan may compute in slices.
        """
        shapes = (c if isinstance(c, CacheShape) else CacheShape.of(c) for c in caches)
        promise = Promise(
            max_input_len=model.max_input_len,
            caches=tuple(shapes),
            last_id_only=bool(last_id_only),
            adapters=tuple(model.adapters),
        )
        return cls(ModelShape.of(model), promise, model.embed_cpu, slices=last_id_only is None)

    @classmethod
    def under(
        cls,
        plan: Plan,
        model: Transformer | ModelShape,
        caches: Sequence[KVCache | CacheShape],
    ) -> Workload:
        """The workload of a model that a plan covers, with these caches in place of the plan's;
        its experts are in host memory as the plan says, or, once loaded, as they are now."""
        shape = ModelShape.of(model)
        if all(unit.device is None for unit in model.units):
            shape = shape.with_host_experts(plan.host_experts)
        workload = replace(cls.of(model, caches, last_id_only=plan.last_id_only), model=shape)
        chunk = plan.max_input_len if len(model.chunks) > 1 else None
        promise = replace(
            workload.promise,
            max_input_len=chunk or workload.promise.max_input_len,
            logits_len=plan.logits_len,
        )
        on_host = model.embed_cpu or plan.units[0].place == Place(CPU)
        mapped = {unit.name: unit.mapped for unit in plan.units if unit.mapped}
        return replace(
            workload, promise=promise, embed_cpu=on_host, fitted=plan.fitted, mapped=mapped
        )

    def peaks(self, budgets: Sequence[Budget]) -> Peaks:
        """Workspaces predicted for the device types on offer."""
        return {kind: self._peaks_on(kind) for kind in self._types(budgets)}

    def no_peaks(self, budgets: Sequence[Budget]) -> Peaks:
        none = np.zeros((len(self.model.units), 3), dtype=np.int64)
        return dict.fromkeys(self._types(budgets), none)

    def _types(self, budgets: Sequence[Budget]) -> set[str]:
        pinned = {"cpu"} if self.embed_cpu else set()
        return {budget.device.type for budget in budgets} | pinned

    def _peaks_on(self, device_type: str) -> np.ndarray:
        predicted = predict_workspaces(self.model, self.promise, device_type)
        return np.array([(peak.workspace, peak.output, peak.reserved) for peak in predicted])

    def costs(self, peaks: Peaks, home: str = "", among: Iterable[int] = ()) -> list[UnitCost]:
        """The ledger lines of every unit.

        Args:
            home: the host of an embedding in host memory.
            among: sizes in bytes of other allocations that may share segments with these.
        """
        hidden, hidden_step = self.hidden_bytes()
        card = next((kind for kind in peaks if kind != "cpu"), "cpu")
        staging = staging_bytes(self.model.units, card)
        costs = [
            replace(
                self._cost(unit, peaks, home),
                hidden=hidden,
                hidden_step=hidden_step,
                staging=staging if unit.host_experts else 0,
            )
            for unit in self.model.units
        ]
        rules = {kind: found for kind in peaks if (found := accelerators.allocator_rules(kind))}
        return self._with_segments(costs, peaks, rules, among) if rules else costs

    def _with_segments(
        self,
        costs: Sequence[UnitCost],
        peaks: Peaks,
        rules: Mapping[str, Rules],
        among: Iterable[int],
    ) -> list[UnitCost]:
        """The costs with what they reserve on devices that give memory in segments, all by the same
        rules. In addition to the segments that units share, some are open on each device."""
        one = next(iter(rules.values()))
        pairs = zip(self.model.units, costs, strict=True)
        units = [self._allocated(unit, cost.logits) for unit, cost in pairs]
        buffers = {cost.staging for cost in costs} - {0}
        sizes = frozenset(among).union(buffers, *(unit.sizes for unit in units))
        started = one.open_segments(sizes)
        return [
            replace(
                cost,
                segments=reserved - unit.nbytes,
                reserved={kind: int(peaks[kind][index, 2]) + started for kind in rules},
                staging=one.share(cost.staging, sizes),
            )
            for index, (cost, unit, reserved) in enumerate(
                zip(costs, units, reserved_for(units, sizes, one), strict=True)
            )
        ]

    def allocated_sizes(self, peaks: Peaks) -> frozenset[int]:
        """Sizes in bytes of all allocations that stay, over all units."""
        logits = max((int(table[-1, 1]) for table in peaks.values()), default=0)
        units = (self._allocated(unit, logits) for unit in self.model.units)
        return frozenset().union(*(unit.sizes for unit in units))

    def _allocated(self, unit: Unit, logits: int) -> Allocated:
        if unit.index in self.model.elsewhere:
            return Allocated((), (), ())
        layers = self._cache_layers(unit)
        return Allocated(
            fixed=[self._own_bytes(unit), self._adapter_bytes(unit), logits],
            caches=[0 if each.host_bytes_needed() else each.full_bytes() for each in layers],
            before=[each.bytes_before() for each in layers],
        )

    def hidden_bytes(self) -> tuple[int, int]:
        """Bytes of hidden states in the largest call, and in a decode step, including the
        embeddings that an MTP head on another host takes."""
        each = self.model.config.handed_on * self.model.dtype.itemsize
        calls = (lengths for _, lengths in self.promise.worst_calls())
        tokens = max(len(lengths.new) * lengths.chunk for lengths in calls)
        crossing = 1 + EMBEDDED_IN_FLIGHT * self.model.config.mtp
        return tokens * each * crossing, self.rows * each

    def _cost(self, unit: Unit, peaks: Peaks, home: str) -> UnitCost:
        if unit.index in self.model.elsewhere:
            peaks_there = {kind: 0 for kind in (*peaks, accelerators.ELSEWHERE.type)}
            return UnitCost(
                name=unit.name,
                weights=0,
                cache=0,
                workspace=peaks_there,
                pinned=Place(accelerators.ELSEWHERE),
            )
        weights = self._own_bytes(unit) + self._adapter_bytes(unit)
        cache, host_cache = self._cache_bytes(unit)
        kept = unit is self.model.units[-1] or unit.spec.is_mtp
        choice = self.model.choice
        experts = unit.expert_bytes
        chosen = self._chosen(unit, len(experts))
        unread = sum(experts) - sum(map(operator.mul, experts, chosen))
        read = weights + unit.host_weights + self._read(unit) - round(unread)
        return UnitCost(
            name=unit.name,
            weights=weights,
            cache=cache,
            host_cache=host_cache,
            workspace={kind: int(table[unit.index, 0]) for kind, table in peaks.items()},
            logits=max(int(table[unit.index, 1]) for table in peaks.values()) if kept else 0,
            traffic=read if unit.index else 0,  # an embedding reads only a few rows
            experts=experts,
            chosen=chosen,
            shared_experts=unit.shared_expert_bytes if experts else 0,
            host_experts=tuple(sorted(unit.host_experts)),
            host_weights=unit.host_weights,
            mapped=self.mapped.get(unit.name, 0),
            shared=_shared_bytes(unit),
            shared_cache=self._shared_cache(unit, cache, host_cache),
            pinned=Place(CPU, home) if self.embed_cpu and unit.index == 0 else None,
            kept=choice.kept[unit.name] if choice else None,
            loss=choice.loss[unit.name] if choice else 0.0,
        )

    def _own_bytes(self, unit: Unit) -> int:
        """Bytes of its weights, without the experts in host memory."""
        return sum(unit.nbytes.values()) - unit.host_weights

    def _chosen(self, unit: Unit, experts: int) -> tuple[float, ...]:
        """The probability that a decode step of all rows reads each expert, with rows' choices
        independent; equal for all experts where nothing is known of the unit."""
        known = (self.model.usage() or {}).get(unit.name) if experts else None
        taken = getattr(self.model.config.specific, "num_experts_per_tok", None) or 1
        shares = known or (min(taken / experts, 1.0),) * experts if experts else ()
        return tuple(1 - (1 - share) ** self.rows for share in shares)

    @property
    def rows(self) -> int:
        """The most rows of a decode step."""
        return max((cache.batch_size for cache in self.promise.caches), default=1)

    def _adapter_bytes(self, unit: Unit) -> int:
        """Bytes of the adapters' part of the unit, which lies beside its weights."""
        adapters = (self.model.adapters[name] for name in self.promise.adapters)
        return sum(adapter.nbytes.get(unit.index, 0) for adapter in adapters)

    def _cache_bytes(self, unit: Unit) -> tuple[int, int]:
        """Bytes beside the weights, and in host memory wherever the weights are."""
        layers = self._cache_layers(unit)
        offloaded = sum(layer.host_bytes_needed() for layer in layers)
        tiers = sum(layer.tier_bytes() for layer in layers)
        return sum(layer.full_bytes() for layer in layers) - offloaded, offloaded + tiers

    def _shared_cache(self, unit: Unit, cache: int, host_cache: int) -> dict[int, tuple[int, int]]:
        """Index of the unit whose layer has the same keys and values -> their bytes in both."""
        reads = None if unit.spec.layer is None else self.model.config.reads(unit.spec.layer)
        if reads is None:
            return {}
        other = next(each.index for each in self.model.units if each.spec.layer == reads)
        return {} if other in self.model.elsewhere else {other: (cache, host_cache)}

    def _read(self, unit: Unit) -> int:
        """Bytes of caches that a decode step reads, wherever they lie; a tier is read when a page
        returns."""
        return sum(layer.full_bytes() for layer in self._cache_layers(unit))

    def _cache_layers(self, unit: Unit) -> list[CacheLayer]:
        """The unit's layer in every cache."""
        if (index := unit.spec.layer) is None:
            return []
        return [part for cache in self.promise.caches for part in cache.layers[index].parts]

    def host_cache_bytes(self) -> int:
        """Bytes that caches take on the host wherever the units are placed; copies of shared keys
        on another device than their layer's aren't counted."""
        costs = ((unit, *self._cache_bytes(unit)) for unit in self.model.units)
        return sum(host for unit, own, host in costs if not self._shared_cache(unit, own, host))

    def unplaced(self) -> Workload:
        """With its experts beside the rest of their layers, and all choices about it open."""
        if not self.where:
            return self
        return replace(self, model=self.model.with_host_experts({}), where=(), gap=0.0)

    def without_choice(self) -> Workload:
        """With no weight formats chosen."""
        return replace(self, model=replace(self.model, choice=None))

    def in_chunks_of(self, tokens: int) -> Workload:
        return replace(self, promise=replace(self.promise, max_input_len=tokens))

    def with_logits_of(self, tokens: int) -> Workload:
        """With the head run on slices of ``tokens`` of each row."""
        return replace(self, promise=replace(self.promise, logits_len=tokens))

    def resized(self, **sizes: int) -> Workload:
        """With every cache of another ``batch_size`` or ``max_seq_len``."""
        return self._each(lambda cache: cache.resized(**sizes))

    def shortened(self, max_seq_len: int) -> Workload:
        """With no cache longer than this."""
        return self._each(lambda c: c.resized(max_seq_len=min(c.max_seq_len, max_seq_len)))

    def as_kind(self, kind: type[KVCache]) -> Workload:
        return self._each(lambda cache: cache.as_kind(self.model, kind))

    def stored(self, pairs: Mapping[int, str]) -> Workload:
        """With keys and values of these layers in a pair of bits, in every cache."""
        return self._each(lambda cache: cache.stored(pairs))

    def _each(self, change: Callable[[CacheShape], CacheShape]) -> Workload:
        caches = tuple(map(change, self.promise.caches))
        return replace(self, promise=replace(self.promise, caches=caches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to place where.

    Attributes:
        workloads: placed one after the other, each around those before it: a draft model that
            comes second never displaces the first. Over hosts, the draft lies on the first one,
            beside the process that calls it, and is placed there before the others.
        budgets: the devices.
        objective, order, link: as :func:`exkv.planning.search.placement.place_units` takes them.
        host_experts: whether experts may lie in host memory while their layer is on a card; if
            not, whole layers do.
        disk_experts: whether experts that don't fit in host memory may be read from their file.
    """

    workloads: tuple[Workload, ...]
    budgets: tuple[Budget, ...]
    objective: str = "pack"
    order: str = "listed"
    link: Link | None = None
    host_experts: bool = True
    disk_experts: bool = True

    @property
    def home(self) -> str:
        """The host with everything that lies in host memory wherever the rest is."""
        return self.budgets[0].host if self.budgets else ""

    @property
    def over_hosts(self) -> bool:
        """Whether devices belong to named hosts, whose own memory isn't known here."""
        return any(budget.host for budget in self.budgets)

    @property
    def placing(self) -> list[int]:
        """The positions of the workloads, in placement order."""
        first, *others = range(len(self.workloads))
        return [*others, first] if self.over_hosts else [first, *others]

    @property
    def beside_host(self) -> bool:
        """Whether host memory takes what the host's cards have no room for."""
        return len(without_memory(self.budgets)) < len(self.budgets)

    def may_have_host_experts(self, position: int) -> bool:
        """Whether experts of this workload may lie in host memory while their layers are on
        cards."""
        units = self.workloads[position].model.units
        asked = self.host_experts and self.beside_host
        return asked and any(unit.expert_bytes for unit in units)

    def peaks(self) -> list[Peaks]:
        return [workload.peaks(self.budgets) for workload in self.workloads]

    def costs(self, peaks: Sequence[Peaks]) -> list[list[UnitCost]]:
        """The ledger lines of every workload; the budgets don't change them."""
        pairs = zip(self.workloads, peaks, strict=True)
        return [workload.costs(known, self.home) for workload, known in pairs]

    def attempt(self, costs: Sequence[Sequence[UnitCost]] | None = None) -> tuple[Plan, ...]:
        """A plan for each workload; PlacementError, without remedies, if one does not fit."""
        plans = self._placed(self.placing, costs or self.costs(self.peaks()))
        return tuple(plans[position] for position in range(len(plans)))

    def _placed(
        self, positions: Sequence[int], costs: Sequence[Sequence[UnitCost]]
    ) -> dict[int, Plan]:
        """Plans of these workloads, each around those before it."""
        plans: dict[int, Plan] = {}
        for position in positions:
            workload = self.workloads[position]
            plan = self._plan_of(workload, costs[position], self._left_for(position, plans))
            plans[position] = replace(
                plan,
                last_id_only=workload.promise.last_id_only,
                max_input_len=workload.promise.max_input_len,
                logits_len=workload.promise.logits_len,
                fitted=workload.fitted,
            )
        return plans

    def _plan_of(
        self, workload: Workload, costs: Sequence[UnitCost], budgets: Sequence[Budget]
    ) -> Plan:
        """The plan that was chosen with the experts in host memory, while it fits, or the best."""
        if workload.where:
            plan = plan_where(costs, budgets, workload.where, self.objective, self.order)
            if plan.fits:
                return replace(plan, link=self.link, gap=workload.gap)
        return place_units(
            costs, budgets, objective=self.objective, order=self.order, link=self.link
        )

    def places(self, position: int) -> bool:
        """Whether the workload fits around those that are placed before it."""
        before = self.placing[: self.placing.index(position) + 1]
        with contextlib.suppress(PlacementError):
            return bool(self._placed(before, self.costs(self.peaks())))
        return False

    def that_fit(self) -> dict[int, Plan]:
        """Plans of the workloads, by position, before the first that does not fit."""
        costs = self.costs(self.peaks())
        for count in range(len(self.workloads), 0, -1):
            with contextlib.suppress(PlacementError):
                return self._placed(self.placing[:count], costs)
        return {}

    def budgets_of(self, position: int) -> list[Budget]:
        """What a workload may use: what the workloads placed before it leave, or everything if
        those don't fit."""
        before = self.placing[: self.placing.index(position)]
        plans: dict[int, Plan] = {}
        if before:
            with contextlib.suppress(PlacementError):
                plans = self._placed(before, self.costs(self.peaks()))
        return self._left_for(position, plans)

    def _left_for(self, position: int, plans: Mapping[int, Plan]) -> list[Budget]:
        """What a workload may use beside those of these plans, in the order in which they were
        made."""
        left = {budget.place: budget for budget in self.budgets}
        for plan in plans.values():
            left |= {budget.place: budget for budget in plan.remaining()}
        stays = self.over_hosts and position > 0
        found = [budget for budget in left.values() if not stays or budget.host == self.home]
        return found if self.workloads[position].mapped else [replace(b, disk=0) for b in found]

    def fits(self, peaks: Sequence[Peaks] | None = None) -> bool:
        """Whether there is a plan. Without known peaks they are predicted, which takes longer, so
        weights and caches alone are tried first."""
        if peaks is None:
            return self.has_room_without_calls() and self.fits(self.peaks())
        return self.has_room(self.costs(peaks))

    def has_room_without_calls(self) -> bool:
        """Whether weights and caches alone fit; a quick check."""
        return self.fits(self.no_peaks())

    def has_room(self, costs: Sequence[Sequence[UnitCost]]) -> bool:
        """Whether there is a plan for these costs."""
        if len(costs) == 1:
            return fits_units(costs[0], self.budgets, self.order) or self._has_room_apart(costs[0])
        try:
            self.attempt(costs)
        except PlacementError:
            return False
        return True

    def _has_room_apart(self, costs: Sequence[UnitCost]) -> bool:
        """Whether there is a plan with experts in host memory, which the costs don't reflect yet:
        units without some of their experts may need one more open segment."""
        if self.workloads[0].where or not self.may_have_host_experts(0):
            return False
        budgets = [
            replace(b, reserve=b.reserve + len(costs) * ROUND_LARGE) if b.segmented else b
            for b in self.budgets
        ]
        return fits_experts(costs, budgets, self.order)

    def no_peaks(self) -> list[Peaks]:
        """Peaks as if calls took no workspace: what doesn't fit with these doesn't fit at all."""
        return [workload.no_peaks(self.budgets) for workload in self.workloads]

    # The same with one thing changed -------------------------------------------------------

    def each(self, change: Callable[[Workload], Workload]) -> Scenario:
        changed = (change(workload.unplaced()) for workload in self.workloads)
        return replace(self, workloads=tuple(changed))

    def resized(self, **sizes: int) -> Scenario:
        """With every cache of another ``batch_size`` or ``max_seq_len``."""
        return self.each(lambda workload: workload.resized(**sizes))

    def shortened(self, max_seq_len: int) -> Scenario:
        return self.each(lambda workload: workload.shortened(max_seq_len))

    def as_kind(self, kind: type[KVCache]) -> Scenario:
        return self.each(lambda workload: workload.as_kind(kind))

    def in_chunks_of(self, tokens: int) -> Scenario:
        return self.each(lambda workload: workload.in_chunks_of(tokens))

    def with_weights(self, weights: str) -> Scenario | None:
        """With the weights of every model that has floats in its checkpoint quantized to integers,
        one of ``exkv.weights.on_load.INTEGERS``; None if there is no such model, or the bits of one
        are being chosen."""
        models = [workload.model for workload in self.workloads]
        floats = [not model.config.quantization or model.on_load is not None for model in models]
        if not any(floats) or any(model.choice for model in models):
            return None
        return replace(
            self,
            workloads=tuple(
                replace(w, model=w.model.quantized(weights)) if is_float else w
                for w, is_float in zip(self.each(Workload.unplaced).workloads, floats, strict=True)
            ),
        )

    def with_more(self, device: int, nbytes: int) -> Scenario:
        """With a larger device at this position, and no cap in the way."""
        budget = self.budgets[device]
        cap = None if budget.cap is None else budget.cap + nbytes
        larger = replace(budget, capacity=budget.capacity + nbytes, cap=cap)
        return replace(self, budgets=_changed(self.budgets, device, larger))

    def larger(self) -> Iterator[tuple[str, Scenario]]:
        """With one more card like the last, and with the next fewer bits, each described in
        words."""
        cards = [budget for budget in self.budgets if budget.device != CPU]
        kind, number = cards[-1].device.type, max(card.device.index or 0 for card in cards) + 1
        more = replace(cards[-1], device=torch.device(kind, number), in_use=0, in_use_by_others=0)
        others = [budget for budget in self.budgets if budget not in cards]
        again = self.each(Workload.unplaced)
        chosen = any(workload.model.choice for workload in self.workloads)
        yield (
            f"one more card of {human(more.capacity)}{', and the same bits' if chosen else ''}",
            replace(again, budgets=(*cards, more, *others)),
        )
        again = again.each(Workload.without_choice)
        for weights in again.fewer_bits():
            fewer = again.with_weights(weights)
            if fewer is not None and fewer.weights < self.weights:
                yield f'weights="{weights}"', fewer
                return

    @property
    def weights(self) -> int:
        """Bytes of all models' weights."""
        units = (unit for workload in self.workloads for unit in workload.model.units)
        return sum(sum(unit.nbytes.values()) for unit in units)

    def fewer_bits(self) -> list[str]:
        """Formats with fewer bits than the weights have now that they may get on load, most bits
        first; at least 4, since fewer cost too much without a calibration text."""
        now = [workload.model.on_load for workload in self.workloads]
        known = ((name, bits) for name, bits in BITS.items() if bits >= 4)
        return [name for name, bits in known if not any(n and bits >= INTEGERS[n] for n in now)]

    def with_reserve(self, most: int) -> Scenario:
        """With reserves lowered to at most this."""
        lower = (replace(b, reserve=min(b.reserve, most)) for b in self.budgets)
        return replace(self, budgets=tuple(lower))

    def with_host(self) -> Scenario:
        """With the host's free memory as overflow."""
        now = accelerators.memory(accelerators.CPU)
        host = Budget(
            device=accelerators.CPU,
            capacity=now.capacity,
            in_use_by_others=now.in_use + now.in_use_by_others,
        )
        return replace(self, budgets=(*self.budgets, host))


def _shared_bytes(unit: Unit) -> dict[int, int]:
    """Index of another unit -> bytes of the tensors that it shares with this one."""
    shared: dict[int, int] = {}
    for name, (other, _) in unit.spec.tied.items():
        shared[other] = shared.get(other, 0) + unit.nbytes[name]
    return shared


def _changed(budgets: tuple[Budget, ...], position: int, budget: Budget) -> tuple[Budget, ...]:
    return (*budgets[:position], budget, *budgets[position + 1 :])

"""The entry point of planning: ``place`` for a model and its caches, and the check of a cache that
is added to a loaded model.

``exkv.planning.scenario`` states what to place where, ``exkv.planning.solve`` searches,
``exkv.planning.search.placement`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from exkv.cache import KVCache
from exkv.errors import PlacementError
from exkv.models import Transformer
from exkv.models.adapters import Adapter

from .best import planned
from .budgets import Devices, Sizes, make_budgets, present_budget
from .ledgers import plan_where
from .model import ModelShape
from .named_hosts import Hosts, parse_link
from .plan import Budget, Ledger, Link, Plan
from .scenario import Peaks, Scenario, Workload
from .solve import largest
from .workspace import CacheShape


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
    last_id_only: bool | None = None,
    beside: Plan | None = None,
    hosts: Hosts | None = None,
    link: Link | str | None = None,
    allocator: str = "cuda",
    host_experts: bool = True,
    disk_experts: bool = True,
    disk_bandwidth: float | None = None,
) -> Plan:
    """Plan what goes where, before a byte is loaded.

    Args:
        model: built from a config; loaded or not makes no difference.
        caches: to place beside it. (Those of :attr:`Model.caches` are not added here.)
        devices, hosts, reserve, cap, margin, cpu, bandwidth, disk_bandwidth, allocator: see
            :func:`exkv.planning.budgets.make_budgets`.
        objective: "pack", "balance", "fewest" or "speed"; see ``exkv.planning.plan.OBJECTIVES``.
        order: "listed", or "any" if the devices may be filled in any order.
        last_id_only: True to plan for logits of each row's last token only; False for those of a
            whole chunk at once; None for all of them, at once or in slices, as fits.
        beside: another model's plan for the same devices, which is carried out first.
        link: what joins the hosts, as text such as "10Gbit,0.2ms"; "speed" takes it into account.
        host_experts: where a model with routed experts is larger than the cards and ``cpu`` takes
            the rest, put single experts there, those chosen least often, in place of whole layers,
            so that the expected time of a token is shortest.
        disk_experts: where experts don't fit in host memory, and the checkpoint's file stores them
            as kernels take them, read them from it as tokens choose them
            (docs/larger-than-my-cards.md).

    Returns:
        The plan; ``model.load(plan=plan)`` carries it out; with several hosts, each host loads its
        ``plan.on(host)``. For a model with ``weights="best"`` it also has each unit's weight
        format.

    Raises:
        ValueError: an invalid device, size or option.
        PlacementError: it does not fit; ``suggestions`` would, and ``plan`` is the attempt.
    """
    if beside is not None:
        if devices is not None or hosts is not None:
            raise ValueError("devices follow from the plan that is given as beside")
        budgets = [replace(budget, disk=0) for budget in beside.remaining()]
        link = link or beside.link
    else:
        budgets = make_budgets(
            devices,
            reserve=reserve,
            cap=cap,
            margin=margin,
            cpu=cpu,
            bandwidth=bandwidth,
            disk_bandwidth=disk_bandwidth,
            hosts=hosts,
            allocator=allocator,
        )
    caches = [caches] if isinstance(caches, KVCache) else caches
    workload = Workload.of(model, caches, last_id_only=last_id_only)
    scenario = Scenario(
        workloads=(workload,),
        budgets=tuple(budgets),
        objective=objective,
        order=order,
        link=parse_link(link) if isinstance(link, str) else link,
        host_experts=host_experts,
        disk_experts=disk_experts,
    )
    _, (plan,), _ = planned(scenario)
    return plan


def check_new_cache(model: Transformer, plan: Plan, cache: KVCache) -> None:
    """Check that a cache fits beside a loaded model, with the calls that it promises.

    Raises:
        PlacementError: it does not; the message says where, by how much, and what would fit.
    """
    budgets = _current_budgets(model, plan)
    addition = _Addition(model, plan, budgets, CacheShape.of(cache))
    ledger = min(addition.plan(addition.peaks()).ledgers, key=lambda ledger: ledger.headroom)
    if ledger.headroom >= 0:
        return
    # A fork is as long as what it shares and a few tokens more: a shorter one is no remedy.
    length = 0 if addition.cache.shared_len else largest(addition.resized, cache.max_seq_len)
    remedy = f"max_seq_len={length} would fit" if length else "no length would fit"
    if addition.cache.shared_len:
        remedy = "fork into fewer rows, or first convert the cache to fewer bits or to the host"
    raise PlacementError(
        f"no room for {cache!r} on {ledger.device}: its layers there take {ledger.cache:,} bytes, "
        f"a call with it up to {ledger.workspace:,} and its logits {ledger.logits:,} more"
        f"{_segment_overhead(ledger)}; "
        f"{ledger.limit:,} are left, {ledger.lack}. {remedy}; a "
        "cache built before load_autosplit is planned with the model",
        unit=f"cache on {ledger.device}",
        device=str(ledger.device),
        needed=ledger.total,
        available=ledger.limit,
        suggestions=(remedy,) if length else (),
    )


def check_new_adapter(model: Transformer, plan: Plan, adapter: Adapter) -> None:
    """Check that an adapter fits beside a loaded model, with the calls that go through it.

    Raises:
        PlacementError: it does not; the message says where, and by how much.
    """
    budgets = _current_budgets(model, plan)
    adapters = {**model.adapters, adapter.name: adapter}
    with_it = replace(ModelShape.of(model), adapters=adapters)
    workload = Workload.under(plan, with_it, model.caches)
    peaks = workload.peaks(budgets)
    before = Workload.under(plan, model, model.caches).costs(peaks)
    costs = [
        replace(
            cost,
            weights=adapter.nbytes.get(unit.index, 0),
            segments=cost.segments - held.segments,
            cache=0,
            host_cache=0,
            logits=0,
            hidden=0,  # the calls get no longer
            shared={},
            shared_cache={},
        )
        for cost, held, unit in zip(workload.costs(peaks), before, model.units, strict=True)
    ]
    added = plan_where(costs, budgets, plan.places, plan.objective, plan.order, plan.role)
    ledger = min(added.ledgers, key=lambda ledger: ledger.headroom)
    if ledger.headroom >= 0:
        return
    raise PlacementError(
        f"no room for adapter {adapter.name!r} on {ledger.device}: its matrices there take "
        f"{ledger.weights:,} bytes, and a call through it up to {ledger.workspace:,}"
        f"{_segment_overhead(ledger)}; "
        f"{ledger.limit:,} are left, {ledger.lack}. Unload another "
        "adapter, shorten a cache, or load the adapter before the model, so that it is planned "
        "with it",
        unit=f"adapter {adapter.name} on {ledger.device}",
        device=str(ledger.device),
        needed=ledger.total,
        available=ledger.limit,
    )


def _segment_overhead(ledger: Ledger) -> str:
    """The part of a refusal about memory that segments reserve."""
    beyond = ledger.allocator
    return f", and segments reserve {beyond:,} beyond that" if beyond else ""


def _current_budgets(model: Transformer, plan: Plan) -> tuple[Budget, ...]:
    """What the devices of a loaded model's plan offer now."""
    resident = {ledger.device: ledger.resident for ledger in plan.ledgers}
    now = ((present_budget(b.device, model), b) for b in plan.remaining())
    return tuple(
        replace(
            present,
            in_use=max(present.in_use - resident[b.device], 0),
            reserve=b.reserve,
            margin=b.margin,
            cap=b.cap,
        )
        for present, b in now
    )


def with_caches(model: Transformer, plan: Plan) -> Plan:
    """A loaded model's plan with its current caches and adapters."""
    workload = Workload.under(plan, model, model.caches)
    budgets = [ledger.budget for ledger in plan.ledgers]
    costs = workload.costs(workload.peaks(budgets))
    now = plan_where(costs, budgets, plan.places, plan.objective, plan.order, plan.role)
    return now.promising(plan)


def call_bytes(
    model: Transformer, plan: Plan, caches: Sequence[KVCache], *, most_rows: int
) -> dict[torch.device, int]:
    """Bytes of the largest call, reserved memory included, on each accelerator of this machine, if
    calls with these caches have at most ``most_rows`` rows."""
    shapes = [CacheShape.of(cache) for cache in caches]
    fewer = [s if s.batch_size <= most_rows else s.resized(batch_size=most_rows) for s in shapes]
    workload = Workload.under(plan, model, fewer)
    budgets = [ledger.budget for ledger in plan.ledgers]
    costs = workload.costs(workload.peaks(budgets))
    now = plan_where(costs, budgets, plan.places, plan.objective, plan.order, plan.role)
    return {
        ledger.device: ledger.promised_call
        for ledger in now.ledgers
        if ledger.units and ledger.device.type != "cpu" and not ledger.budget.host
    }


@dataclass(frozen=True, slots=True)
class _Addition:
    """A cache added to a placed model; it answers the same questions as a scenario."""

    model: Transformer
    loaded: Plan
    budgets: tuple[Budget, ...]
    cache: CacheShape

    def resized(self, max_seq_len: int) -> _Addition:
        return replace(self, cache=self.cache.resized(max_seq_len=max_seq_len))

    def peaks(self) -> list[Peaks]:
        return [self._workload().peaks(self.budgets)]

    def no_peaks(self) -> list[Peaks]:
        return [self._workload().no_peaks(self.budgets)]

    def plan(self, peaks: Sequence[Peaks]) -> Plan:
        """What the cache adds: its own bytes, and workspace, logits and transport as far as its
        calls need more."""
        promised = sum(ledger.logits for ledger in self.loaded.ledgers)
        held = sum(ledger.transport for ledger in self.loaded.ledgers)
        hidden = held // (self.loaded.role.transport(1) or 1)
        costs = [
            replace(
                cost,
                weights=0,
                segments=cost.segments - before.segments,
                logits=max(cost.logits - promised, 0),
                hidden=max(cost.hidden - hidden, 0),
                shared={},
                shared_cache=own.shared_cache,
                cache=own.cache,
                host_cache=own.host_cache,
            )
            for cost, own, before in zip(
                self._workload().costs(peaks[0]),
                self._own().costs(peaks[0]),
                Workload.under(self.loaded, self.model, self.model.caches).costs(peaks[0]),
                strict=True,
            )
        ]
        loaded = self.loaded
        return plan_where(
            costs, self.budgets, loaded.places, loaded.objective, loaded.order, loaded.role
        )

    def fits(self, peaks: Sequence[Peaks]) -> bool:
        return self.plan(peaks).fits

    def _workload(self) -> Workload:
        return Workload.under(self.loaded, self.model, [*self.model.caches, self.cache])

    def _own(self) -> Workload:
        return Workload.under(self.loaded, self.model, [self.cache])

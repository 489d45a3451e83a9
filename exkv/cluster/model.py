"""A model whose units are on several hosts, as seen by the driver.

The driver makes every call itself, with the code of a single machine, and has each host repeat it:
calls of the model in ``_forward``, calls of a cache in ``_mirror``. It alone samples and keeps the
token log. When a host dies, the driver therefore has the remaining hosts carry out a new plan,
recomputes what was lost, and repeats the failed call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from exkv.cache import KVCache
from exkv.cache.paging.swap import SwappedPages
from exkv.checkpoint import ModelConfig
from exkv.errors import ContentsLostError, is_out_of_memory
from exkv.loading import LoadReport
from exkv.loading.options import LoadOptions
from exkv.model import Model, split_caps
from exkv.models.adapters import Adapter
from exkv.models.mtp import Drafting
from exkv.planning import Budget, Place, Plan, Scenario, Workload, make_budgets
from exkv.planning.best import planned
from exkv.planning.host_experts import with_host_experts
from exkv.planning.model import ModelShape
from exkv.planning.plan import CPU, UNBOUNDED
from exkv.planning.solve import plans_for

from .adapters import give
from .contents import Away
from .drafting import HostsDrafting
from .errors import ClusterError, WireError, raise_failures
from .hops import Hops
from .hosts import by_host, host_name, owners, part, reported
from .replica import CACHE_CALLS, check_forks, connect, fingerprint, move_model, rebuild, rows_of
from .streaming import describe, serving
from .values import Numbered
from .wire import Expected, Wire

if TYPE_CHECKING:
    from .cluster import Cluster

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Calls of paged caches whose answers the driver waits for, since they allocate. A host on which
#: another call fails leaves the group, and the pages' contents count as lost.
_ANSWERED = frozenset(("sharing_pool", "fork", "clone", "convert", "swap_out", "free"))


class ClusterModel(Model):
    """A :class:`exkv.Model` over the hosts of a cluster; used like one.

    Args:
        config: the model, or its path; every host reads its own copy, or is sent weights.
        cluster: its hosts.
        options: those of ``Model``; an embedding in host memory is in the driver's.

    Attributes:
        host_map: unit name -> name of its host.
        measured: predicted and measured bytes after loading, one list for each host.
    """

    def __init__(self, config: ModelConfig | str | Path, cluster: Cluster, **options: Any) -> None:
        super().__init__(config, **options)
        self._join(cluster)

    def _join(self, cluster: Cluster) -> None:
        """Distribute the model over the hosts of a cluster, which build it when it is loaded."""
        if self.calibrates:
            raise ValueError(
                "calibration rounds weights on one host: write the integers once, with `exkv "
                "quantize IN OUT --calibration FILE`, and load that folder over the hosts"
            )
        self.exchange_experts = False  # recovery relies on experts being where the plan has them
        self.cluster = cluster
        self.measured: list[Any] = []
        self._owners: list[int] = []
        self._budgets: tuple[Budget, ...] = ()
        #: Caps of a manual split, and the reserves of the devices.
        self._caps: dict[Place, int | None] | None = None
        self._reserve: int | None = None
        self._places: tuple[Place, ...] = ()
        self._whole: Plan | None = None  # of all hosts
        self._moved = False  # whether units have moved since the load
        #: For each unit, whether the contents of its cache layers are intact.
        self._intact: list[bool] = []
        self._numbers: weakref.WeakKeyDictionary[KVCache | SwappedPages, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._next = 0
        self._collected: deque[int] = deque()  # numbers of collected objects
        self._depth = 0
        if self.config.path is None:
            raise ValueError("the config has no folder: hosts need one to read weights from")
        self._built: dict[str, Any] = {
            "path": str(self.config.path),
            "config": self.config.replace(path=None, quantization=None),
            "quantization": json.dumps(self.config.quantization),
            "dtype": self.dtype,
            "max_input_len": self.max_input_len if len(self.chunks) == 1 else None,
            "exchange_experts": False,
        }
        self._weights_are = fingerprint(self.config.path)
        self._streamed: set[str] = set()  # hosts without a copy of the checkpoint
        for cache in self.caches:
            self._number(cache)

    # On the hosts -------------------------------------------------------------------------

    @property
    def _is_built(self) -> bool:
        """Whether this is the model that the hosts have built."""
        return self.cluster.model is self

    def _build(self) -> None:
        """Have the hosts build the model and its caches in place of any other model.

        Raises:
            ValueError: another model is loaded on them.
            ClusterError: a host can't build it.
        """
        if self._is_built:
            return
        if (other := self.cluster.model) is not None and other.loaded:
            raise ValueError(
                f"the hosts {', '.join(self.cluster.names[1:])} have another model loaded: call "
                "its unload() first"
            )
        self.cluster.model = None
        self._retrying(lambda: self._build_on(self.cluster.names[1:]))
        self.cluster.model = self

    def _retrying(self, call: Callable[[], T]) -> T:
        """Make a call; if a host dies, recover and make it again on the remaining hosts."""
        while True:
            try:
                return call()
            except WireError as error:
                reason = str(error)
            raise_failures(self.recover(reason))

    def _build_on(self, names: Sequence[str]) -> None:
        """Have these hosts, by rank, build the model and its caches."""
        path = self._built["path"]
        have = self.cluster.ask_some(names, "has_copy", path=path, weights_are=self._weights_are)
        lacking = {name for name, has in zip(names, have, strict=True) if not has}
        self._streamed = (self._streamed - set(names)) | lacking
        tensors = describe(Path(path)) if lacking else None
        with self._sending_weights():
            for group, extra in ((set(names) - lacking, {}), (lacking, {"tensors": tensors})):
                self.cluster.ask_some(group, "build", **self._built, **extra)
        for adapter in self.adapters.values():
            self._give(adapter, names)
        for cache in self.caches:  # owners before their forks
            owner = cache.owner() if cache.prefix_rows else None
            number = None if owner is None else self._numbers[owner]
            described = self._description(cache, self._numbers[cache])
            self.cluster.ask_some(names, "add_cache", **described, owner=number)

    def _sending_weights(self) -> AbstractContextManager[None]:
        """Within the context, send hosts without a copy of the checkpoint the tensors that they
        request."""
        ranks = [r for r in self.cluster.others if self.cluster.names[r] in self._streamed]
        return serving(Path(self._built["path"]), self.cluster.wire, ranks)

    @property
    def host_map(self) -> dict[str, str]:
        names = dict(enumerate(self.cluster.names))  # only the driver once the cluster is closed
        pairs = zip(self.units, self._owners, strict=False)
        return {unit.name: names[owner] for unit, owner in pairs if owner in names}

    # Loading ------------------------------------------------------------------------------

    def _scenario_of(self, options: LoadOptions) -> Scenario:
        """:meth:`Model._scenario_of` over all hosts' devices, the driver's first. ``gpu_split``
        covers all of them; ``devices`` and a list of reserves are the driver's."""
        if options.lazy:
            raise ValueError("a model over hosts can't be loaded lazily: leave lazy out")
        if options.objective == "speed":
            raise ValueError(
                "objective is 'speed', and the bandwidth of other hosts' devices is not measured: "
                "use pack, balance or fewest, or a plan of exkv.place with bandwidth"
            )
        if options.plan is None:
            self._prepare_plan()
        return super()._scenario_of(options)

    def _prepare_plan(self) -> None:
        """Prepare to plan: admit waiting hosts, build the model on all, and update budgets."""
        self._check_unloaded()
        if self.cluster.waiting:
            self.replan()
        self._build()
        self._retrying(self._update_offers)

    def _update_offers(self) -> None:
        """Ask all hosts for their current budgets."""
        self._forget_collected()
        self.cluster.offers((), now=True)

    def _check_unloaded(self) -> None:
        if self.loaded:
            raise ValueError("the model is loaded: call unload() first to load it elsewhere")

    def budgets(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        gpu_split: Sequence[float] | None = None,
        reserve: int | Sequence[int] | None = None,
    ) -> list[Budget]:
        """Budgets of all hosts' devices: this process's first, as they are now, then the others' as
        of the last load there. ``gpu_split`` covers all; ``devices`` and a list of reserves are
        this process's."""
        self._check_unloaded()
        own = make_budgets(devices, reserve=reserve)
        budgets = by_host(self.cluster.names, self.cluster.offers(own))
        self._reserve, self._caps = (reserve if isinstance(reserve, int) else None), None
        if gpu_split:
            budgets = _capped(budgets, gpu_split)
            self._caps = {budget.place: budget.cap for budget in budgets}
        self._budgets = self._limited(budgets)
        return list(self._budgets)

    def _whole_shape(self) -> ModelShape:
        """The shape of the model with the units of all hosts."""
        return replace(ModelShape.of(self), elsewhere=frozenset())

    def _plan_anew(self, budgets: Sequence[Budget]) -> Plan:
        """Plan the loaded model over these devices, with the objective of its first plan."""
        plan = self._whole
        assert plan is not None
        workload = Workload.under(plan, self._whole_shape(), self.caches)
        workload = replace(workload, model=workload.model.with_host_experts({}))
        scenario = Scenario(
            workloads=(workload,),
            budgets=tuple(budgets),
            objective=plan.objective,
            order=plan.order,
        )
        return plans_for(with_host_experts(scenario))[0]

    def _carry_out(self, scenario: Scenario, options: LoadOptions) -> Iterator[Any]:
        """Have each host load its part of a plan, while this process loads its own."""
        self._check_unloaded()
        plan = options.plan or planned(scenario)[1][0]
        offered = {budget.place for budget in self._budgets} | {Place(CPU)}
        if not {unit.place for unit in plan.units} <= offered:
            raise ValueError("the plan is for other devices: make one with model.budgets()")
        self._build()
        there = {host_name(self.cluster.names, r) for r in range(len(self.cluster.names))}
        if missing := {unit.host for unit in plan.units} - there:
            raise ClusterError(
                f"{', '.join(sorted(missing))} is gone, and the plan uses it: make a new one"
            )
        if self._chooses:
            self.choose(plan.choice)
        # The devices' budgets beside a draft.
        self._budgets = tuple(
            ledger.budget for ledger in plan.ledgers if ledger.budget.capacity < UNBOUNDED
        )
        self._intact = [True] * len(self.units)
        own, self._moved = self._send_parts("load", plan), False
        complete = False
        sending = contextlib.ExitStack()
        try:
            sending.enter_context(self._sending_weights())
            with self._unmirrored():
                own_options = replace(options, plan=own, gpu_split=None, devices=None)
                own_scenario = super()._scenario_of(own_options)
                yield from super()._carry_out(own_scenario, own_options)
            complete = True
        finally:
            try:
                with sending:
                    self.measured = self.cluster.answers()
            except WireError as error:
                complete, reason = False, str(error)
                self._abort_load(reason)
            except BaseException:
                complete = False
                raise
            finally:
                if not complete:
                    self.unload()

    def _abort_load(self, reason: str) -> None:
        """Unload everything after a host's death during a load, so that the others can load
        again."""
        self._owners = []
        raise_failures(self.recover(reason))
        raise ClusterError(
            f"{', '.join(self.cluster.gone)} is gone ({reason}), and nothing is loaded: load again "
            "over the remaining hosts"
        )

    def _send_parts(self, do: str, plan: Plan) -> Plan:
        """Tell each host to load, or move to, its part of a plan -> this process's part."""
        names = self.cluster.names
        self._whole, self._places, self._owners = plan, plan.places, owners(plan, names)
        parts = [part(plan, host_name(names, rank)) for rank in range(len(names))]
        about = {"owners": self._owners, "choice": self.choice}
        args = [{"plan": each, **about} for each in parts[1:]]
        self.cluster.send_each(do, args)
        connect(self, self.cluster.wire, self._owners)
        self.in_flight = self._in_flight()
        return parts[0]

    def _in_flight(self) -> float:
        """See :class:`Transformer`: bytes that a decode step reads on all hosts, divided by those
        of the busiest host, which limits further calls. 1 if calls end on this host, since only
        those that end elsewhere continue without it."""
        if not self._owners[-1]:
            return 1.0
        workload, read = Workload.of(self._whole_shape(), self.caches), Counter[int]()
        costs = workload.costs(workload.no_peaks(self._budgets))
        for owner, cost in zip(self._owners, costs, strict=True):
            read[owner] += cost.traffic
        return sum(read.values()) / max(read.values())

    def full_report(self) -> LoadReport | None:
        """:meth:`Model.full_report`; planned figures for units that have moved since."""
        if self.report is None or self._whole is None:
            return self.report
        rows = reported(self._whole, self.cluster.names, self.measured)
        if not self._moved:
            own = {row.ledger.place: row for row in self.report.devices}
            rows = tuple(own.get(row.ledger.place, row) for row in rows)
        return replace(self.report, devices=rows)

    def unload(self) -> None:
        """Release all memory, on all hosts."""
        with self._unmirrored():
            super().unload()
        with contextlib.suppress(WireError):  # the logits won't arrive any more
            self.cluster.wire.take_all()
        self.transport, self.elsewhere, self._owners = None, frozenset(), []
        self.in_flight = 1.0
        if self._depth == 0 and self._is_built:
            self._retrying(self._unload_hosts)

    def _unload_hosts(self) -> None:
        self._forget_collected()
        self.cluster.ask("unload")

    # Adapters -----------------------------------------------------------------------------

    def load_adapter(
        self, folder: str | os.PathLike[str], name: str | None = None, *, strength: float = 1.0
    ) -> Adapter:
        """:meth:`Model.load_adapter` on all hosts, which are sent its files; unloaded everywhere if
        one host has no room."""
        with self._unmirrored():
            adapter = super().load_adapter(folder, name, strength=strength)
        try:
            if self._is_built:
                self._retrying(lambda: self._give(adapter, self.cluster.names[1:]))
        except BaseException:
            self.unload_adapter(adapter.name)
            raise
        return adapter

    def unload_adapter(self, name: str) -> None:
        """:meth:`Model.unload_adapter` on all hosts."""
        with self._unmirrored():
            super().unload_adapter(name)
        if self._is_built:
            self._retrying(lambda: self.cluster.ask("unload_adapter", name=name))

    def _give(self, adapter: Adapter, names: Sequence[str]) -> None:
        give(self.cluster, names, adapter, self._sending_weights())

    # Caches -------------------------------------------------------------------------------

    def register_cache(self, cache: KVCache) -> None:
        """:meth:`Model.register_cache` on all hosts."""
        if self._depth == 0 and self._is_built:
            self._add_cache(cache, self._next)
        super().register_cache(cache)
        self._number(cache)

    def number_of(self, cache: KVCache) -> int:
        """The number by which hosts know a cache."""
        return self._numbers[cache]

    def _number(self, made: KVCache | SwappedPages) -> None:
        """Number an object that hosts have a part of; they forget it once it is collected here."""
        self._numbers[made] = self._next
        if isinstance(made, KVCache):
            made.mirror, made.elsewhere = self._mirror, Away(self.cluster, self._next)
        weakref.finalize(made, self._collected.append, self._next).atexit = False
        self._next += 1

    def _add_cache(self, cache: KVCache, number: int) -> None:
        args = self._description(cache, number)
        try:
            self.cluster.ask("add_cache", **args)
            return
        except WireError as error:
            reason = str(error)
        except BaseException:
            self._collected.append(number)
            raise
        raise_failures(self.recover(reason))
        self.cluster.ask("add_cache", **args)

    def _description(self, cache: KVCache, number: int) -> dict[str, Any]:
        """The arguments with which a host builds a cache."""
        lender = cache.lender()
        return {
            "number": number,
            "kind": type(cache).__name__,
            "specs": [layer.spec for layer in cache.layers],
            "call_len": cache.call_len,
            "lender": None if lender is None else self._numbers[lender],
        }

    def _mirror(
        self,
        cache: KVCache,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Callable[[], Any],
    ) -> Any:
        """Make a call of a cache on every host and here."""
        if self._depth or not self._is_built:
            return own()
        if name in ("save", "load"):
            return self._retrying(own)  # layer by layer, on each layer's host
        assert name in CACHE_CALLS, name
        call = {"number": self._numbers[cache], "name": name, "kwargs": kwargs, "made": self._next}
        call["args"] = [self._numbered(each) for each in args]
        waits, broken = cache.pages is None or name in _ANSWERED, ""
        try:
            self._forget_collected()
            (self.cluster.send if waits else self.cluster.tell)("call_cache", **call)
        except WireError as error:
            broken = str(error)
        try:
            with self._unmirrored():
                made = own()
        finally:
            try:
                if waits and not broken:
                    self.cluster.answers()
            except WireError as error:
                broken = str(error)
            if broken:
                self._interrupted(cache, name, broken)
        if isinstance(made, SwappedPages):
            self._number(made)
        return made

    def _numbered(self, value: Any) -> Any:
        """Replace an object that hosts know by its number; others pass through."""
        known = isinstance(value, KVCache | SwappedPages)
        return Numbered(self._numbers[value]) if known else value

    def _interrupted(self, cache: KVCache, name: str, reason: str) -> None:
        """Recover from a host's death during a call of a cache that is complete here."""
        raise_failures(self.recover(reason))
        if name in ("fork", "clone", "convert", "sharing_pool"):
            raise ClusterError(f"a host died during cache.{name}: the others continue; repeat it")
        if cache.pages is not None:
            return  # their contents count as lost
        if name not in ("crop", "trim", "reset", "free"):  # some hosts may not have moved rows
            self._rebuild([cache], len(self.units) - 1)

    def _forget_collected(self) -> None:
        while self._collected and self._is_built:
            self.cluster.tell("forget", number=self._collected.popleft())

    @contextlib.contextmanager
    def _unmirrored(self) -> Iterator[None]:
        """Mirror no calls within the context: hosts make them by themselves."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # In use -------------------------------------------------------------------------------

    def _forward(
        self, input_ids: Tensor, cache: KVCache | None = None, **options: Any
    ) -> Tensor | None:
        """:meth:`Model.forward` on all hosts; repeated on the remaining ones if a host dies.

        Raises:
            ContentsLostError: the contents of the cache's pages are lost.
        """
        self._check_input(input_ids, cache, options.get("new_lens"), options.get("adapter"))
        before = [] if cache is None else cache.seq_lens
        while True:
            _check_contents(cache)
            try:
                return self._forward_once(input_ids, cache, options)
            except WireError as error:
                reason, failure = str(error), None
            except BaseException as error:
                reason, failure = "the call failed here", error
            if cache is not None:  # chunks that are complete here may not be complete elsewhere
                cache.rollback(before, cache.written)
            failed = self.recover(reason)
            if failure is not None:
                raise failure
            raise_failures(failed)

    def begin_forward(self, input_ids: Tensor, cache: KVCache, **options: Any) -> Callable[[], Any]:
        """:meth:`Transformer.begin_forward`; with a paged cache the hosts continue the call."""
        hops = self.transport
        if cache.pages is None or not isinstance(hops, Hops) or not self._owners[-1]:
            return super().begin_forward(input_ids, cache, **options)
        hops.defers = True
        try:
            self._forward(input_ids, cache, **options)
        finally:
            hops.defers = False
        wire, due = self.cluster.wire, hops.due
        assert due is not None, "it made logits"
        return lambda: self._collect(wire, due, cache)

    def drafting(self, cache: KVCache, rows: int) -> Drafting:
        """:meth:`Transformer.drafting` on all hosts."""
        return HostsDrafting(self, cache, rows)

    def _collect(self, wire: Wire, due: Expected, cache: KVCache) -> Tensor:
        """Wait for the logits of a call that was begun; errors as of :meth:`_forward`."""
        reason = ""
        try:
            if wire is self.cluster.wire:
                return wire.take(due)
        except WireError as error:
            reason = str(error)
        if reason:
            raise_failures(self.recover(reason))
        _check_contents(cache)
        raise ContentsLostError("the hosts have formed a new group since: make the call again")

    def _forward_once(
        self, input_ids: Tensor, cache: KVCache | None, options: dict[str, Any]
    ) -> Tensor | None:
        sent = {name: each for name, each in options.items() if name != "placed_ids"}
        call = {"number": None if cache is None else self._numbers[cache], "options": sent}
        pages = self._give_pages(input_ids, cache, options)
        self._forget_collected()
        # Logits from another host imply that all have finished; nobody waits for pages.
        waits = pages is None and (options.get("preprocess_only") or not self._owners[-1])
        tell = self.cluster.send if waits else self.cluster.tell
        tell("forward", ids=input_ids.tolist(), pages=pages, **call)
        with self._unmirrored():
            logits = super()._forward(input_ids, cache, **options)
        if waits:
            self.cluster.answers()
        return logits

    def _give_pages(
        self, input_ids: Tensor, cache: KVCache | None, options: dict[str, Any]
    ) -> list[list[int]] | None:
        """Allocate a call's pages -> the pages of each row; None if the cache is not paged."""
        if cache is None or cache.pages is None:
            return None
        with cache.use("model.forward"):
            lengths = self._check_input(
                input_ids, cache, options.get("new_lens"), options.get("adapter")
            )
            self._make_room(cache, lengths)
            return cache.pages.rows[: len(input_ids)]

    # When a host dies ---------------------------------------------------------------------

    def replan(self) -> list[str]:
        """Admit the waiting hosts (``cluster.waiting``), and carry out a new plan over all hosts.
        Units that move are read anew, and generations continue with the same tokens. Call it
        between two calls of the model, loaded or not.

        Returns:
            The names of the admitted hosts.

        Raises:
            ClusterError: as when a host dies, or if a fork's prefix can't be recomputed.
        """
        check_forks(self)
        came: set[str] = set()
        raise_failures(self.recover("hosts are admitted", welcome=True, came=came))
        return [name for name in self.cluster.names if name in came]

    def take_in(self) -> list[str]:
        """:meth:`replan` if hosts wait and the model is loaded; errors as of that."""
        return self.replan() if self.loaded and self.cluster.waiting else []

    def recover(
        self, reason: str, *, welcome: bool = False, came: set[str] | None = None
    ) -> dict[str, str]:
        """Continue on the remaining hosts, with this process's rows -> failures by host.

        Args:
            welcome: admit waiting hosts even if none is gone.
            came: gets the names of admitted hosts.

        Raises:
            ClusterError: they can't hold the model, which is unloaded.
        """
        before, came = list(self.cluster.names), set() if came is None else came
        while True:
            failed = self.cluster.regroup(welcome=welcome)
            came.update(self.cluster.came)
            lost = [n for n in before if n not in self.cluster.names or n in came]
            try:
                self._resume(lost, [n for n in self.cluster.names if n in came], reason)
                return failed
            except WireError as error:
                reason = str(error)

    def _resume(self, lost: Sequence[str], came: Sequence[str], reason: str) -> None:
        """Continue in a new group.

        Args:
            lost: hosts that are gone, or came back without their contents.
            came: new hosts.
        """
        if not self._is_built:
            return
        away = {*lost, *came}
        self._mark_lost([place.host not in away for place in self._places])
        if came:
            self._set_up_new(came)
        if self._owners and away:
            logger.warning("%s (gone: %s; new: %s)", reason, ", ".join(lost), ", ".join(came))
            self._replace(lost)
        elif self._owners:
            self.cluster.ask("connect", owners=self._owners)
            connect(self, self.cluster.wire, self._owners)
        self._forget_collected()
        for cache in self.caches:
            if cache.pages is not None:
                _invalidate_pages(cache)
            self.cluster.ask("set_rows", number=self._numbers[cache], state=rows_of(cache))
        if stop := self._lost_before():
            self._rebuild([cache for cache in self.caches if cache.pages is None], stop)
        self._intact = [True] * len(self.units)

    def _mark_lost(self, stays: Sequence[bool]) -> None:
        """Mark the cache layers of units that don't stay as lost, until they are recomputed, even
        if that is interrupted."""
        self._intact = [kept and stay for kept, stay in zip(self._intact, stays, strict=False)]

    def _set_up_new(self, came: Sequence[str]) -> None:
        """Have new hosts build the model and caches of the others, and add their budgets."""
        self._build_on(came)
        offered = by_host(self.cluster.names, self.cluster.offers(()))
        new = [budget for budget in offered if budget.host in came]
        old = [budget for budget in self._budgets if budget.host not in came]
        order = [host_name(self.cluster.names, r) for r in range(len(self.cluster.names))]
        known = [budget for budget in (*old, *self._limited(new)) if budget.host in order]
        self._budgets = tuple(sorted(known, key=lambda budget: order.index(budget.host)))

    def _limited(self, offered: Sequence[Budget]) -> tuple[Budget, ...]:
        """Budgets with the caps or the reserve of the load."""
        if self._caps is not None:
            known = (budget for budget in offered if budget.place in self._caps)
            return tuple(replace(budget, cap=self._caps[budget.place]) for budget in known)
        if self._reserve is not None:
            return tuple(replace(budget, reserve=self._reserve) for budget in offered)
        return tuple(offered)

    def _lost_before(self) -> int:
        """Number of units up to the last one whose cache layers have lost their contents."""
        pairs = zip(self._intact, self.units, strict=False)
        wrong = [u.index for kept, u in pairs if not kept and u.spec.layer is not None]
        return max(wrong, default=-1) + 1 if self._owners else 0

    def _replace(self, lost: Sequence[str]) -> None:
        """Carry out a new plan over the present hosts."""
        names = self.cluster.names
        left = {host_name(names, rank) for rank in range(len(names))}
        try:
            budgets = [budget for budget in self._budgets if budget.host in left]
            before, plan = self._whole, self._plan_anew(budgets)
            assert before is not None
            self._mark_lost(
                [
                    (a.place, a.host_experts) == (b.place, b.host_experts)
                    for a, b in zip(before.units, plan.units, strict=True)
                ]
            )
            own = self._send_parts("move", plan)
            self.measured, self._moved = [], True
            with self._sending_weights():
                try:
                    move_model(self, own)
                finally:
                    self.cluster.answers()
            return
        except RuntimeError as error:
            if not isinstance(error, ClusterError) and not is_out_of_memory(error):
                raise
            reason = str(error)
        with contextlib.suppress(WireError):
            self.unload()
        raise ClusterError(
            f"{', '.join(lost) or 'no host'} is gone, and the others can't hold the model, "
            f"which is unloaded on all of them: {reason}"
        )

    def _rebuild(self, caches: Sequence[KVCache], stop: int) -> None:
        """Recompute caches from the token log, in the layers of units before ``stop``; forks after
        the caches whose prefix they share."""
        for cache in sorted(caches, key=lambda cache: bool(cache.prefix_rows)):
            self.cluster.send("rebuild", number=self._numbers[cache], stop=stop)
            with self._unmirrored():
                rebuild(self, cache, stop)
            self.cluster.answers()


def _invalidate_pages(cache: KVCache) -> None:
    """Invalidate a cache's pages: some hosts are gone, or made calls that others didn't."""
    assert cache.pages is not None
    cache.pages.pool.lose()
    cache.stale = {row for row, ids in enumerate(cache.sequences) if ids}
    cache.snapshot_lens = [0] * cache.batch_size


def _check_contents(cache: KVCache | None) -> None:
    """Raise ContentsLostError, once, if a cache's pages lost their contents with a host."""
    if cache is None or cache.pages is None or not cache.pages.pool.lost:
        return
    cache.pages.pool.lost = False
    raise ContentsLostError(
        f"the contents of {cache!r} were lost with a host: the next call recomputes its tokens"
    )


def _capped(budgets: Sequence[Budget], gpu_split: Sequence[float]) -> tuple[Budget, ...]:
    """Budgets of a manual split, without the devices to which it gives nothing."""
    caps = split_caps(gpu_split, [str(budget.place) for budget in budgets])
    return tuple(replace(b, cap=cap) for b, cap in zip(budgets, caps, strict=False) if cap)


def spread(model: Model, cluster: Cluster) -> None:
    """Distribute an unloaded model and its caches over the hosts of a cluster."""
    if model.loaded or type(model) is not Model:
        raise ValueError(
            "a model can be spread over hosts only once, before it is loaded: build another"
        )
    if shared := [cache for cache in model.caches if cache.layers[0].borrowed]:
        raise ValueError(
            f"{shared[0]!r} shares pages: build it after the model is spread over hosts"
        )
    try:
        model.__class__ = ClusterModel
        assert isinstance(model, ClusterModel)
        model._join(cluster)
    except BaseException:
        model.__class__ = Model
        raise

"""The values of a plan: what units cost, what devices offer, and what is placed where, in bytes.

What a device must hold is a sum of lines, its ledger: weights and cache of its units, the largest
workspace among them (units run one after the other), the logits that the caller keeps, and, on a
host that exchanges hidden states with another, the transport's buffers. All values are frozen.
``exkv.planning.search.placement`` finds the best plan.

A device is identified by its host and its name there, a :class:`Place`; this process's host has no
name. A plan over several hosts is carried out in pieces: ``plan.on("b")`` is b's, for the process
there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exkv.sizes import human
from exkv.weights.choice import Choice

#: What a plan optimizes, once it fits.
OBJECTIVES = {
    "pack": "fill one device after the other, in order",
    "balance": "make the smallest headroom as large as possible",
    "fewest": "use as few devices as possible, of as few hosts as possible",
    "speed": "read weights and cache as fast as the devices' bandwidths and the link between hosts "
    "allow",
}
ORDERS = ("listed", "any")

#: Capacity of a device without a budget: a pinned unit is placed there regardless.
UNBOUNDED = 1 << 62


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a host; an empty host name means this machine."""

    device: torch.device
    host: str = ""

    @property
    def memory(self) -> Place:
        """The host's own memory."""
        return Place(CPU, self.host)

    def __str__(self) -> str:
        return f"{self.host}/{self.device}" if self.host else str(self.device)


@dataclass(frozen=True, slots=True)
class Role:
    """Whether a host receives hidden states from another host, and whether it sends some on."""

    receives: bool = False
    sends: bool = False

    def transport(self, hidden: int) -> int:
        """Bytes of host memory that its transport holds: those of the largest hidden state in each
        direction."""
        return hidden * (self.receives + self.sends)


#: All units are on one host.
ALONE = Role()

#: Most embeddings in flight to an MTP head on another host, which takes them after the last layer,
#: when hosts before it have moved on to later calls.
EMBEDDED_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between any two hosts.

    Attributes:
        bandwidth: bytes per second.
        latency: seconds for an empty message.
    """

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Seconds for a message of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What one unit takes, in bytes.

    Attributes:
        name: the unit's name.
        weights: of its own tensors, each rounded up as allocators do.
        cache: of its layer in all caches, beside the weights.
        host_cache: of its layer in caches that lie in host memory wherever the unit is placed.
        segments: reserved beyond all of these, where memory comes in segments.
        workspace: device type -> peak of one forward call through it.
        reserved: device type -> what the call reserves where memory comes in segments.
        logits: of its output, which the caller may keep while the next call runs.
        traffic: read by a decode step at full length; of routed experts, the expected value.
        experts: of each routed expert, part of ``weights`` or ``host_weights``.
        chosen: for each routed expert, the probability that a decode step reads it.
        shared_experts: of what all tokens take, read while a host reads its routed experts.
        host_experts: routed experts whose weights lie in host memory while the rest is elsewhere.
        host_weights: of these, not part of ``weights``.
        mapped: of one of its experts, which are alike, that may be read from disk, since the file
            stores them as kernels take them (``exkv.planning.from_disk``).
        staging: of the buffers through which host experts come to a card for long prompts; units
            use them in turn.
        shared: index of another unit -> bytes of ``weights`` that cost nothing beside it.
        shared_cache: index of an earlier unit whose layer has the same keys and values ->
            ``cache`` and ``host_cache``, which cost nothing beside it.
        pinned: where it must be placed, whatever the budgets.
        kept: its weight format, where a plan chooses that.
        stored: pair of bits (``exkv.cache.stored_bits``) of its layer in caches, likewise.
        loss: of both, as ``exkv.planning.best`` counts it.
        hidden: of the hidden states of the largest call, which units pass on.
        hidden_step: of those of a decode step.
    """

    name: str
    weights: int
    cache: int
    workspace: Mapping[str, int]
    logits: int = 0
    traffic: int = 0
    shared: Mapping[int, int] = field(default_factory=dict)
    shared_cache: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    pinned: Place | None = None
    host_cache: int = 0
    segments: int = 0
    reserved: Mapping[str, int] = field(default_factory=dict)
    kept: str | None = None
    stored: str | None = None
    loss: float = 0.0
    hidden: int = 0
    hidden_step: int = 0
    experts: tuple[int, ...] = ()
    chosen: tuple[float, ...] = ()
    shared_experts: int = 0
    host_experts: tuple[int, ...] = ()
    host_weights: int = 0
    staging: int = 0
    mapped: int = 0

    def held_on(self, budget: Budget) -> int:
        """Bytes that it keeps on a device, with what is reserved beyond them."""
        held = self.weights + self.cache_on(budget.device) + self.logits
        return held + self.segments if budget.segmented else held

    def cache_beside(self, other: int, device: torch.device) -> int:
        """Bytes of caches on a device that cost nothing beside another unit there."""
        cache, host_cache = self.shared_cache.get(other, (0, 0))
        return cache + (host_cache if device.type == "cpu" else 0)

    def shared_on(self, device: torch.device) -> dict[int, int]:
        """Index of another unit -> bytes of this one that cost nothing beside it on a device."""
        return {
            other: self.shared.get(other, 0) + self.cache_beside(other, device)
            for other in {**self.shared, **self.shared_cache}
        }

    def call_on(self, budget: Budget) -> int:
        """Bytes that a call through it takes on a device, with what is reserved beyond them."""
        kind = budget.device.type
        reserved = self.reserved.get(kind, 0) if budget.segmented else 0
        return max(self.workspace[kind], reserved)

    def cache_on(self, device: torch.device) -> int:
        """Bytes that its caches take on the device on which it is placed."""
        return self.cache + (self.host_cache if device.type == "cpu" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one device offers, in bytes.

    Attributes:
        capacity: total memory of the device.
        in_use: taken by this process already, or promised to models that it has loaded.
        in_use_by_others: taken by everything else.
        reserve: to be left free, as the user asked.
        context: taken by the driver, as far as it is known and not part of ``in_use_by_others``.
        libraries: workspaces of cuBLAS, as far as they are not part of ``in_use``.
        graphs: the memory pool of captured decode steps, and their results.
        margin: to be left free for what no arithmetic sees.
        segmented: whether memory comes in segments, as torch's caching allocator gives it.
        cap: the most that may be used for this model, or None for no other limit.
        promised_workspace: workspace of models loaded there; a new model may use it too, since
            calls run one after the other.
        bandwidth: bytes per second at which it reads its memory, where that is known.
        disk: the most bytes of experts in host memory that may be read from their file as tokens
            choose them.
        disk_bandwidth: bytes per second of these reads, where it is known.
        host: whose device it is; empty for this machine.
        models: what other loaded models are promised there, by name, already part of ``in_use``
            and ``promised_workspace``; for messages.
    """

    device: torch.device
    capacity: int
    in_use: int = 0
    in_use_by_others: int = 0
    reserve: int = 0
    margin: int = 0
    context: int = 0
    libraries: int = 0
    graphs: int = 0
    segmented: bool = False
    cap: int | None = None
    promised_workspace: int = 0
    bandwidth: float | None = None
    disk: int = 0
    disk_bandwidth: float | None = None
    host: str = ""
    models: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return Place(self.device, self.host)

    @property
    def others(self) -> list[str]:
        """A line for each of ``models``."""
        sizes = self.models.items()
        return [f"another model ({n}): {human(size)} on {self.place}" for n, size in sizes]

    @property
    def overhead(self) -> int:
        """Bytes of driver, libraries and captured graphs."""
        return self.context + self.libraries + self.graphs

    @property
    def limit(self) -> int:
        """Bytes that this model may use."""
        taken = self.in_use + self.in_use_by_others + self.overhead + self.reserve + self.margin
        free = max(self.capacity - taken, 0)
        return free if self.cap is None else min(free, self.cap)

    @property
    def room(self) -> int:
        """The limit plus what may stay on disk: what a search may put there."""
        return self.limit + self.disk


def without_memory(budgets: Sequence[Budget]) -> list[Budget]:
    """The budgets, without the memory of hosts that also offer cards."""
    with_cards = {budget.host for budget in budgets if budget.device != CPU}
    return [each for each in budgets if each.device != CPU or each.host not in with_cards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a plan puts on one device, beside the contents of the device's budget; in bytes.

    ``workspace`` is shared with models loaded there already, so it is at least theirs.
    ``transport`` is host memory: the buffers of hidden states on their way to or from another host.
    A host's ``weights`` include those of experts there whose units are elsewhere; ``staging`` is
    their buffer on a card, for long prompts. ``mapped`` counts experts that are used in place in a
    file, if some of them may stay on disk alone; ``from_disk`` those that do, which ``weights``
    doesn't count. Where memory comes in segments, ``segments`` is what all lines but workspace
    reserve beyond their bytes, and ``call`` the most that a call reserves, its workspace included.
    """

    budget: Budget
    units: int = 0
    weights: int = 0
    cache: int = 0
    workspace: int = 0
    logits: int = 0
    transport: int = 0
    segments: int = 0
    call: int = 0
    staging: int = 0
    mapped: int = 0
    from_disk: int = 0

    @classmethod
    def empty(cls, budget: Budget, transport: int = 0) -> Ledger:
        return cls(budget=budget, workspace=budget.promised_workspace, transport=transport)

    @property
    def allocator(self) -> int:
        """Bytes reserved beyond those of the other lines."""
        return self.segments + max(self.call - self.workspace, 0)

    @property
    def promised_call(self) -> int:
        """Bytes that calls need, with what is reserved beyond them."""
        return max(self.call, self.workspace)

    @property
    def device(self) -> torch.device:
        return self.budget.device

    @property
    def place(self) -> Place:
        return self.budget.place

    @property
    def used(self) -> bool:
        """Whether the plan puts anything there."""
        return bool(self.has_weights or self.transport)

    @property
    def has_weights(self) -> bool:
        """Whether the plan puts units there, or experts of units that are elsewhere."""
        return bool(self.units or self.weights)

    @property
    def limit(self) -> int:
        return self.budget.limit

    @property
    def total(self) -> int:
        """Bytes in use for this model at the peak of a forward call."""
        return self.held + self.promised_call

    @property
    def held(self) -> int:
        """Bytes in use between calls."""
        beside = self.logits + self.transport + self.staging + self.segments
        return self.weights + self.cache + beside

    @property
    def resident(self) -> int:
        """Mapped bytes that stay in memory where experts are read from disk: the system drops them
        when anything else needs memory, and reads them again."""
        return self.mapped - self.from_disk if self.from_disk else 0

    @property
    def headroom(self) -> int:
        """Bytes that stay free below the limit; negative where the plan does not fit."""
        return self.limit - self.total

    @property
    def lack(self) -> str:
        """For a refusal: how many bytes are missing, and which other models are there."""
        return "; ".join([f"{-self.headroom:,} too few", *self.budget.others])

    def with_unit(self, cost: UnitCost, weights: int, cache: int) -> Ledger:
        """The ledger after this unit is placed here too, with these bytes of its own."""
        peak = cost.workspace[self.device.type]
        on_host = self.device.type == "cpu"
        return replace(
            self,
            units=self.units + 1,
            weights=self.weights + weights,
            cache=self.cache + cache,
            workspace=max(self.workspace, peak),
            logits=self.logits + cost.logits,
            segments=self.segments + (cost.segments if self.budget.segmented else 0),
            call=max(self.call, cost.call_on(self.budget)) if self.budget.segmented else 0,
            staging=0 if on_host else max(self.staging, cost.staging),
            mapped=self.mapped + (cost.mapped * len(cost.experts) if on_host else 0),
        ).with_disk()

    def with_experts(self, cost: UnitCost) -> Ledger:
        """The ledger after the experts of a unit that is elsewhere are placed here too."""
        mapped = self.mapped + cost.mapped * len(cost.host_experts)
        return replace(self, weights=self.weights + cost.host_weights, mapped=mapped).with_disk()

    def with_disk(self) -> Ledger:
        """The ledger with what memory has no room for read from disk, as far as allowed."""
        if not self.budget.disk:
            return self
        whole = replace(self, weights=self.weights + self.from_disk, from_disk=0)
        left = min(max(-whole.headroom, 0), self.mapped, self.budget.disk)
        return replace(whole, weights=whole.weights - left, from_disk=left)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedUnit:
    """One unit's line of a plan, in bytes; weights and cache without what it shares on its device.

    Attributes:
        kept, loss: as in :class:`UnitCost`.
        host_experts: routed experts whose weights lie in host memory, in ascending order.
        host_weights: bytes of these, not part of ``weights``.
        mapped: as in :class:`UnitCost`.
    """

    name: str
    device: torch.device
    weights: int
    cache: int
    workspace: int
    logits: int
    kept: str | None = None
    loss: float = 0.0
    host: str = ""
    host_experts: tuple[int, ...] = ()
    host_weights: int = 0
    mapped: int = 0

    @property
    def place(self) -> Place:
        return Place(self.device, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A device for every unit, in order, and the ledger of every device that was offered.

    ``model.load(plan=plan)`` carries it out; :meth:`to_json` saves it.

    Attributes:
        last_id_only: whether only the logits of each row's last token are promised.
        max_input_len: tokens of a chunk; None if unknown.
        logits_len: tokens per row whose logits are computed at once; None for a whole chunk.
        fitted: what differs from the defaults so that it fits, in words.
        link: what joins the hosts, where there are several and it was given.
        role: of this process's host, where it carries out its piece of a larger plan.
        gap: the most by which another plan could be better, as a share of the value compared: the
            one that the objective makes small or large, or, before it, bytes on an overflow
            device. 0 for an optimal plan, as all are except those in any order of very many unlike
            devices, and those with unlike experts in host memory.
    """

    objective: str
    order: str
    units: tuple[PlacedUnit, ...]
    ledgers: tuple[Ledger, ...]
    last_id_only: bool = False
    max_input_len: int | None = None
    logits_len: int | None = None
    fitted: tuple[str, ...] = ()
    link: Link | None = None
    role: Role = ALONE
    gap: float = 0.0

    @property
    def near_best(self) -> str:
        """How far it may be from the best, in words; empty for the best."""
        percent = math.ceil(1000 * self.gap) / 10
        best = "the best" if self.host_experts else "the best in any order"
        return f"within {percent:g} % of {best}" if self.gap else ""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(unit.device for unit in self.units)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(unit.place for unit in self.units)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that hold units, in the order in which a token passes through them."""
        return tuple(dict.fromkeys(unit.host for unit in self.units))

    def units_on(self, host: str) -> range:
        """The indices of a host's units, which are contiguous."""
        here = [index for index, unit in enumerate(self.units) if unit.host == host]
        return range(here[0], here[-1] + 1) if here else range(0)

    def on(self, host: str) -> Plan:
        """One host's piece, with its own device names, for a process there to carry out.

        Raises:
            ValueError: the plan has nothing for such a host.
        """
        if not (indices := self.units_on(host)):
            raise ValueError(
                f"the plan has nothing for host {host!r}: it is for {_host_names(self)}"
            )
        ledgers = (ledger for ledger in self.ledgers if ledger.place.host == host)
        return replace(
            self,
            units=tuple(replace(self.units[index], host="") for index in indices),
            ledgers=tuple(replace(each, budget=replace(each.budget, host="")) for each in ledgers),
            role=role_of(host, self.places),
        )

    @property
    def fits(self) -> bool:
        return all(ledger.headroom >= 0 for ledger in self.ledgers if ledger.used)

    @property
    def smallest_headroom(self) -> int:
        """Over the devices that hold weights, in bytes."""
        return min(ledger.headroom for ledger in self.ledgers if ledger.has_weights)

    @property
    def host_experts(self) -> dict[str, frozenset[int]]:
        """Unit name -> its experts in host memory, of units that have some there."""
        return {u.name: frozenset(u.host_experts) for u in self.units if u.host_experts}

    @property
    def from_disk(self) -> int:
        """Bytes of experts that memory has no room for."""
        return sum(ledger.from_disk for ledger in self.ledgers)

    @property
    def choice(self) -> Choice | None:
        """The weight formats that the plan has chosen, if any; ValueError where it has chosen them
        for some units only."""
        kept = {unit.name: unit.kept for unit in self.units if unit.kept is not None}
        if kept and len(kept) < len(self.units):
            raise ValueError(f"the plan has weight formats for {len(kept)} units only")
        return Choice(kept=kept, loss={u.name: u.loss for u in self.units}) if kept else None

    def promising(self, plan: Plan) -> Plan:
        """This placement with the promised calls of another plan."""
        return replace(
            self,
            last_id_only=plan.last_id_only,
            max_input_len=plan.max_input_len,
            logits_len=plan.logits_len,
            fitted=plan.fitted,
            gap=plan.gap,
        )

    def remaining(self) -> list[Budget]:
        """The budgets for a second model once this one is placed: of offered devices, not of those
        that hold only pinned units or a transport's buffers."""
        offered = (ledger for ledger in self.ledgers if ledger.budget.capacity < UNBOUNDED)
        return [_remaining_budget(ledger) for ledger in offered]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of :meth:`to_json`; ValueError where the text is not a plan."""
        try:
            values = json.loads(text)
            return cls(
                objective=one_of("objective", values.pop("objective"), OBJECTIVES),
                order=one_of("order", values.pop("order"), ORDERS),
                units=tuple(_read(PlacedUnit, unit) for unit in values.pop("units")),
                ledgers=tuple(
                    _read(Ledger, {**ledger, "budget": _read(Budget, ledger["budget"])})
                    for ledger in values.pop("ledgers")
                ),
                last_id_only=_flag("last_id_only", values.pop("last_id_only")),
                max_input_len=_tokens("max_input_len", values.pop("max_input_len", None)),
                logits_len=_tokens("logits_len", values.pop("logits_len", None)),
                fitted=tuple(map(str, values.pop("fitted", ()))),
                link=_link(values.pop("link", None)),
                role=_role(values.pop("role", {})),
                gap=_share("gap", values.pop("gap", 0.0)),
                **values,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"not a plan that exkv wrote: {error}") from None


def _remaining_budget(ledger: Ledger) -> Budget:
    taken, cap = ledger.held - ledger.resident, ledger.budget.cap
    return replace(
        ledger.budget,
        in_use=ledger.budget.in_use + taken,
        disk=ledger.budget.disk - ledger.from_disk,
        cap=None if cap is None else max(cap - taken, 0),
        promised_workspace=ledger.promised_call,
    )


def role_of(host: str, where: Sequence[Place], outer: Role = ALONE) -> Role:
    """A host's part in passing hidden states on, once units are placed there.

    Args:
        where: the place of each unit, in order.
        outer: the role of all these units, where they are a piece of a larger plan.
    """
    here = [index for index, place in enumerate(where) if place.host == host]
    if not here:
        return ALONE
    return Role(
        receives=here[0] > 0 or outer.receives, sends=here[-1] < len(where) - 1 or outer.sends
    )


def _host_names(plan: Plan) -> str:
    return ", ".join(host or "this machine" for host in plan.hosts)


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """The value, or a ValueError that lists the known ones."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(known)}")
    return value


def _link(values: dict[str, Any] | None) -> Link | None:
    return None if values is None else _read(Link, values)


def _role(values: dict[str, Any]) -> Role:
    return Role(**{name: _flag(name, value) for name, value in values.items()})


def _tokens(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is {value!r}: expected a number of tokens")
    return value


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}: expected a share, from 0 to 1")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: expected true or false")
    return value


def _read(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass from JSON, where devices are text and everything except names is a number."""
    for key, value in values.items():
        if key == "host" and not isinstance(value, str):
            raise ValueError(f"host is {value!r}: expected a name")
        if key == "host_experts":
            numbers = list(value)
        else:
            numbers = value.values() if key == "models" else [] if value is None else [value]
        if key == "segmented":
            _flag(key, value)
            continue
        numeric = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        if not numeric and key not in ("name", "device", "budget", "kept", "host"):
            raise ValueError(f"{key} is {value!r}: expected a number")
    if "host_experts" in values:
        values = {**values, "host_experts": tuple(values["host_experts"])}
    if "device" in values:
        values = {**values, "device": torch.device(values["device"])}
    return kind(**values)

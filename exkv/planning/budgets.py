"""What devices offer: budgets for this machine's cards, or for cards that the user doesn't own.

Memory that this process holds already counts: its allocations, and what is promised to models that
it has loaded, so that a second model never takes memory that the first one's calls will need.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from exkv import devices as accelerators
from exkv import overhead, sim
from exkv.checkpoint import ModelConfig
from exkv.sizes import parse_cards, parse_sizes

from .named_hosts import Hosts, checked_name
from .plan import CPU, Budget, Plan, one_of

#: What users give: sizes as text ("24G,24G,8G"), or device names, or None for all devices.
Devices = str | torch.device | Sequence[str | torch.device]
#: One number for all devices or one per device, in bytes or as text ("1G").
Sizes = int | str | Sequence[int | str]


class Loaded(Protocol):
    """A model whose units are placed on devices."""

    config: ModelConfig
    plan: Plan | None

    def unread_bytes(self, device: torch.device) -> int:
        """Bytes of weights that are placed there but not read yet."""


#: Capacity of a local device that wasn't queried yet, since a query takes memory on it.
_UNKNOWN = -1

#: Every loaded model of this process.
LOADED: weakref.WeakSet[Loaded] = weakref.WeakSet()


def make_budgets(
    devices: Devices | None = None,
    *,
    reserve: Sizes | None = None,
    cap: Sizes | None = None,
    margin: Sizes | None = None,
    cpu: bool | int | str = False,
    bandwidth: Sequence[float] | None = None,
    disk_bandwidth: float | None = None,
    hosts: Hosts | None = None,
    allocator: str = "cuda",
) -> list[Budget]:
    """Budgets for the given devices.

    Args:
        devices: None for every usable accelerator of this machine (or its CPU, where it has none);
            names of local devices; or sizes of cards, which need not exist: ``"24G,24G,8G"`` are
            ``cuda:0`` to ``cuda:2``, empty.
        reserve: bytes to leave free, one number for all or a list with one per device; the host as
            overflow may be left out.
        cap: the most to use on each device; a device with 0 is left out and not queried.
        margin: for what no arithmetic sees; None for a default by device type: nothing on the
            host and the simulated accelerator, 160 MiB on a GPU.
        cpu: the host as overflow: True for its free memory, or bytes, or text.
        bandwidth: bytes per second that each device reads, for ``objective="speed"``.
        disk_bandwidth: bytes per second at which experts that don't fit in host memory are read;
            None to measure it where they are.
        hosts: in place of devices, each host's: sizes of its cards, and of its memory as overflow
            ("24G,24G,cpu:32G"), or budgets made by a process there. ``cpu`` is then a size that
            applies to every host.
        allocator: how cards given by size allocate memory: "cuda", in segments and with a driver's
            context, or "exact", to the rounded byte, as ``exkv.sim`` does by default.

    Raises:
        ValueError: an unknown device, or one that can't be used now, text that is not a size, a
            negative or overlong list.
    """
    if hosts is not None:
        if devices is not None:
            raise ValueError("devices and hosts exclude each other: a host lists its own devices")
        budgets = _host_budgets(hosts, cpu)
    else:
        budgets = _requested_budgets(devices)
        if cpu is not False:
            budgets.append(_host(cpu))
    exact = one_of("allocator", allocator, sim.ALLOCATORS) == "exact"
    budgets = _with_numbers(budgets, "reserve", reserve, lambda b, n: replace(b, reserve=n))
    budgets = _with_numbers(budgets, "margin", margin, lambda b, n: replace(b, margin=n))
    budgets = _with_numbers(budgets, "cap", cap, lambda b, n: replace(b, cap=n))
    if bandwidth is not None:
        budgets = _with_bandwidths(budgets, bandwidth)
    if disk_bandwidth is not None:
        if not disk_bandwidth > 0:
            raise ValueError(f"disk_bandwidth is {disk_bandwidth}: give bytes per second, above 0")
        budgets = [
            replace(b, disk_bandwidth=disk_bandwidth) if b.device == CPU else b for b in budgets
        ]
    used = [budget for budget in budgets if budget.cap != 0]
    if not used:
        raise ValueError("cap leaves every device out: give one of them a size above 0")
    budgets = _usable_budgets(used, named=devices is not None)
    return [_exact(budget) for budget in budgets] if exact else budgets


def _exact(budget: Budget) -> Budget:
    """The budget for a device that allocates to the byte and has no driver context."""
    return replace(budget, context=0, libraries=0, graphs=0, segmented=False)


def _usable_budgets(budgets: Sequence[Budget], *, named: bool) -> list[Budget]:
    """The budgets with what local devices report of their memory now; without those that can't be
    used, unless the user named them."""
    unknown = [budget.device for budget in budgets if budget.capacity == _UNKNOWN]
    for device in unknown if named else ():
        accelerators.check_usable(device)
    usable = unknown if named or not unknown else accelerators.usable_devices(unknown)
    return [
        _queried(budget) if budget.capacity == _UNKNOWN else budget
        for budget in budgets
        if budget.capacity != _UNKNOWN or budget.device in usable
    ]


def _queried(budget: Budget) -> Budget:
    """A device's current memory, with the numbers that the user gave."""
    lines = ("reserve", "margin", "cap", "bandwidth", "disk_bandwidth")
    given = {name: getattr(budget, name) for name in lines}
    return replace(present_budget(budget.device), **given)


def devices_to_load(devices: Devices | None) -> list[torch.device] | None:
    """Local devices to load to, None for all; sizes of cards are for plans only.

    Raises:
        ValueError: a size, or a device that isn't here.
    """
    if devices is None:
        return None
    names = _names(devices)
    if sizes := [name for name in names if _is_size(name)]:
        raise ValueError(
            f"devices has the size {sizes[0]!r}: a plan takes sizes, but a model is loaded to "
            "devices by their names, such as cuda:0; gpu_split says how much to use of each"
        )
    return accelerators.resolve_devices(names)


def with_measured_bandwidths(budgets: Sequence[Budget]) -> list[Budget]:
    """The same budgets of local devices, with each one's measured bandwidth.

    Raises:
        ValueError: a device isn't here.
    """
    here = {*accelerators.present_devices(), accelerators.CPU}
    for budget in budgets:
        if budget.host or budget.device not in here:
            raise ValueError(
                f"the bandwidth of {budget.place} can't be measured, it is not on this machine: "
                "give it as a number"
            )
    return [replace(b, bandwidth=accelerators.measured_bandwidth(b.device)) for b in budgets]


def present_budget(device: torch.device, own: object = None) -> Budget:
    """A local device's budget at this moment.

    Args:
        own: the loaded model that asks, which doesn't count as another one.
    """
    beside = overhead.of_present(device)  # first: what it measures is in use from here on
    now = accelerators.memory(device)
    plans = [(model, model.plan) for model in LOADED if model.plan is not None]
    here = [(m, ledger) for m, p in plans for ledger in p.ledgers if ledger.device == device]
    promised = sum(ledger.logits + model.unread_bytes(device) for model, ledger in here)
    return Budget(
        device=device,
        capacity=now.capacity,
        in_use=now.in_use + now.fragments + promised,
        in_use_by_others=max(now.in_use_by_others - beside.context, 0),
        margin=accelerators.default_margin(device),
        context=beside.context,
        libraries=beside.libraries,
        graphs=beside.graphs,
        segmented=accelerators.allocator_rules(device.type) is not None,
        promised_workspace=_promised_workspace(device, (plan for _, plan in plans)),
        models=_models_on(device, () if own is None else (own,)),
    )


def _models_on(device: torch.device, but: Collection[object]) -> dict[str, int]:
    """Bytes promised to loaded models on a device, by their checkpoints' names."""
    totals: Counter[str] = Counter()
    for model in LOADED:
        ledgers = () if model in but or model.plan is None else model.plan.ledgers
        name = str(model.config.path or model.config.architecture)
        totals[name] += sum(each.total for each in ledgers if each.device == device and each.used)
    return dict(+totals)


def without(models: Collection[Loaded], budget: Budget) -> Budget:
    """What a device offers once these models are unloaded; another host's device is unchanged."""
    if budget.host:
        return budget
    plans = [model.plan for model in models if model.plan is not None]
    ledgers = [each for plan in plans for each in plan.ledgers if each.device == budget.device]
    if not ledgers:
        return budget
    held = sum(each.held - each.transport for each in ledgers)
    others = (other.plan for other in LOADED if other not in models)
    return replace(
        budget,
        models=_models_on(budget.device, models),
        in_use=max(budget.in_use - held, 0),
        promised_workspace=_promised_workspace(budget.device, others),
    )


def _promised_workspace(device: torch.device, plans: Iterable[Plan | None]) -> int:
    """The workspace that these models' calls need there; they run one after the other."""
    ledgers = (ledger for plan in plans if plan is not None for ledger in plan.ledgers)
    return max((ledger.promised_call for ledger in ledgers if ledger.device == device), default=0)


def _requested_budgets(devices: Devices | None) -> list[Budget]:
    """Budgets of devices by name, not queried yet, or of cards by size."""
    if devices is None:
        return list(map(_unqueried_budget, accelerators.present_devices()))
    names = _names(devices)
    sized = list(map(_is_size, names))
    if any(sized):
        return _cards(names, sized)
    try:
        return list(map(_unqueried_budget, accelerators.resolve_devices(names)))
    except ValueError as error:
        raise ValueError(f"{error}; sizes of cards look like 24G, 512M or 2x1.5G") from None


def _unqueried_budget(device: torch.device) -> Budget:
    margin = accelerators.default_margin(device)
    return Budget(device=device, capacity=_UNKNOWN, margin=margin)


def _names(devices: Devices) -> list[str | torch.device]:
    if isinstance(devices, str):
        devices = devices.split(",")
    elif isinstance(devices, torch.device):
        devices = [devices]
    return [name.strip() if isinstance(name, str) else name for name in devices]


def _is_size(name: str | torch.device) -> bool:
    """Whether it is meant as a size: device names begin with a letter."""
    return isinstance(name, str) and re.match(r"[\d.+-]", name) is not None


def _cards(names: Sequence[str | torch.device], sized: Sequence[bool]) -> list[Budget]:
    """Budgets for cards by size; ValueError names the first that is not a size."""
    for number, (name, is_size) in enumerate(zip(names, sized, strict=True), start=1):
        if name == "":
            raise ValueError(f"devices: item {number} of {','.join(map(str, names))!r} is empty")
        if not is_size:
            raise ValueError(
                f"devices: {str(name)!r} is not a size: sizes of cards and names of devices can't "
                "be mixed, give 24G,12G or cuda:0,cuda:1"
            )
    sizes = itertools.chain.from_iterable(parse_cards(str(name)) for name in names)
    return [_card(index, size) for index, size in enumerate(sizes)]


def _card(index: int, capacity: int) -> Budget:
    device = torch.device("cuda", index)
    beside = overhead.of_absent(device.type)
    return Budget(
        device=device,
        capacity=capacity,
        margin=accelerators.default_margin(device),
        context=beside.context,
        libraries=beside.libraries,
        graphs=beside.graphs,
        segmented=True,
    )


def _host(size: bool | int | str) -> Budget:
    if size is True:
        return present_budget(accelerators.CPU)
    return Budget(device=CPU, capacity=_number("cpu", size))


def _host_budgets(hosts: Hosts, cpu: bool | int | str) -> list[Budget]:
    """Every host's budgets, in order."""
    if not hosts:
        raise ValueError("hosts: give at least one, such as a=24G,24G")
    if cpu is True:
        raise ValueError("cpu: free memory of hosts isn't known here, give a size such as 32G")
    budgets = []
    for name, offered in hosts.items():
        here = _parse_host_budgets(name, offered) if isinstance(offered, str) else list(offered)
        if cpu is not False:
            here.append(_host(cpu))
        if not here or len({budget.device for budget in here}) < len(here):
            raise ValueError(f"host {name}: give it at least one device, and each only once")
        budgets += [replace(budget, host=checked_name(name)) for budget in here]
    return budgets


def _parse_host_budgets(host: str, text: str) -> list[Budget]:
    """Budgets for a host's cards by size, and for its memory, ``cpu:32G``, after them."""
    names = [name.strip() for name in text.split(",")]
    memory = [_host(name.removeprefix("cpu:")) for name in names if name.startswith("cpu:")]
    cards = [name for name in names if not name.startswith("cpu:")]
    try:
        return [*_cards(cards, [_is_size(name) for name in cards]), *memory]
    except ValueError as error:
        raise ValueError(f"host {host}: {error}") from None


def _with_numbers(
    budgets: list[Budget],
    name: str,
    sizes: Sizes | None,
    with_number: Callable[[Budget, int], Budget],
) -> list[Budget]:
    """The budgets with the line of this name set."""
    if sizes is None:
        return budgets
    if isinstance(sizes, str):
        sizes = sizes.split(",") if "," in sizes else sizes
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        sizes = [sizes] * len(budgets)
    cards = sum(budget.device.type != "cpu" for budget in budgets) or len(budgets)
    if not cards <= len(sizes) <= len(budgets):
        present = ", ".join(str(budget.place) for budget in budgets)
        plural = "" if len(sizes) == 1 else "s"
        raise ValueError(
            f"{name} names {len(sizes)} device{plural}, and there are {len(budgets)}: {present}"
        )
    given = budgets
    if len(sizes) < len(budgets):
        given = sorted(budgets, key=lambda budget: budget.device.type == "cpu")
    numbers = {
        budget.place: _number(f"{name} for {budget.place}", size)
        for budget, size in zip(given, sizes, strict=False)
    }
    return [with_number(b, numbers[b.place]) if b.place in numbers else b for b in budgets]


def _number(what: str, size: int | str) -> int:
    """Bytes from a number or a text such as ``1.5G``; 0 is allowed."""
    if isinstance(size, str):
        text = size.strip()
        if text.startswith("-"):
            raise ValueError(f"{what} is {text}: it can't be negative")
        return 0 if re.fullmatch(r"0+[KMGT]?", text, re.IGNORECASE) else parse_sizes(text)[0]
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{what} is {size!r}: give bytes (int) or text such as 24G")
    if size < 0:
        raise ValueError(f"{what} is {size}: it can't be negative")
    return size


def _with_bandwidths(budgets: list[Budget], bandwidth: Sequence[float]) -> list[Budget]:
    if len(bandwidth) != len(budgets) or not all(value > 0 for value in bandwidth):
        raise ValueError(
            f"bandwidth is {list(bandwidth)}: give {len(budgets)} positive numbers, one per "
            "device, in bytes per second"
        )
    return [replace(b, bandwidth=float(n)) for b, n in zip(budgets, bandwidth, strict=True)]

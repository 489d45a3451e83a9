"""A clock for the simulated accelerator: how long a run would take on hardware of given bandwidths.

While a :class:`Clock` is entered, every op is accounted for by the bytes that it reads and writes
on its device, which is what the time of decode steps depends on. Ops on a card are enqueued there;
the host goes on, and waits only where it reads from a card. What a run computes stays as it is.
``exkv.sim`` has the devices; ``exkv.sim.Clock`` is this one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

#: Arguments of an op by name.
Call = Mapping[str, Any]

HOST = torch.device("cpu")


class Span(NamedTuple):
    """An op, or a copy, in seconds since the clock started.

    Attributes:
        where: the device, or "link sim:0" for a copy between it and the host or another device.
    """

    where: str
    op: str
    start: float
    end: float


@dataclass(slots=True)
class _Queue:
    """What runs one after the other.

    Attributes:
        free: when all that was enqueued is done.
        busy: seconds in which it ran.
    """

    free: float = 0.0
    busy: float = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class _Ready:
    """When contents of storages are there that their device's queue does not order."""

    at: dict[int, float] = field(default_factory=dict)

    def of(self, tensors: list[Tensor]) -> float:
        return max((self.at.get(each.untyped_storage()._cdata, 0.0) for each in tensors), default=0)

    def set(self, tensor: Tensor, seconds: float) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.at:
            weakref.finalize(storage, self.at.pop, storage._cdata, None)
        self.at[storage._cdata] = seconds


class Clock(TorchDispatchMode):
    """Says how long what runs inside would take; a context manager.

    >>> with sim.Clock({"sim:0": 900e9, "sim:1": 400e9}, host=50e9, link=24e9) as clock:
    ...     model.forward(ids, cache)
    >>> clock.seconds

    Each device has a queue for each of its streams, and one for the copies over its link. A
    copy occupies the stream, too; one between two devices takes both links.

    Args:
        devices: bytes a second at which each card, by name, reads or writes its memory.
        host: the same of the host.
        link: bytes a second between a card and the host, or another card.
        latency: seconds until the first byte of a copy is there, unless it follows another one.

    Attributes:
        spans: everything that took time, in the order in which it was asked for.

    Raises:
        ValueError: a number that is not positive; an op on a card that has no bandwidth here.
    """

    def __init__(
        self, devices: Mapping[str, float], *, host: float, link: float, latency: float = 0.0
    ) -> None:
        super().__init__()
        self.rates = {"cpu": host, **devices}
        self.link, self.latency = link, latency
        for name, rate in {**self.rates, "the link": link}.items():
            if not rate > 0:
                raise ValueError(f"the bandwidth of {name} is {rate}: give bytes a second")
        self.restart()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, to keep this from being compiled."""
        return False

    def restart(self) -> None:
        """Start from zero, with nothing enqueued."""
        self.spans: list[Span] = []
        self._host = _Queue()
        self._queues: dict[tuple[torch.device, int], _Queue] = {}
        self._links: dict[torch.device, _Queue] = {}
        self._ready = _Ready()
        self._arriving = 0.0  # when the last copy to the host is there, if nobody has waited for it

    @property
    def seconds(self) -> float:
        """When everything is done, on all devices."""
        queues = [self._host, *self._queues.values(), *self._links.values()]
        return max(self._arriving, *(queue.free for queue in queues))

    @property
    def host_seconds(self) -> float:
        """When the host is through."""
        return max(self._host.free, self._arriving)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds in which each device computed, by name; ``"cpu"`` for the host."""
        found = {"cpu": self._host.busy}
        for (device, _), queue in self._queues.items():
            found[str(device)] = found.get(str(device), 0.0) + queue.busy
        return found

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that each device read and wrote, by name."""
        found = {"cpu": self._host.nbytes}
        for (device, _), queue in self._queues.items():
            found[str(device)] = found.get(str(device), 0) + queue.nbytes
        return found

    # One op -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = _named(func, args, kwargs)
        given, made = list(_tensors(call.values())), list(_tensors([out]))
        devices = {each.device for each in (*given, *made) if each.device.type != "meta"}
        cards = {device for device in devices if device.type != "cpu"}
        name = func.name().partition(".")[0]
        if name in _COPIES and len(devices) > 1:
            target = made[0] if made else call["self"]
            source = call["src"] if "src" in call else call["self"]
            self._copy(name, source, target, waits=not call.get("non_blocking"))
        elif name in _WAITING and cards:
            device = cards.pop()
            self._run(name, device, sum(map(_nbytes, given)), given)
            self._wait(self._queue(device).free + self.latency)
        elif nbytes := _touched(func, name, call, given, made):
            self._run(name, cards.pop() if cards else HOST, nbytes, given)
        return out

    def _run(self, op: str, device: torch.device, nbytes: int, given: list[Tensor]) -> None:
        if str(device) not in self.rates:
            raise ValueError(f"{op} runs on {device}, and the clock has no bandwidth of it")
        self._wait(self._arriving)
        on_host = device.type == "cpu"
        queue = self._host if on_host else self._queue(device)
        begin = max(queue.free, self._host.free, self._ready.of(given))
        self._take(queue, str(device), op, begin, nbytes / self.rates[str(device)])
        queue.nbytes += nbytes

    def _copy(self, op: str, source: Tensor, target: Tensor, *, waits: bool) -> None:
        """Between two devices: it waits for what is enqueued on both, and for the link. The host
        waits for a copy to it, at once or before it does anything else but copy."""
        ends = [each.device for each in (source, target) if each.device.type != "cpu"]
        queues = [self._queue(device) for device in ends]
        links = [self._links.setdefault(device, _Queue()) for device in ends]
        begin = max(self._host.free, self._ready.of([source]), *(q.free for q in (*queues, *links)))
        follows = all(link.free == begin and link.busy for link in links)
        taken = _nbytes(target) / self.link + (0.0 if follows else self.latency)
        for device, link in zip(ends, links, strict=True):
            self._take(link, f"link {device}", op, begin, taken)
        for queue in queues:
            queue.free = begin + taken
        if target.device.type != "cpu":
            self._ready.set(target, begin + taken)
            return
        self._arriving = max(self._arriving, begin + taken)
        if waits:
            self._wait(self._arriving)

    def _take(self, queue: _Queue, where: str, op: str, begin: float, taken: float) -> None:
        queue.free = begin + taken
        queue.busy += taken
        self.spans.append(Span(where, op, begin, begin + taken))

    def _wait(self, until: float) -> None:
        """Have the host wait."""
        self._host.free = max(self._host.free, until)
        if self._arriving <= self._host.free:
            self._arriving = 0.0

    def _queue(self, device: torch.device) -> _Queue:
        """Of the device's current stream."""
        stream = torch.accelerator.current_stream(device).stream_id
        return self._queues.setdefault((device, stream), _Queue())


# What an op touches -----------------------------------------------------------------------------

_COPIES = {"aten::copy_", "aten::_to_copy"}
#: Ops by which the host reads from a device.
_WAITING = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"),
    *("aten::masked_select", "aten::_unique2", "exkv::read_tally"),
}
#: Ops that overwrite their first argument without reading it.
_OVERWRITING = {
    *("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"),
    "aten::random_",
}
#: Ops that read of one argument what they return.
_SELECTING = {
    "aten::index": "self",
    "aten::index_select": "self",
    "aten::gather": "self",
    "aten::take_along_dim": "self",
    "aten::embedding": "weight",
    "exkv::dequantize_packed": "tensors",
    "exkv::dequantize_weight": "tensors",
}
#: Ops that change of one argument what the other brings.
_SCATTERING = {
    "aten::index_put_": "values",
    "aten::index_copy_": "source",
    "aten::index_add_": "source",
    "aten::scatter_": "src",
    "aten::scatter_add_": "src",
}


def _touched(
    func: OpOverload, name: str, call: Call, given: list[Tensor], made: list[Tensor]
) -> int:
    """Bytes that an op reads and writes."""
    schema = func._schema
    written = [each for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    views = (each.alias_info is not None for each in schema.returns)
    if (any(views) and not written) or "empty" in name or not (made or written):
        return 0
    if name in _OWN:
        return _OWN[name](call) + sum(map(_nbytes, made))
    if name in _SELECTING:
        whole = sum(map(_nbytes, _tensors([call[_SELECTING[name]]])))
        return sum(map(_nbytes, given)) - whole + 2 * sum(map(_nbytes, made))
    if name in _SCATTERING:
        source = call.get(_SCATTERING[name])
        brought = _nbytes(source) if isinstance(source, Tensor) else 0
        return sum(map(_nbytes, given)) - _nbytes(call["self"]) + 2 * brought
    changed = list(_tensors([call[each.name] for each in written if each.name in call]))
    read = sum(map(_nbytes, given))
    if name in _OVERWRITING:
        read -= _nbytes(changed[0])
    return read + sum(map(_nbytes, changed or made))


def _of_experts(call: Call) -> int:
    chosen = set(call["chosen"].flatten().tolist())
    matrices = (call[part][expert] for part in ("gate", "up", "down") for expert in chosen)
    return sum(map(_nbytes, matrices)) + _beside(call, "gate", "up", "down")


def _of_products(call: Call) -> int:
    chosen = set(call["chosen"].flatten().tolist())
    return sum(_nbytes(call["weights"][each]) for each in chosen) + _beside(call, "weights")


def _of_formats(call: Call) -> int:
    """Experts have alike formats, and so as many tensors."""
    formats = call["formats"]
    count = len(formats.split("\n") if isinstance(formats, str) else formats) // 3
    tensors, each = call["tensors"], len(call["tensors"]) // count
    chosen = set(call["chosen"].flatten().tolist())
    read = (tensors[each * expert : each * (expert + 1)] for expert in chosen)
    return sum(map(_nbytes, _tensors(read))) + _beside(call, "tensors")


def _of_attention(call: Call) -> int:
    """Keys and values up to the longest row's last one."""
    stored = [name for name in ("k_stored", "v_stored") if name in call] or [
        name for name in ("k", "k_scale", "v", "v_scale") if name in call
    ]
    read, rows = 0, call["q"].shape[0]
    for tensor in _tensors([call[name] for name in stored]):
        there = max(tensor.shape[0] * tensor.shape[1], 1)
        read += int(_nbytes(tensor) * min(rows * call["kv_len"] / there, 1.0))
    return read + _beside(call, *stored)


def _of_append(call: Call) -> int:
    """What comes is read, and as much written."""
    return 2 * _nbytes(call["k"]) + 2 * _nbytes(call["v"])


def _beside(call: Call, *names: str) -> int:
    """Bytes of all other arguments."""
    return sum(map(_nbytes, _tensors([v for name, v in call.items() if name not in names])))


#: exkv's ops that read some of their arguments' bytes only -> these.
_OWN: dict[str, Callable[[Call], int]] = {
    "exkv::experts": _of_experts,
    "exkv::expert_products": _of_products,
    "exkv::chosen_experts": _of_formats,
    "exkv::experts_of_formats": _of_formats,
    "exkv::append_kv": _of_append,
    **dict.fromkeys(
        (
            *("exkv::attention", "exkv::attention_int8", "exkv::attention_part"),
            *("exkv::attention_part_since", "exkv::decode_attention"),
        ),
        _of_attention,
    ),
}


def _named(func: OpOverload, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that have their defaults."""
    names = (each.name for each in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    """Of its elements, those that repeat counted once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride) * tensor.element_size()

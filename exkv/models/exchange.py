"""Exchange experts while a model serves: what turns out hot comes to the card, and what is cold
there goes to host memory in its place.

Occasionally, between two calls, an expert in host memory that tokens choose more often than one on
the card in the same layer changes places with it. Both keep their bits, so tokens don't change. The
two take as many bytes as before, and the copies go through the buffers that the plan has for
experts on their way to the card.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from exkv import devices
from exkv.checkpoint import Checkpoint
from exkv.errors import Attempt
from exkv.layers.linear import Matrix
from exkv.layers.mlp import Experts, mixtures
from exkv.weights.expert_groups import expert_of
from exkv.weights.read_parameters import mapped_parameters

from .expert_usage import ExpertUsage, UsageCounter
from .units import Unit

if TYPE_CHECKING:
    from .transformer import Transformer

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger(__name__)

#: Calls between two exchanges, and the share of a count that is kept at the next one.
EVERY, KEPT = 64, 0.9
#: Most bytes of experts that come to the cards in one exchange, unless a single expert has more.
MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """An expert in host memory, and one on the card that takes its place there.

    Attributes:
        gain: by how many of the counted tokens the first is chosen more often than the second.
    """

    unit: Unit
    mixture: Experts
    to_card: int
    to_host: int
    gain: float

    @property
    def nbytes(self) -> int:
        return self.unit.expert_bytes[self.to_card]


class ExpertExchange:
    """Count what a model's calls choose, and exchange experts between them; entered by each call.

    Args:
        every: calls between two exchanges.
        most_bytes: of experts that come to the cards in one exchange.

    Attributes:
        swaps: number of swaps so far.
        moved_bytes: brought to the cards by these.
    """

    def __init__(self, every: int = EVERY, most_bytes: int = MOST_BYTES) -> None:
        self.every, self.most_bytes = every, most_bytes
        self.swaps = self.moved_bytes = 0
        self._units: dict[str, Unit] = {}
        self._stored: dict[str, dict[int, dict[str, Tensor]]] = {}
        self._counter = UsageCounter()
        self._recent: dict[str, ExpertUsage] = {}
        self._served: dict[str, ExpertUsage] = {}
        self._lock, self._under_way, self._calls = threading.Lock(), 0, 0

    def watch(self, unit: Unit, checkpoint: Checkpoint) -> None:
        """Count in a unit, which was read from this checkpoint."""
        assert unit.module is not None
        self._units[unit.name] = unit
        self._stored[unit.name] = _in_mapped_files(unit, checkpoint)
        self._counter.watch(unit.name, unit.module)

    def __enter__(self) -> None:
        with self._lock:
            if self._calls >= self.every and not self._under_way:
                self._calls = 0
                self._exchange()
            self._calls += 1
            self._under_way += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._under_way -= 1

    def take_served(self) -> dict[str, ExpertUsage]:
        """Counts since the last time that this was called."""
        with self._lock:
            self._take()
            served, self._served = self._served, {}
        return served

    def _take(self) -> None:
        """Add new counts to those that decay, and to those that don't."""
        for name, now in self._counter.take().items():
            for kept in (self._recent, self._served):
                kept[name] = now if name not in kept else now.after(kept[name], 1.0)

    def _exchange(self) -> None:
        """Make the worthwhile swaps, the largest gain first; a swap that memory or a device refuses
        is skipped."""
        self._take()
        left = self.most_bytes
        for swap in sorted(self._worthwhile_swaps(), key=lambda each: -each.gain):
            if swap.nbytes > left and left < self.most_bytes:
                break
            left -= swap.nbytes
            with Attempt() as attempt:
                exchange(swap, self._stored[swap.unit.name])
                self.swaps += 1
                self.moved_bytes += swap.nbytes
                continue
            logger.warning("%s: no expert is exchanged: %s", swap.unit.name, attempt.why)
            break
        self._recent = {
            name: ExpertUsage(KEPT * of.tokens, tuple(KEPT * count for count in of.counts))
            for name, of in self._recent.items()
        }

    def _worthwhile_swaps(self) -> Iterator[Swap]:
        """Pairs that are worth an exchange: the hottest on the host with the coldest on the card,
        then the next, as long as counts differ by more than chance (for two counts, the square root
        of their sum)."""
        for name, usage in self._recent.items():
            unit, mixture = self._units[name], self._counter.experts.get(name)
            if unit.module is None or mixture is None or unit.device == devices.CPU:
                continue
            rank = sorted(range(len(usage.counts)), key=usage.counts.__getitem__)
            cold = [expert for expert in rank if expert not in unit.host_experts]
            for hot in reversed([expert for expert in rank if expert in unit.host_experts]):
                alike = (each for each in cold if _layout(mixture, each) == _layout(mixture, hot))
                coldest = next(alike, None)
                if coldest is None:
                    continue
                more, less = usage.counts[hot], usage.counts[coldest]
                if more - less <= math.sqrt(more + less):
                    break
                cold.remove(coldest)
                yield Swap(
                    unit=unit, mixture=mixture, to_card=hot, to_host=coldest, gain=more - less
                )


def between_exchanges(call: F) -> F:
    """Decorate a model's method during which no expert may be exchanged."""

    @functools.wraps(call)
    def method(self: Transformer, *args: Any, **kwargs: Any) -> Any:
        if self.exchange is None:
            return call(self, *args, **kwargs)
        with self.exchange:
            return call(self, *args, **kwargs)

    return method  # type: ignore[return-value] # of the same arguments


# One exchange ---------------------------------------------------------------------------------


def exchange(swap: Swap, stored: dict[int, dict[str, Tensor]]) -> None:
    """Have two experts change places, both or neither.

    Args:
        stored: for experts on the card, tensors that a mapped file also has, from which those of an
            expert that goes to host memory are taken.

    Raises:
        torch.OutOfMemoryError: and whatever copies raise; both experts are as before.
    """
    unit, mixture = swap.unit, swap.mixture
    hot, cold = _tensors(mixture, swap.to_card), _tensors(mixture, swap.to_host)
    assert mixture.staging is not None, "a unit with experts in host memory has buffers"
    with torch.no_grad(), mixture.staging.lock:
        kept = mixture.staging.views_of(cold)
        _copy(cold, kept)
        with _restored_on_error(kept, cold):
            _copy(hot, cold)
            found = stored.get(swap.to_host, {})
            mapped = {name: each for name, each in hot.items() if _is_mapped(each)}
            # Mapped memory isn't written to: other readers of the file would see the change.
            fresh = {n: torch.empty_like(e) for n, e in mapped.items() if n not in found}
            others = {n: e for n, e in hot.items() if n not in found and n not in fresh}
            with _restored_on_error(cold, others):
                _copy(kept, others | fresh)
    if mapped:
        stored[swap.to_card] = mapped
    stored.pop(swap.to_host, None)
    _set_weights(mixture, swap.to_card, cold)
    _set_weights(mixture, swap.to_host, others | fresh | found)
    unit.put_on_host(unit.host_experts - {swap.to_card} | {swap.to_host})


@contextlib.contextmanager
def _restored_on_error(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> Iterator[None]:
    """Copy the source back to the target if the block fails."""
    try:
        yield
    except BaseException:
        _copy(source, target)
        raise


def _in_mapped_files(unit: Unit, checkpoint: Checkpoint) -> dict[int, dict[str, Tensor]]:
    """For experts on the card, their tensors in a mapped file, if those of experts in host memory
    are there; separate, like those."""
    assert unit.module is not None
    mixture = next(mixtures(unit.module))
    mapped = {
        (str(_formats(mixture, expert)), name)
        for expert in unit.host_experts
        for name, tensor in _tensors(mixture, expert).items()
        if _is_mapped(tensor)
    }
    experts = range(len(unit.expert_bytes)) if mapped else ()
    formats = {e: str(_formats(mixture, e)) for e in experts if e not in unit.host_experts}

    def place(parameter: str) -> tuple[int, str] | None:
        """The expert and its tensor's name; None for any other parameter."""
        if (expert := expert_of(parameter)) not in formats:
            return None
        name = parameter.partition(f"experts.{expert}.")[2]
        return (expert, name) if (formats[expert], name) in mapped else None

    sources = [s for s in unit.spec.sources if any(map(place, s.parameters))]
    found: dict[int, dict[str, Tensor]] = {}
    for parameter, tensor in mapped_parameters(checkpoint, sources, unit.shapes).items():
        if (there := place(parameter)) is not None:
            found.setdefault(there[0], {})[there[1]] = tensor
    return found


def _formats(mixture: Experts, expert: int) -> list[tuple[str, str]]:
    parts = mixture.experts[expert].named_modules()
    return [(name, part.format.name) for name, part in parts if isinstance(part, Matrix)]


def _is_mapped(tensor: Tensor) -> bool:
    """Whether the memory belongs to a file: torch has no allocator for it, and can't resize it."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def _layout(mixture: Experts, expert: int) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, t.shape, t.dtype) for name, t in _tensors(mixture, expert).items()]


def _tensors(mixture: Experts, expert: int) -> dict[str, Tensor]:
    return dict(mixture.experts[expert].named_parameters())


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _set_weights(mixture: Experts, expert: int, tensors: Mapping[str, Tensor]) -> None:
    """Give an expert's module these weights; its hooks stay."""
    for path, tensor in tensors.items():
        module, _, name = path.rpartition(".")
        weight = nn.Parameter(tensor.detach(), requires_grad=False)
        setattr(mixture.experts[expert].get_submodule(module), name, weight)

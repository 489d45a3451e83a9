"""Fallback steps of ``generate`` when memory runs out: convert the cache, and retry the failed
call. The cache keeps its contents, so nothing runs twice."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from exkv import devices
from exkv.cache import KVCache, LayerSpec, OnHost, Storage
from exkv.cache.base import CacheOwner
from exkv.cache.spec import placed
from exkv.errors import Attempt

logger = logging.getLogger(__name__)

#: A key of ``STEPS``, or a callable that gets the cache.
Step: TypeAlias = str | Callable[[KVCache], Any]
T = TypeVar("T")

#: Named step -> properties that it gives every layer, in the order of ``on_oom="fallback"``: the
#: one that changes no token first.
STEPS: Mapping[str, Mapping[str, Any]] = {
    "offload": {"residence": OnHost()},
    "8bit": {"storage": Storage(keys="int8", values="int8")},
    "4bit": {"storage": Storage(keys="int4", values="int4", rotate=True)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A step that ``generate`` took because memory ran out.

    Attributes:
        step: its name, or the callable's.
        during: "building the cache", "running the model", "forking the prompt" or "reordering
            rows".
        why: the error's message.
        token: tokens in the cache's longest row at that time.
        before, after: bytes of the cache by device, including the host; while it is being built,
            those of the full cache.
    """

    step: str
    during: str
    why: str
    token: int
    before: Mapping[str, int]
    after: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOom:
    """The policy of a call of ``generate`` when memory runs out.

    Attributes:
        on_oom:

            - "fallback": convert the cache, and continue from the token where the call stopped.
              First move it to host memory ("offload"), which changes no token; if that is not
              enough, round it to 8 bits ("8bit"), then to 4 ("4bit").
            - a list of steps instead, each taken at most once: these names, and callables that get
              the cache. ``["offload"]`` never changes a token.
            - "raise": nothing.

            Each step is logged as a warning; the first that rounds also gives a Python warning,
            once a call. A given cache stays converted, with every cache that shares its storage.
        on_fallback: called after each step, before the retry.

    Raises:
        ValueError: an unknown word or step.
        TypeError: something that can't be called.
    """

    on_oom: str | Sequence[Step] = "fallback"
    on_fallback: Callable[[Fallback], Any] | None = None

    def __post_init__(self) -> None:
        words = f'"fallback", "raise", or a list of callables and of {", ".join(STEPS)}'
        given = self.on_oom
        if isinstance(given, str):
            if given not in ("fallback", "raise"):
                hint = f": a single step is [{given!r}]" if given in STEPS else ""
                raise ValueError(f"on_oom is {given!r}; it must be {words}{hint}")
        elif not isinstance(given, list | tuple):
            raise TypeError(f"on_oom is {given!r}; it must be {words}")
        else:
            for step in given:
                if isinstance(step, str) and step not in STEPS:
                    raise ValueError(f"on_oom has the step {step!r}; it must be {words}")
                if not isinstance(step, str) and not callable(step):
                    raise TypeError(f"on_oom has the step {step!r}; it must be {words}")
        if self.on_fallback is not None and not callable(self.on_fallback):
            raise TypeError(f"on_fallback is {self.on_fallback!r}; it must be callable")

    @property
    def steps(self) -> list[Step]:
        """The steps in order."""
        if isinstance(self.on_oom, str):
            return list(STEPS) if self.on_oom == "fallback" else []
        return list(self.on_oom)


class Rescue:
    """The fallback steps of one call of ``generate``; ``taken`` are those so far."""

    def __init__(self, wish: OnOom) -> None:
        self.taken: list[Fallback] = []
        self._left = wish.steps
        self._on_fallback = wish.on_fallback
        self._warned = False

    def run(self, call: Callable[[], T], cache: KVCache, during: str = "running the model") -> T:
        """Make a call that can be retried after it ran out of memory.

        Args:
            cache: converted by the steps.
            during: as in :class:`Fallback`.

        Raises:
            torch.OutOfMemoryError: no step is left that would free memory.
        """
        while self._left:
            with Attempt() as attempt:
                return call()
            step = self._next(specs_of(cache), cache.model)
            if step is not None:
                self._convert(cache, step, during, attempt.why)
        return call()

    def build(self, model: CacheOwner, kind: type[KVCache], specs: Sequence[LayerSpec]) -> KVCache:
        """Build a cache with layers of these specs, or of those that the steps make of them. A
        callable step gets a cache in host memory, whose layers then move to the devices as far as
        they fit.

        Raises:
            PlacementError: no room for the cache, and no remaining step would help.
        """
        while self._left:
            with Attempt() as attempt:
                return kind.of(model, specs)
            why = attempt.why
            step = self._next(specs, model)
            if callable(step):
                offloaded = self.build(
                    model, kind, [replace(spec, **STEPS["offload"]) for spec in specs]
                )
                self._convert(offloaded, step, "building the cache", why)
                return moved_to_devices(offloaded, specs)
            if step is not None:
                before, specs = specs, [replace(spec, **STEPS[step]) for spec in specs]
                self._report(
                    Fallback(
                        step=step,
                        during="building the cache",
                        why=why,
                        token=0,
                        before=planned_bytes(model, before),
                        after=planned_bytes(model, specs),
                    )
                )
                self._warn_if_rounded(before, specs)
        return kind.of(model, specs)

    def _next(self, specs: Sequence[LayerSpec], model: CacheOwner) -> Step | None:
        """Pop the steps up to the first that would free memory with layers of these specs."""
        while self._left:
            step = self._left.pop(0)
            if callable(step) or frees(STEPS[step], specs, model):
                return step
        return None

    def _convert(self, cache: KVCache, step: Step, during: str, why: str) -> None:
        """Take a step. If it runs out of memory itself, the converted layers may be enough."""
        before, specs = cache_bytes(cache), specs_of(cache)
        with Attempt() as attempt:
            step(cache) if callable(step) else cache.convert(**STEPS[step])
        if attempt.why:
            logger.warning("%s itself ran out of memory: %s", _step_name(step), attempt.why)
        devices.release_idle_memory()
        self._report(
            Fallback(
                step=_step_name(step),
                during=during,
                why=why,
                token=cache.current_seq_len,
                before=before,
                after=cache_bytes(cache),
            )
        )
        self._warn_if_rounded(specs, specs_of(cache))

    def _report(self, taken: Fallback) -> None:
        logger.warning(
            "out of memory while %s at token %d; the step %s changes the cache from %s to %s, and "
            "generation continues. The error: %s",
            *(taken.during, taken.token, taken.step),
            *(_sizes(taken.before), _sizes(taken.after), taken.why),
        )
        self.taken.append(taken)
        if self._on_fallback is not None:
            self._on_fallback(taken)

    def _warn_if_rounded(self, before: Sequence[LayerSpec], after: Sequence[LayerSpec]) -> None:
        """Warn once a call that tokens may differ from now on."""
        pairs = zip(before, after, strict=True)
        changed = [new.storage for old, new in pairs if new.storage != old.storage]
        rounding = [storage for storage in changed if storage != storage.floats]
        if rounding and not self._warned:
            self._warned = True
            warnings.warn(
                f"memory ran out, and the cache is stored as {rounding[0]} from now on, which "
                'rounds: tokens may differ. on_oom=["offload"] changes no token, on_oom="raise" '
                "stops instead",
                stacklevel=2,
            )


def specs_of(cache: KVCache) -> list[LayerSpec]:
    return [layer.spec for layer in cache.layers]


def frees(properties: Mapping[str, Any], specs: Sequence[LayerSpec], model: CacheOwner) -> bool:
    """Whether other properties would make layers of these specs smaller on their devices."""

    def weight(spec: LayerSpec, device: torch.device) -> tuple[bool, int]:
        return spec.residence.storage_device(device) != devices.CPU, spec.nbytes(spec.capacity)

    return any(
        weight(replace(specs[layer], **properties), device) < weight(specs[layer], device)
        for layer, device in placed(specs, model.cache_map).items()
    )


def cache_bytes(cache: KVCache) -> dict[str, int]:
    """Bytes of a cache on each device; shared storage counts once."""
    total: dict[str, int] = {}
    for each in cache.family():
        for device, nbytes in each.nbytes().items():
            total[str(device)] = total.get(str(device), 0) + nbytes
    return total


def planned_bytes(model: CacheOwner, specs: Sequence[LayerSpec]) -> dict[str, int]:
    """Bytes of a full cache with layers of these specs on each device."""
    total: dict[str, int] = {}
    for layer, device in placed(specs, model.cache_map).items():
        reads = specs[layer].reads
        if reads is not None and model.cache_map.get(reads) == device:
            continue  # shares that layer's storage
        storage = str(specs[layer].residence.storage_device(device))
        total[storage] = total.get(storage, 0) + specs[layer].nbytes(specs[layer].capacity)
    return total


def moved_to_devices(cache: KVCache, specs: Sequence[LayerSpec]) -> KVCache:
    """Move the layers to where these specs store them, as far as they fit."""
    with Attempt() as attempt:
        cache.convert(residence=specs[0].residence)
    if attempt.why:
        logger.warning("some layers of the cache stay in host memory: %s", attempt.why)
    return cache


def _step_name(step: Step) -> str:
    return step if isinstance(step, str) else getattr(step, "__name__", repr(step))


def _sizes(nbytes: Mapping[str, int]) -> str:
    parts = (f"{size:,} bytes on {device}" for device, size in nbytes.items())
    return " and ".join(parts) or "nothing"

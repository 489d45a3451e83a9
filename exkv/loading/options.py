"""The arguments of ``load`` and ``load_autosplit`` as one value."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from exkv.cache import KVCache
from exkv.planning import Plan

#: Called with a unit's index and the number of units.
Callback = Callable[[int, int], Any]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where a model is placed, what it promises, and the callbacks; see :class:`exkv.Model`."""

    gpu_split: Sequence[float] | None = None
    reserve_vram: int | Sequence[int] | None = None
    devices: Sequence[str | torch.device] | None = None
    objective: str = "pack"
    order: str = "listed"
    host_experts: bool = True
    disk_experts: bool = True
    last_id_only: bool | None = None
    plan: Plan | None = None
    lazy: bool = False
    draft: KVCache | None = None
    callback: Callback | None = None
    callback_gen: Callback | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.plan is not None and not (self.gpu_split is None and self.devices is None):
            raise ValueError("the plan says where units go: leave out gpu_split and devices")

    def announce(self, steps: Generator[int], total: int) -> Iterator[Any]:
        """Report each step to the callbacks and the bar; yields what ``callback_gen`` yields."""
        bar = Progress(console=Console(stderr=True), disable=not self.progress, transient=True)
        # Closed at once, not when collected: an error in a callback unloads.
        with contextlib.closing(steps), bar:
            task = bar.add_task("Loading", total=None)  # moves while the model is being planned
            for index in steps:
                bar.update(task, completed=index, total=total)
                if self.callback is not None:
                    self.callback(index, total)
                if self.callback_gen is not None:
                    yield from self.callback_gen(index, total)


def finished(steps: Callable[P, Generator[Any, None, T]]) -> Callable[P, T]:
    """Make a function that runs a generator function to its end -> its return value."""

    @functools.wraps(steps)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        under_way = steps(*args, **kwargs)
        while True:
            try:
                next(under_way)
            except StopIteration as end:
                result: T = end.value
                return result

    return run

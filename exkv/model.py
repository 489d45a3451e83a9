"""The model as users hold it: ``load`` and ``load_autosplit`` in ExLlamaV2's words.

Both make budgets and hand them to ``exkv.loader.load_units``; they differ in nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from exkv import devices
from exkv.cache import KVCache
from exkv.config import ModelConfig
from exkv.loader import load_units
from exkv.models import Transformer
from exkv.placement import Budget
from exkv.report import LoadReport

Callback = Callable[[int, int], Any]
_GB = 1 << 30


class Model(Transformer):
    """A language model over several devices.

    >>> model = Model(ModelConfig.from_pretrained("path/to/model"))
    >>> cache = Cache(model, max_seq_len=8192, lazy=True)
    >>> model.load_autosplit(cache)

    Attributes:
        report: after loading, what stands where, predicted beside measured.
    """

    def __init__(
        self,
        config: ModelConfig | str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_input_len: int = 2048,
        embed_cpu: bool = False,
    ) -> None:
        if not isinstance(config, ModelConfig):
            config = ModelConfig.from_pretrained(config)
        super().__init__(config, dtype=dtype, max_input_len=max_input_len, embed_cpu=embed_cpu)
        self.report: LoadReport | None = None

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        progress: bool = False,
    ) -> LoadReport | None:
        """Load with a split by hand.

        Args:
            gpu_split: GB (2**30 bytes) to use on each device; weights, the caches that are
                built by now, and workspace all count. A zero skips the device; devices beyond
                the list are not used. None for all that is free, less the reserve that
                :meth:`load_autosplit` leaves by default.
            lazy: place the units, and read each when it is first used.
            stats: return the report.
            callback: called as ``callback(index, total)`` before each unit and once at the end.
            callback_gen: the same, its result iterated over; see :meth:`load_gen`.
            devices: in the order in which they are filled; None for every accelerator, or the
                CPU where there is none. ``"cpu"`` may stand last, as overflow.
            progress: show a bar.

        Raises:
            ValueError: a negative, empty or overlong split, or the model is loaded already.
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: no room; every device is as it was found.
        """
        steps = self.load_gen(
            gpu_split, lazy, stats, callback, callback_gen, devices=devices, progress=progress
        )
        for _ in steps:
            pass
        return self.report if stats else None

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        progress: bool = False,
    ) -> Iterator[Any]:
        """:meth:`load` as a generator of what ``callback_gen`` yields; with ``stats``, the
        report comes last. Dropped half-way, it leaves nothing loaded."""
        budgets = split_budgets(devices, gpu_split)
        steps = load_units(self, budgets, lazy=lazy, last_id_only=False)
        yield from self._announce(steps, callback, callback_gen, progress)
        if stats:
            yield self.report

    def load_autosplit(
        self,
        cache: KVCache,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        progress: bool = False,
    ) -> None:
        """Load over the devices, filling one after the other.

        A plan is made first and nothing is read before it holds. What was planned is promised:
        a forward call within the caches' rows and lengths finds its memory.

        Args:
            cache: counted in, with every other cache that is built on this model by now.
            reserve_vram: bytes to leave free, on each device or as a list; None for a default
                on real GPUs (192 MiB on the first, 64 MiB on the others).
            last_id_only: promise logits of each row's last token only, which saves the rest.
            callback, callback_gen, devices, progress: as for :meth:`load`.

        Raises:
            ValueError: a negative or overlong reserve, or the cache is of another model.
            CheckpointError: the files are damaged, or contradict the config.
            PlacementError: no room; every device is as it was found.
        """
        steps = self.load_autosplit_gen(
            cache,
            reserve_vram,
            last_id_only,
            callback,
            callback_gen,
            devices=devices,
            progress=progress,
        )
        for _ in steps:
            pass

    def load_autosplit_gen(
        self,
        cache: KVCache,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        progress: bool = False,
    ) -> Iterator[Any]:
        """:meth:`load_autosplit` as a generator of what ``callback_gen`` yields."""
        if cache.model is not self:
            raise ValueError("the cache was built for another model")
        budgets = autosplit_budgets(devices, reserve_vram)
        steps = load_units(self, budgets, lazy=False, last_id_only=last_id_only)
        yield from self._announce(steps, callback, callback_gen, progress)

    def unload(self) -> None:
        super().unload()
        self.report = None

    def _announce(
        self,
        steps: Generator[int],
        callback: Callback | None,
        callback_gen: Callback | None,
        progress: bool,
    ) -> Iterator[Any]:
        """Tell the callbacks of each step, and the bar."""
        total = len(self.units)
        # Closed at once, not when the collector comes: an error in a callback unloads.
        console = Console(stderr=True)
        bar = Progress(console=console, disable=not progress, transient=True)
        with contextlib.closing(steps), bar:
            task = bar.add_task("Loading", total=total)
            for index in steps:
                bar.update(task, completed=index)
                if callback is not None:
                    callback(index, total)
                if callback_gen is not None:
                    yield from callback_gen(index, total)


def split_budgets(
    names: Sequence[str | torch.device] | None, gpu_split: Sequence[float] | None
) -> list[Budget]:
    """Budgets for a split by hand, in GB of 2**30 bytes."""
    if gpu_split is None:
        return autosplit_budgets(names, None)
    offered = devices.resolve_devices(names)
    if len(gpu_split) > len(offered):
        present = ", ".join(map(str, offered))
        raise ValueError(
            f"gpu_split names {len(gpu_split)} devices, and there are {len(offered)}: {present}"
        )
    for index, size in enumerate(gpu_split):
        if not size >= 0:
            raise ValueError(f"gpu_split[{index}] is {size}: give GB, or 0 to skip the device")
    if not any(gpu_split):
        raise ValueError("gpu_split gives no device any memory")
    return [
        Budget(device=d, available=devices.available_memory(d), cap=int(size * _GB))
        for d, size in zip(offered, gpu_split, strict=False)
        if size
    ]


def autosplit_budgets(
    names: Sequence[str | torch.device] | None, reserve_vram: int | Sequence[int] | None
) -> list[Budget]:
    """Budgets of all free memory less a reserve, in bytes."""
    offered = devices.resolve_devices(names)
    if reserve_vram is None:
        reserves = devices.default_reserve(offered)
    elif isinstance(reserve_vram, int):
        reserves = [reserve_vram] * len(offered)
    else:
        reserves = [*reserve_vram, *[0] * (len(offered) - len(reserve_vram))]
    if len(reserves) > len(offered):
        raise ValueError(
            f"reserve_vram names {len(reserves)} devices, and there are {len(offered)}"
        )
    for index, reserve in enumerate(reserves):
        if reserve < 0:
            raise ValueError(
                f"reserve_vram for {offered[index]} is {reserve}: it can't be negative"
            )
    return [
        Budget(device=d, available=devices.available_memory(d), reserve=reserve)
        for d, reserve in zip(offered, reserves, strict=True)
    ]

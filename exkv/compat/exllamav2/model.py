"""``ExLlamaV2``: ExLlamaV2's interface over :class:`exkv.Model`, which is its ``exkv``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exkv import Model
from exkv.devices import present_devices
from exkv.loading.options import Callback, finished
from exkv.model import split_budgets
from exkv.planning import Plan, Scenario, Workload
from exkv.planning.place import with_caches
from exkv.planning.solve import plans_for

from .cache import ExLlamaV2CacheBase
from .config import ExLlamaV2Config
from .loras import adapter_of
from .missing import ARGUMENTS, Adapter, check_kind, missing_from, refuse_arguments
from .rows import new_tokens, padding, to_left_padding, to_right_padding

_GB = 1 << 30


class ExLlamaV2(Adapter):
    """A model over several devices.

    Attributes:
        config: the given one; later changes to it take effect at the next load.
        exkv: the :class:`exkv.Model` that does the work.
        tp_context: None: there is no tensor parallelism.
    """

    tp_context = None

    def __init__(
        self, config: ExLlamaV2Config, lazy_load: bool = False, archparams: object = None
    ) -> None:
        refuse_arguments("ExLlamaV2", lazy_load=lazy_load, archparams=archparams)
        check_kind("config", config, ExLlamaV2Config)
        self.config = config
        self.exkv = Model(config.for_exkv(), max_input_len=config.max_input_len, embed_cpu=True)
        self._only_placed = False

    # Loading ------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        return self.exkv.loaded and not self._only_placed

    @property
    def cache_map(self) -> dict[int, str]:
        """Decoder layer -> name of its device, for placed layers; read-only."""
        return _Places({layer: str(device) for layer, device in self.exkv.cache_map.items()})

    def set_cache_map(self) -> None:
        """Without effect: :attr:`cache_map` is always current."""

    def get_cache_devices(self) -> list[str]:
        """The devices of decoder layers, in the model's order."""
        return list(dict.fromkeys(self.cache_map.values()))

    def set_device_map(self, allocation: Sequence[float], embed_cpu: bool = True) -> list[float]:
        """Place the layers by a split in GB (2**30 bytes), without reading them.

        A later ``load`` places them again; without one, a forward call reads each layer on demand.

        Returns:
            GB that are left of each device's share.

        Raises:
            ValueError, PlacementError: as :meth:`exkv.Model.load` does.
        """
        self._begin()
        self.exkv.embed_cpu = embed_cpu
        plan = self._plan(allocation)
        self.exkv.load(plan=plan, lazy=True)
        self._only_placed = True
        used = {} if plan is None else {each.device: each.total for each in plan.ledgers}
        offered = present_devices()[: len(allocation)]
        return [
            share - used.get(device, 0) / _GB
            for share, device in zip(allocation, offered, strict=True)
        ]

    def load_gen(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        progress: bool = False,
    ) -> Generator[Any]:
        """Load with a manual split in GB; None or ``[]`` for all free memory of all devices.
        ``load`` runs it to its end; ``load_gen`` yields what ``callback_gen`` yields.

        As in ExLlamaV2, a split is of weights and workspace, and caches take further memory; in
        :meth:`exkv.Model.load`, which has the same arguments and errors, a split includes them.
        ``stats`` has no effect.
        """
        self._begin()
        plan = self._plan(gpu_split)
        yield from self.exkv.load_gen(
            None, lazy, False, callback, callback_gen, plan=plan, progress=progress
        )

    load = finished(load_gen)

    def _plan(self, gpu_split: Sequence[float] | None) -> Plan | None:
        """Place units by a split without caches; then add all caches, and remove the limits."""
        budgets = tuple(split_budgets(None, gpu_split))
        if not gpu_split:
            return None
        scenario = Scenario(workloads=(Workload.of(self.exkv, ()),), budgets=budgets)
        (plan,) = plans_for(scenario)
        ledgers = [replace(each, budget=replace(each.budget, cap=None)) for each in plan.ledgers]
        return with_caches(self.exkv, replace(plan, ledgers=tuple(ledgers)))

    def load_autosplit_gen(
        self,
        cache: ExLlamaV2CacheBase,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Callback | None = None,
        callback_gen: Callback | None = None,
        progress: bool = False,
    ) -> Generator[Any]:
        """Load over the devices, including the cache, whether it is lazy or not. Arguments and
        errors are those of :meth:`exkv.Model.load_autosplit`, except ``last_id_only``, which has
        no effect: without room for the logits of many tokens, they are computed in slices."""
        check_kind("cache", cache, ExLlamaV2CacheBase)
        self._begin()
        only_last = True if self.config.max_output_len == 1 else None
        yield from self.exkv.load_autosplit_gen(
            cache.exkv, reserve_vram, only_last, callback, callback_gen, progress=progress
        )

    load_autosplit = finished(load_autosplit_gen)

    def _begin(self) -> None:
        """Prepare placement: undo ``set_device_map``, and apply the settings."""
        if self._only_placed:
            self.exkv.unload()
            self._only_placed = False
        if not self.exkv.loaded:
            self.exkv.max_input_len = self.config.max_input_len
            self.exkv.embed_cpu = True

    def unload(self) -> None:
        """Free all memory, including that of the caches. The model can be loaded again.

        An asynchronous generator runs its steps in another thread, unlike ExLlamaV2's: a running
        step is waited for, and is the last one.
        """
        for cache in self.exkv.caches:
            cache.revoke("model.unload", wait=True)
        self.exkv.unload()
        self._only_placed = False

    # Forward ------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        cache: ExLlamaV2CacheBase | Sequence[ExLlamaV2CacheBase] | None = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: object = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: threading.Event | None = None,
        cpu_logits: bool = False,
        **kwargs: Any,
    ) -> Tensor | None:
        """Run tokens through the model, after those that the cache holds.

        Args:
            input_ids: int64 (B, T), left-padded if rows differ in length.
            cache: stores their keys and values; or a list of caches, one per row.
            input_mask: (B, columns since the cache was empty), below 0 at padding, as made by
                ``tokenizer.padding_mask``. Padding must come first in its row; it is neither
                stored nor attended to.
            preprocess_only: fill the cache; no logits.
            last_id_only: only the logits of each row's last token.
            position_offsets: (B, 1), minus each row's padding; must agree with the mask.
            abort_event: checked between chunks of ``config.max_input_len`` tokens.
            cpu_logits: gather the logits in host memory.
            loras: an ``ExLlamaV2Lora``, or a list with one.

        Returns:
            Logits (B, T or 1, vocabulary) in the model's dtype, 0 at padding; None with
            ``preprocess_only``, or after an abort.

        Raises:
            ValueError: an unsupported argument, padding elsewhere, or as
                :meth:`exkv.Model.forward` does.
        """
        refuse_arguments("model.forward", return_last_state=return_last_state)
        adapter = adapter_of(self, loras)
        _refuse_others(kwargs)
        if input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)}: give (rows, tokens), at least one token"
            )
        only_last = preprocess_only or last_id_only
        most = self.config.max_output_len
        if most is not None and not only_last and input_ids.shape[1] > most:
            raise ValueError(
                f"{input_ids.shape[1]} tokens, but config.max_output_len is {most}: set "
                "last_id_only or preprocess_only, or pass fewer"
            )
        pads = padding(input_mask, position_offsets)
        run = partial(
            self._forward,
            preprocess_only=preprocess_only,
            last_id_only=last_id_only,
            adapter=adapter,
        )
        if cache is not None and not isinstance(cache, ExLlamaV2CacheBase):
            logits = _row_by_row(run, input_ids, cache, pads)
        elif abort_event is None:
            logits = run(input_ids, cache, pads)
        else:
            parts: list[Tensor | None] = []
            for part in input_ids.split(self.config.max_input_len, 1) if cache else [input_ids]:
                if abort_event.is_set():
                    return None
                parts.append(run(part, cache, pads))
            logits = _joined(parts[-1:] if last_id_only else parts, dim=1)
        return logits.cpu() if cpu_logits and logits is not None else logits

    __call__ = forward

    def _forward(
        self,
        input_ids: Tensor,
        cache: ExLlamaV2CacheBase | None,
        pads: Sequence[int] | None,
        preprocess_only: bool,
        last_id_only: bool,
        adapter: str | None,
    ) -> Tensor | None:
        """Call exkv's forward once, with right-padded rows."""
        held = 0 if cache is None else cache.current_seq_len
        if cache is not None:
            pads = cache.agreed_padding(pads, len(input_ids))
        width = input_ids.shape[1]
        new = new_tokens(width, pads or [0] * len(input_ids), held)
        padded = min(new) < width
        logits = self.exkv.forward(
            to_right_padding(input_ids, new) if padded else input_ids,
            None if cache is None else cache.exkv,
            new_lens=new,
            preprocess_only=preprocess_only,
            last_id_only=last_id_only,
            adapter=adapter,
        )
        assert logits is None or isinstance(logits, Tensor)  # no ForwardOutput was asked for
        if cache is not None and pads is not None:
            cache.pads = tuple(pads)
        if logits is None or last_id_only or not padded:
            return logits
        return to_left_padding(logits, new, width)


def _row_by_row(
    run: Callable[..., Tensor | None],
    input_ids: Tensor,
    caches: Sequence[ExLlamaV2CacheBase],
    pads: Sequence[int] | None,
) -> Tensor | None:
    """One call per row, each with its own cache."""
    if len(caches) != len(input_ids) or pads is not None and any(pads):
        raise ValueError(
            f"{len(caches)} caches for {len(input_ids)} rows: give one per row, and no padding"
        )
    rows = zip(input_ids.split(1), caches, strict=True)
    return _joined([run(ids, each, None) for ids, each in rows], dim=0)


class _Places(dict[int, str]):
    """A read-only map of layers to devices."""

    def __setitem__(self, layer: int, device: str) -> None:
        raise TypeError(
            f"layer {layer} can't be moved to {device!r} by cache_map: a cache is on its layer's "
            "device, so use load(gpu_split) or set_device_map"
        )


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    logits = [part for part in parts if part is not None]
    return torch.cat(logits, dim) if logits else None


def _refuse_others(given: dict[str, Any]) -> None:
    for name in given:
        if name not in ARGUMENTS:
            raise TypeError(f"model.forward has no argument {name!r}")
    refuse_arguments("model.forward", **given)


__getattr__ = missing_from(__name__)

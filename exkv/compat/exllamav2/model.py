"""``ExLlamaV2``: a model in ExLlamaV2's words over :class:`exkv.Model`, which is its ``exkv``."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
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
from .gone import ARGUMENTS, Adapter, check_kind, missing_from, refuse_arguments
from .loras import adapter_of
from .rows import new_tokens, padding, to_left_padding, to_right_padding

_GB = 1 << 30


class ExLlamaV2(Adapter):
    """A model over several devices.

    Attributes:
        config: as it was given; what is set there later counts at the next load.
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
        """Decoder layer -> name of its device, for the layers that are placed; to be read only."""
        return _Places({layer: str(device) for layer, device in self.exkv.cache_map.items()})

    def set_cache_map(self) -> None:
        """Without effect: :attr:`cache_map` always says where the layers are."""

    def get_cache_devices(self) -> list[str]:
        """The devices of decoder layers, in the model's order."""
        return list(dict.fromkeys(self.cache_map.values()))

    def set_device_map(self, allocation: Sequence[float], embed_cpu: bool = True) -> list[float]:
        """Place the layers by a split in GB (2**30 bytes), without reading them.

        A later ``load`` places them anew; a forward call without one reads each layer on demand.

        Returns:
            GB that are left of each device's share.

        Raises:
            ValueError, PlacementError: as :meth:`exkv.Model.load`.
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
        """Load with a split in GB by hand; None or ``[]`` for what is free on all devices.
        ``load`` does it at once; ``load_gen`` is a generator of what ``callback_gen`` yields.

        A split is of weights and workspace, as in ExLlamaV2, and caches take what they need beside
        it; in :meth:`exkv.Model.load`, whose arguments and errors are the same, they count.
        ``stats`` is without effect, as there.
        """
        self._begin()
        plan = self._plan(gpu_split)
        yield from self.exkv.load_gen(
            None, lazy, False, callback, callback_gen, plan=plan, progress=progress
        )

    load = finished(load_gen)

    def _plan(self, gpu_split: Sequence[float] | None) -> Plan | None:
        """Units by a split that counts no caches; then with all caches, and without the split."""
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
        """Load over the devices, the cache counted in, whether it is lazy or not. Arguments and
        errors as of :meth:`exkv.Model.load_autosplit`, but ``last_id_only``, which is without
        effect: where there is no room for the logits of many tokens, they are made in slices."""
        check_kind("cache", cache, ExLlamaV2CacheBase)
        self._begin()
        only_last = True if self.config.max_output_len == 1 else None
        yield from self.exkv.load_autosplit_gen(
            cache.exkv, reserve_vram, only_last, callback, callback_gen, progress=progress
        )

    load_autosplit = finished(load_autosplit_gen)

    def _begin(self) -> None:
        """Before placement: undo ``set_device_map``, and apply the settings."""
        if self._only_placed:
            self.exkv.unload()
            self._only_placed = False
        if not self.exkv.loaded:
            self.exkv.max_input_len = self.config.max_input_len
            self.exkv.embed_cpu = True

    def unload(self) -> None:
        """Free all memory, that of the caches too. The model can be loaded again.

        An asynchronous generator makes its steps in another thread, where ExLlamaV2's makes them
        between two awaits: one that runs is waited for, and is its last.
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
            input_ids: int64 (B, T), padded on the left where rows differ.
            cache: where their keys and values go; or a list of caches, one for each row.
            input_mask: (B, columns since the cache was empty), below 0 at padding, as
                ``tokenizer.padding_mask`` makes it. Padding must come first in its row; it is
                neither stored nor seen.
            preprocess_only: fill the cache; no logits.
            last_id_only: logits of each row's last token only.
            position_offsets: (B, 1), minus each row's padding; says nothing that the mask doesn't.
            abort_event: looked at between chunks of ``config.max_input_len`` tokens.
            cpu_logits: gather the logits in host memory.
            loras: an ``ExLlamaV2Lora``, or a list with one.

        Returns:
            Logits (B, T or 1, vocabulary) in the model's dtype, 0 at padding; None with
            ``preprocess_only``, or where it was aborted.

        Raises:
            ValueError: an argument that isn't taken here, padding elsewhere, and what
                :meth:`exkv.Model.forward` raises it for.
        """
        refuse_arguments("model.forward", return_last_state=return_last_state)
        adapter = adapter_of(self, loras)
        _refuse_others(kwargs)
        if input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError(
                f"input_ids are {tuple(input_ids.shape)}: give (rows, tokens), with a token or more"
            )
        only_last = preprocess_only or last_id_only
        most = self.config.max_output_len
        if most is not None and not only_last and input_ids.shape[1] > most:
            raise ValueError(
                f"{input_ids.shape[1]} tokens, and config.max_output_len is {most}: ask for "
                "last_id_only or preprocess_only, or pass fewer"
            )
        pads = padding(input_mask, position_offsets)
        if cache is not None and not isinstance(cache, ExLlamaV2CacheBase):
            logits = self._row_by_row(
                input_ids, cache, pads, preprocess_only, last_id_only, adapter
            )
        elif abort_event is None:
            logits = self._forward(input_ids, cache, pads, preprocess_only, last_id_only, adapter)
        else:
            parts: list[Tensor | None] = []
            for part in input_ids.split(self.config.max_input_len, 1) if cache else [input_ids]:
                if abort_event.is_set():
                    return None
                parts.append(
                    self._forward(part, cache, pads, preprocess_only, last_id_only, adapter)
                )
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
        """One call of exkv's forward, with rows padded on the right."""
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
        self,
        input_ids: Tensor,
        caches: Sequence[ExLlamaV2CacheBase],
        pads: Sequence[int] | None,
        preprocess_only: bool,
        last_id_only: bool,
        adapter: str | None,
    ) -> Tensor | None:
        """One call for each row, which has a cache of its own."""
        if len(caches) != len(input_ids) or pads is not None and any(pads):
            raise ValueError(
                f"{len(caches)} caches for {len(input_ids)} rows: give one for each, and no padding"
            )
        rows = zip(input_ids.split(1), caches, strict=True)
        parts = [
            self._forward(ids, each, None, preprocess_only, last_id_only, adapter)
            for ids, each in rows
        ]
        return _joined(parts, dim=0)


class _Places(dict[int, str]):
    """A read-only map of layers to devices."""

    def __setitem__(self, layer: int, device: str) -> None:
        raise TypeError(
            f"layer {layer} can't be put on {device!r} by cache_map: a cache lies where its layer "
            "does, so use load(gpu_split) or set_device_map"
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

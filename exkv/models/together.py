"""Decoder layers that follow each other on one device, in one native call.

A decode step of a small model spends a tenth of its time between the calls of its layers. Layers
of the plainest make, over a cache of the plainest make, need nothing of Python between them. Which
these are is looked for once an epoch: see ``exkv.epochs``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from exkv import epochs
from exkv.batch import Batch
from exkv.cache import KVCache
from exkv.cache.layer import CacheLayer
from exkv.layers import PlainModule, are_few
from exkv.ops import has_kernel

from .decoder import DecoderLayer
from .units import Unit


@dataclass(kw_only=True, eq=False)
class Run:
    """Layers that one call may run, with what it takes of them.

    Attributes:
        units, stores: among which they are, the model's and the cache's.
        settings: what all of them have in common; see :func:`_settings`.
        count: how many they are.
        weights, biases, stored, windows: as the op ``decoder_layers`` takes them.
        lasting: whether all changes of what this came from advance the epoch.
        held: the number by which the native side holds the layers, once they were called.
    """

    units: Sequence[Unit]
    stores: Sequence[CacheLayer]
    settings: tuple[Any, ...]
    count: int = 0
    weights: list[torch.Tensor] = field(default_factory=list)
    biases: list[torch.Tensor | None] = field(default_factory=list)
    stored: list[torch.Tensor] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    lasting: bool = True
    held: torch.Tensor | None = None

    def add(self, layer: DecoderLayer, stored: Sequence[torch.Tensor]) -> None:
        norms, maps = layer.parts_in_order
        # Where nn.Module keeps them: see PlainModule.
        self.weights += [part._parameters["weight"] for part in (*norms, *maps)]
        self.biases += [part._parameters["bias"] for part in maps]
        self.stored += stored
        self.windows.append(layer.self_attn.params.window)
        self.count += 1
        parts = (layer, layer.self_attn, layer.mlp, *norms, *maps)
        self.lasting &= all(isinstance(part, PlainModule) and part.watched for part in parts)

    def is_for(self, units: Sequence[Unit], x: torch.Tensor, kept: KVCache) -> bool:
        return self.units is units and self.stores is kept.layers and self.settings[0] == x.dtype

    def release(self) -> None:
        """Let go of all tensors; it is not called again."""
        for tensors in (self.weights, self.biases, self.stored):
            tensors.clear()
        held, self.held = self.held, None
        if held is not None:
            torch.ops.exkv.release_layers(held)

    def __del__(self) -> None:
        self.release()

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x (B, T, hidden) -> the same after these layers."""
        _, rotary, head_dim, eps, scale, softcap, act = self.settings
        rows = (batch.past_lens, batch.lengths.kv_len, *batch.rotary[rotary])
        tensors = (self.weights, self.biases, self.stored)
        numbers = (head_dim, eps, scale, self.windows, softcap, act)
        if not self.lasting or _is_watched():
            return torch.ops.exkv.decoder_layers(x, *tensors, *rows, *numbers)
        if self.held is None:
            self.held = torch.ops.exkv.hold_layers(*tensors, *numbers)
        return torch.ops.exkv.held_layers(x, self.held, *rows)


class Runs:
    """The runs of a model's units over its caches that were found in this epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._found: weakref.WeakKeyDictionary[KVCache, dict[int, Run]]
        self._found = weakref.WeakKeyDictionary()

    def find(
        self,
        units: Sequence[Unit],
        first: int,
        x: torch.Tensor,
        batch: Batch,
        kept: KVCache | None,
    ) -> Run | None:
        """The units from the first on, as many as one call may run for x (B, T, hidden), which
        lies where the first does; None for none."""
        if kept is None or units[first].spec.layer is None:
            return None
        if batch.lengths.ragged or not are_few(x):
            return None
        epoch = epochs.current()
        if self._epoch != epoch:
            self._found.clear()
            self._epoch = epoch
        run = self._found.setdefault(kept, {}).get(first)
        if run is not None and run.is_for(units, x, kept):
            return run
        run = _find(units, first, x, batch, kept)
        if run is not None and run.lasting:
            epochs.bind(run, epoch)
            self._found[kept][first] = run
        return run


def _find(
    units: Sequence[Unit], first: int, x: torch.Tensor, batch: Batch, kept: KVCache
) -> Run | None:
    if not _has_kernel(x.device.type):
        return None
    run: Run | None = None
    for unit in units[first:]:
        if unit.device != x.device or not _is_plain(unit):
            break
        settings = _settings(unit.module, x.dtype)
        stored = kept.layers[unit.spec.layer].at_hand(x.dtype, batch)
        if run is None and stored:
            run = Run(units=units, stores=kept.layers, settings=settings)
        elif not stored or len(stored) * run.count != len(run.stored) or settings != run.settings:
            break
        run.add(unit.module, stored)
    return run


def _is_watched() -> bool:
    """Whether somebody wants to see what an op writes to."""
    return _get_current_dispatch_mode() is not None or torch.compiler.is_compiling()


@cache
def _has_kernel(device_type: str) -> bool:
    return has_kernel("decoder_layers", device_type)


def _is_plain(unit: Unit) -> bool:
    """Whether it is a layer that the op knows, and nobody is to be told of its call."""
    layer = unit.module
    if not isinstance(layer, DecoderLayer) or not layer.plain:
        return False
    wrapped = "forward" in vars(layer)  # as accelerate's hooks do it
    return not (wrapped or layer._forward_hooks or layer._forward_pre_hooks)


def _settings(layer: DecoderLayer, dtype: torch.dtype) -> tuple[Any, ...]:
    """What the op takes once for all layers, behind the dtype of their input."""
    attention, params = layer.self_attn, layer.self_attn.params
    eps, act = layer.input_layernorm.eps, layer.mlp.act
    return dtype, params.rotary, attention.head_dim, eps, params.scale, params.softcap, act

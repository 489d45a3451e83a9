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
from exkv.layers.descriptions import Layer, try_describe
from exkv.layers.linear import has_global_hooks
from exkv.ops import has_kernel
from exkv.ops.layer import NETWORK_ACTS

from .units import Unit

#: Tokens of a call, in all rows, for which a call from Python is worth saving.
FEW_TOKENS = 16


@dataclass(kw_only=True, eq=False)
class Run:
    """Layers that one call may run, with what it takes of them.

    Attributes:
        units, stores: among which they are, the model's and the cache's.
        settings: what all of them have in common; see :func:`_settings`.
        count: how many they are.
        weights, biases, stored, windows: as the op ``decoder_layers`` takes them.
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
    held: torch.Tensor | None = None

    def add(self, layer: Layer, stored: Sequence[torch.Tensor]) -> None:
        attention, mlp = layer.attention, layer.mlp
        projections = [attention.query, attention.key, attention.value, attention.output]
        projections += [mlp.gate, mlp.up, mlp.down]
        self.weights += [norm.weight for norm in (layer.before_attention, layer.before_mlp)]
        self.weights += [projection.weight for projection in projections]
        self.biases += [projection.bias for projection in projections]
        self.stored += stored
        self.windows.append(attention.params.window)
        self.count += 1

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
        if _is_watched():
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
        if has_global_hooks() or batch.lengths.ragged or x.shape[0] * x.shape[1] > FEW_TOKENS:
            return None
        epoch = epochs.current()
        if self._epoch != epoch:
            self._found.clear()
            self._epoch = epoch
        run = self._found.setdefault(kept, {}).get(first)
        if run is not None and run.is_for(units, x, kept):
            return run
        run = _find(units, first, x, batch, kept)
        if run is not None:
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
        layer = try_describe(unit.module) if unit.device == x.device and unit.module else None
        settings = _settings(layer, x.dtype) if isinstance(layer, Layer) else None
        if settings is None:
            break
        stored = kept.layers[unit.spec.layer].at_hand(x.dtype, batch)
        if run is None and stored:
            run = Run(units=units, stores=kept.layers, settings=settings)
        elif not stored or len(stored) * run.count != len(run.stored) or settings != run.settings:
            break
        run.add(layer, stored)
    return run


def _is_watched() -> bool:
    """Whether somebody wants to see what an op writes to."""
    return _get_current_dispatch_mode() is not None or torch.compiler.is_compiling()


@cache
def _has_kernel(device_type: str) -> bool:
    return has_kernel("decoder_layers", device_type)


def _settings(layer: Layer, dtype: torch.dtype) -> tuple[Any, ...] | None:
    """What the op takes once for all layers, behind the dtype of their input; None for a layer
    that it does not know."""
    attention, params = layer.attention, layer.attention.params
    first, second = layer.before_attention, layer.before_mlp
    others = (layer.after_attention, layer.after_mlp, attention.query_norm, attention.key_norm)
    if any(others) or first.offset or second.offset or first.eps != second.eps:
        return None
    if layer.mlp.act not in NETWORK_ACTS:
        return None
    numbers = (attention.head_dim, first.eps, params.scale, params.softcap)
    return dtype, params.rotary, *numbers, layer.mlp.act

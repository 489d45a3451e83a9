"""The loss of each layer with keys, or values, in fewer bits: measured once like the weights'
losses, in the same unit, and stored in the file of ``exkv.loading.losses``.

The text's tokens attend to each other through a cache of this layer in fewer bits. One such output,
with both in 4 bits, passes through all following units, which gives the layer's divergence of
next-token probabilities; the other formats' losses follow from it by the ratio of squared errors.
Without a text the loss is the share of squares that rounding normally distributed keys and values
loses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from exkv.cache import Cache, CacheLayer, LayerSpec, make_layers
from exkv.cache.presets import BITS_BY_HEAD
from exkv.cache.stored_bits import SIDES, CacheLosses, storage_of
from exkv.checkpoint import Checkpoint, ModelConfig
from exkv.devices import CPU
from exkv.models import Transformer, Unit
from exkv.ops.kv_formats import FORMATS

from .losses import Errors, TextLosses, begin, ids_of, kept_as, opened, relative
from .measured_file import digest

#: The pair whose output is followed: its error is well above float32's, and small enough to grow
#: as its square.
_FOLLOWED = "4/4"


def cache_losses_of(model: Transformer, text: str | None = None) -> CacheLosses:
    """The loss of each layer in each cache format; arguments and errors as of
    ``exkv.loading.losses.losses_of``."""
    checkpoint = None if text is None else opened(model)
    if checkpoint is None:
        return _by_storage(model)
    with checkpoint:
        assert text is not None
        ids = ids_of(model.config, text)

        def measured() -> CacheLosses:
            begin(model, checkpoint)
            return CacheTextLosses(model.config, checkpoint, ids).measured_caches()

        return kept_as(
            model,
            checkpoint.fingerprint,
            f"cache by text {digest(ids)}",
            measured,
            lambda values: _checked(CacheLosses(values), model),
            lambda found: found.units,
        )


def _checked(found: CacheLosses, model: Transformer) -> CacheLosses:
    """Validate figures read from a file; raises ValueError, or Python's own errors for malformed
    ones, unless they are for this model's caches."""
    if found.units.keys() != _by_storage(model).units.keys():
        raise ValueError(f"it is for {', '.join(map(str, found.units))}")
    for unit, lost in found.units.items():
        if set(lost) != set(SIDES):
            raise ValueError(f"for {unit} it has {', '.join(map(str, lost))}")
        if not all(isinstance(n, float) and 0 <= n < math.inf for n in lost.values()):
            raise ValueError(f"a loss of {unit} isn't a number of at least 0")
    return found


def _by_storage(model: Transformer) -> CacheLosses:
    """Losses without a text: what formats lose of normally distributed values."""
    specs = Cache.layer_specs(model)
    units = {}
    for unit in model.units:
        if unit.spec.layer is None or specs[unit.spec.layer].state is not None:
            continue
        sides = _alone(specs[unit.spec.layer])
        share = len(BITS_BY_HEAD[1:]) / len(sides)  # of keys and values in all squares
        lost = {side: share * _stored_loss(f"int{side[1:]}") for side in sides}
        units[unit.name] = dict.fromkeys(SIDES, 0.0) | lost
    return CacheLosses(units)


def _alone(spec: LayerSpec) -> dict[str, str]:
    """Side -> the storage in which that side alone has fewer bits; both where keys are values."""
    keys, values = ({f"{side}{bits}": bits for bits in BITS_BY_HEAD[1:]} for side in "kv")
    if spec.values_are_keys:
        return {side: f"{bits}/{bits}" for side, bits in keys.items()}
    pairs = {side: f"{bits}/16" for side, bits in keys.items()}
    return pairs | {side: f"16/{bits}" for side, bits in values.items()}


@functools.cache
def _stored_loss(name: str) -> float:
    """The share of squares that a format loses, for heads of 128."""
    format = FORMATS[name]
    x = torch.randn(1, 256, 4, 128, generator=torch.Generator().manual_seed(0))
    return float((format.widen(format.encode(x), x.dtype) - x).square().sum() / x.square().sum())


class CacheTextLosses(TextLosses):
    """Runs a text through the units, and through their caches."""

    followed = _FOLLOWED

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, ids: Sequence[int]) -> None:
        super().__init__(config, checkpoint, ids)
        self._specs = Cache.layer_specs(self.model, len(ids))

    def measured_caches(self) -> CacheLosses:
        found = self.scaled().items()
        alone = {name: each.unit for name, each in found if SIDES[0] in each.unit}
        return CacheLosses({n: {side: lost[side] for side in SIDES} for n, lost in alone.items()})

    def of_unit(
        self, unit: Unit, module: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[Errors, torch.Tensor | None]:
        layer = unit.spec.layer
        if layer is None or self._specs[layer].state is not None:
            return Errors(unit={self.followed: 0.0}), None
        errors = dict.fromkeys(SIDES, 0.0)
        for side, pair in _alone(self._specs[layer]).items():
            errors[side] = relative(self._cached(layer, module, x, pair), y)
        found = self._cached(layer, module, x, self.followed)
        errors[self.followed] = relative(found, y)
        return Errors(unit=errors), found

    def _cached(self, layer: int, module: nn.Module, x: torch.Tensor, pair: str) -> torch.Tensor:
        """The layer's output for the text, whose tokens attend to each other as the cache stores
        them."""
        spec = replace(self._specs[layer], storage=storage_of(pair)).alone
        store: CacheLayer = make_layers([spec])[0]
        store.allocate(CPU, spec.capacity)
        return self.run(module, x, store)

"""What planning needs of a model, as an immutable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from exkv.cache.stored_bits import CacheLosses
from exkv.checkpoint import ModelConfig
from exkv.layers import RotaryTables
from exkv.models import Transformer, Unit
from exkv.models.adapters import Adapter
from exkv.models.units import quantized_anew
from exkv.weights.choice import Choice, Losses
from exkv.weights.on_load import BEST, METHOD, with_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """A model's config, units and options.

    Attributes:
        units: for their shapes and bytes; not loaded.
        rotary: tables shared by all shapes of one model.
        chunks, embed_cpu: as of :class:`Transformer`.
        max_input_len: tokens of a chunk.
        adapters: the loaded adapters by name.
        elsewhere: indices of units in other processes.
        choice: the weight format chosen for each unit, or None.
        losses: returns the formats to choose from and their losses, measured at the first call;
            None if there is no choice.
        units_kept: returns the units with the weight formats of a choice.
        usage: returns the share of tokens that choose each expert, by unit; None if it isn't known.
        cache_losses: returns what fewer bits of a cache lose, measured at the first call; None if
            nothing is known.
    """

    config: ModelConfig
    dtype: torch.dtype
    units: tuple[Unit, ...]
    rotary: RotaryTables
    chunks: tuple[int, ...]
    max_input_len: int
    embed_cpu: bool | None
    adapters: Mapping[str, Adapter]
    elsewhere: frozenset[int]
    choice: Choice | None
    losses: Callable[[], Losses | None]
    units_kept: Callable[[Choice], tuple[Unit, ...]]
    usage: Callable[[], Mapping[str, tuple[float, ...]] | None]
    cache_losses: Callable[[], CacheLosses | None]

    @classmethod
    def of(cls, model: Transformer | ModelShape) -> ModelShape:
        if isinstance(model, ModelShape):
            return model
        return cls(**{each.name: getattr(model, each.name) for each in fields(cls)})

    def chosen(self, choice: Choice) -> ModelShape:
        """With the weight formats of a choice, and nothing left to choose."""
        return replace(self, units=self.units_kept(choice), choice=choice, losses=lambda: None)

    def with_host_experts(self, experts: Mapping[str, frozenset[int]]) -> ModelShape:
        """With these experts, by unit, in host memory while their units are elsewhere.

        Raises:
            ValueError: a unit that the model doesn't have, or an expert that the unit doesn't.
        """
        if unknown := experts.keys() - {unit.name for unit in self.units}:
            raise ValueError(f"the model has no unit {min(unknown)} with experts in host memory")
        units = (_apart(unit, experts.get(unit.name, frozenset())) for unit in self.units)
        return replace(self, units=tuple(units))

    @property
    def on_load(self) -> str | None:
        """What float weights become on load, one of ``exkv.weights.on_load.INTEGERS``; None where
        they stay, are stored otherwise, or differ from unit to unit."""
        quantization = self.config.quantization or {}
        weights = quantization.get("weights")
        on_load = quantization.get("quant_method") == METHOD and isinstance(weights, str)
        return weights if on_load and weights != BEST else None

    def quantized(self, weights: str) -> ModelShape:
        """With float weights quantized to integers on load."""
        stored = replace(self.config, quantization=None) if self.on_load else self.config
        transform = (self.config.quantization or {}).get("transform") if self.on_load else None
        config = with_weights(stored, weights, transform)
        specs = quantized_anew((unit.spec for unit in self.units), config, self.dtype)
        units = tuple(Unit(index, spec) for index, spec in enumerate(specs))
        return replace(self, config=config, units=units)


def _apart(unit: Unit, experts: frozenset[int]) -> Unit:
    """The unit with these experts in host memory, unloaded; itself where it is so already."""
    if unit.host_experts == experts:
        return unit
    changed = Unit(unit.index, unit.spec)
    changed.put_on_host(experts)
    return changed

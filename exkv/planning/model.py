"""A model as a plan sees it: a value, of which other values are made to plan by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from exkv.checkpoint import ModelConfig
from exkv.layers import RotaryTables
from exkv.models import Transformer, Unit
from exkv.models.adapters import Adapter
from exkv.models.units import unit_specs
from exkv.weights.choice import Choice, Losses
from exkv.weights.on_load import with_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """What a plan needs of a model; nothing of it is loaded.

    Attributes:
        units: of which shapes and bytes count.
        rotary: the same tables for all that is made of one model.
        chunks, embed_cpu: as of :class:`Transformer`.
        max_input_len: the chunk that calls have now.
        adapters: that calls may choose, by name.
        elsewhere: the indices of units that other processes hold.
        choice: what was chosen for the weights of each unit, or None.
        losses: what there is to choose from, measured when it is first asked for; None for nothing.
        units_kept: the units with their weights kept by a choice.
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

    @classmethod
    def of(cls, model: Transformer | ModelShape) -> ModelShape:
        if isinstance(model, ModelShape):
            return model
        return cls(**{each.name: getattr(model, each.name) for each in fields(cls)})

    def chosen(self, choice: Choice) -> ModelShape:
        """With the weights kept by a choice; there is nothing left to choose."""
        return replace(self, units=self.units_kept(choice), choice=choice, losses=lambda: None)

    def quantized(self, weights: str) -> ModelShape:
        """A model of float weights, kept as integers."""
        config = with_weights(self.config, weights)
        units = tuple(Unit(i, each) for i, each in enumerate(unit_specs(config, self.dtype)))
        return replace(self, config=config, units=units)

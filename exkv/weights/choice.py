"""What a plan may choose for the weights of each unit, and what it has chosen.

The loss of a unit is the KL divergence of the model's next-token probabilities on a text when this
unit alone is kept so, in nats a token (without a text: the squared error of its weights, as a share
of their squares). Divergence grows as the square of a small error, and errors of unlike layers are
as good as independent, so that losses add up: a plan makes the sum over all units small. Within a
layer the same holds for its matrices, of which each class (``on_load.class_of``) has its own loss;
those of all classes kept alike add up to the unit's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .on_load import options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What there is to choose from.

    Attributes:
        units: unit's name -> one of ``on_load.OPTIONS`` -> loss, 0 for weights as they are stored.
        matrices: unit's name -> class of its matrices -> option -> loss, for units that may be
            mixed; their losses add up to those of ``units``.
    """

    units: Mapping[str, Mapping[str, float]]
    matrices: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    def of(self, unit: str, kept: str) -> float:
        """What a unit loses that is kept in one of the options, or in a mix."""
        options = options_of(kept)
        if isinstance(options, str):
            return self.units[unit][options]
        return sum(self.matrices[unit][name][option] for name, option in options.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the options for every unit.

    Attributes:
        kept: unit's name -> one of ``on_load.OPTIONS``, or a mix.
        loss: unit's name -> what it loses by that.
        gap: the share of the losses' sum that another choice of the options could save at most.
    """

    kept: Mapping[str, str]
    loss: Mapping[str, float]
    gap: float = 0.0

    @classmethod
    def of(cls, losses: Losses, kept: Mapping[str, str]) -> Choice:
        return cls(kept=kept, loss={unit: losses.of(unit, option) for unit, option in kept.items()})

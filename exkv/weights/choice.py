"""The options for the weights of each unit with their losses, and what a plan has chosen.

The loss of a unit is the KL divergence of the model's next-token probabilities on a text when only
this unit is quantized, in nats a token (without a text: the relative squared error of its weights).
Divergence grows with the square of a small error, and errors of different layers are nearly
independent, so that losses add up: a plan minimizes the sum over all units. The same holds for the
matrices of a layer, by classes (``on_load.class_of``): their losses in one option add up to the
unit's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .on_load import ALL_OPTIONS, options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of all options.

    Attributes:
        units: name of a unit -> one of ``on_load.ALL_OPTIONS`` -> loss, 0 for weights as stored.
        matrices: name of a unit -> class of its matrices -> option -> loss, for units that may be
            mixed; the losses add up to those of ``units``.
    """

    units: Mapping[str, Mapping[str, float]]
    matrices: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """The options whose losses are known, in the order of ``on_load.ALL_OPTIONS``."""
        return known(set().union(*self.units.values()))

    def of(self, unit: str, kept: str) -> float:
        """Loss of a unit in one of the options, or in a mix."""
        options = options_of(kept)
        if isinstance(options, str):
            return self.units[unit][options]
        return sum(self.matrices[unit][name][option] for name, option in options.items())


def known(options: Collection[str]) -> tuple[str, ...]:
    """These options in the order of ``on_load.ALL_OPTIONS``."""
    return tuple(option for option in ALL_OPTIONS if option in options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice for every unit.

    Attributes:
        kept: name of a unit -> one of ``on_load.ALL_OPTIONS``, or a mix.
        loss: name of a unit -> its loss.
        gap: upper bound on the share of the total loss that another choice could save.
    """

    kept: Mapping[str, str]
    loss: Mapping[str, float]
    gap: float = 0.0

    @classmethod
    def of(cls, losses: Losses, kept: Mapping[str, str]) -> Choice:
        return cls(kept=kept, loss={unit: losses.of(unit, option) for unit, option in kept.items()})

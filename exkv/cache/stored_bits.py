"""Bits of each layer's keys and values, as a plan chooses them: the possible pairs, and the loss of
each (``exkv.planning.best``, ``exkv.loading.cache_losses``)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .presets import BITS_BY_HEAD, storage_of_bits
from .spec import LayerSpec
from .storage import Storage

#: Bits of keys and of values, as in "8/4", in descending order.
PAIRS = tuple(f"{k}/{v}" for k, v in itertools.product(BITS_BY_HEAD, repeat=2))
#: The pair without rounding.
EXACT = PAIRS[0]
#: Keys or values alone in fewer bits.
SIDES = tuple(f"{side}{bits}" for side in "kv" for bits in BITS_BY_HEAD[1:])


def bits_of(pair: str) -> tuple[int, int]:
    """Bits of keys and of values."""
    keys, _, values = pair.partition("/")
    return int(keys), int(values)


def storage_of(pair: str) -> Storage:
    return storage_of_bits(*bits_of(pair))


def pairs_of(spec: LayerSpec) -> tuple[str, ...]:
    """The pairs that a layer may have; equal ones only if values are keys."""
    alike = (pair for pair in PAIRS if len({*bits_of(pair)}) == 1)
    return tuple(alike) if spec.values_are_keys else PAIRS


@dataclass(frozen=True, slots=True)
class CacheLosses:
    """Losses from storing a cache in fewer bits.

    Attributes:
        units: name of a unit whose layer has keys and values -> one of ``SIDES`` -> loss, as
            ``exkv.weights.choice`` counts it. Losses of keys and values add up, and so do layers'.
    """

    units: Mapping[str, Mapping[str, float]]

    def of(self, unit: str, pair: str) -> float:
        """Loss of a unit's layer with this pair; 0 if it has no keys and values."""
        lost = {"k16": 0.0, "v16": 0.0, **self.units.get(unit, dict.fromkeys(SIDES, 0.0))}
        keys, values = bits_of(pair)
        return lost[f"k{keys}"] + lost[f"v{values}"]

    def alike(self, pair: str) -> float:
        """Loss of all layers with this pair."""
        return sum(self.of(unit, pair) for unit in self.units)


def described(pairs: Sequence[str]) -> str:
    """Describe the layers' pairs, as in "8/8 (layers 0-3, 5), 8/4 (4)"."""
    found: dict[str, list[str]] = {}
    for pair, group in itertools.groupby(range(len(pairs)), key=lambda layer: pairs[layer]):
        layers = list(group)
        if pair:
            ends = sorted({layers[0], layers[-1]})
            found.setdefault(pair, []).append("-".join(map(str, ends)))
    words = [f"{pair} ({', '.join(layers)})" for pair, layers in found.items()]
    return ", ".join(words).replace("(", "(layers ", 1)

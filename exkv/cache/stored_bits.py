"""How many bits the keys and the values of each layer have, where a plan chooses: the pairs that a
layer may have, and what each loses (``exkv.planning.best``, ``exkv.loading.cache_losses``)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .presets import BITS_BY_HEAD, storage_of_bits
from .spec import LayerSpec
from .storage import Storage

#: Of keys and of values, as in "8/4"; those of most bits first.
PAIRS = tuple(f"{k}/{v}" for k, v in itertools.product(BITS_BY_HEAD, repeat=2))
#: Nothing is rounded.
EXACT = PAIRS[0]
#: Each side alone in fewer bits.
SIDES = tuple(f"{side}{bits}" for side in "kv" for bits in BITS_BY_HEAD[1:])


def bits_of(pair: str) -> tuple[int, int]:
    """Of keys and of values."""
    keys, _, values = pair.partition("/")
    return int(keys), int(values)


def storage_of(pair: str) -> Storage:
    return storage_of_bits(*bits_of(pair))


def pairs_of(spec: LayerSpec) -> tuple[str, ...]:
    """What a layer may have; where values are keys, as many bits of both."""
    alike = (pair for pair in PAIRS if len({*bits_of(pair)}) == 1)
    return tuple(alike) if spec.values_are_keys else PAIRS


@dataclass(frozen=True, slots=True)
class CacheLosses:
    """What fewer bits of a cache lose.

    Attributes:
        units: name of a unit whose layer has keys and values -> one of ``SIDES`` -> loss, as
            ``exkv.weights.choice`` counts it. Those of keys and values add up, and so do layers'.
    """

    units: Mapping[str, Mapping[str, float]]

    def of(self, unit: str, pair: str) -> float:
        """Of a unit's layer with this pair; 0 for one without keys and values."""
        lost = {"k16": 0.0, "v16": 0.0, **self.units.get(unit, dict.fromkeys(SIDES, 0.0))}
        keys, values = bits_of(pair)
        return lost[f"k{keys}"] + lost[f"v{values}"]

    def alike(self, pair: str) -> float:
        """Of all layers with this pair."""
        return sum(self.of(unit, pair) for unit in self.units)


def described(pairs: Sequence[str]) -> str:
    """Pairs layer by layer in words, such as "8/8 (layers 0-3, 5), 8/4 (4)"."""
    found: dict[str, list[str]] = {}
    for pair, group in itertools.groupby(range(len(pairs)), key=lambda layer: pairs[layer]):
        layers = list(group)
        if pair:
            ends = sorted({layers[0], layers[-1]})
            found.setdefault(pair, []).append("-".join(map(str, ends)))
    words = [f"{pair} ({', '.join(layers)})" for pair, layers in found.items()]
    return ", ".join(words).replace("(", "(layers ", 1)

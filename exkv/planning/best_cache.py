"""``--cache best``: keys and values in 16 to 2 bits, chosen layer by layer so that the loss is
least and everything fits; together with ``weights="best"``, the least loss of both.

The loss of fewer bits is known by layer and side (``exkv.loading.cache_losses``), and adds up. A
unit's options are those of its weights times its layer's pairs of bits, thinned to the Pareto front
of bytes and loss (``search.knapsack.front``); ``search.choose`` then finds the best choice for all
units. As with weights, the choice is checked against its own ledger. All layers get the same pair
if it doesn't fit, or if layers can't be chosen apart: with a draft beside the model, and where
layers attend to others' keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exkv.cache import CACHES
from exkv.cache.stored_bits import EXACT, PAIRS, bits_of, described, pairs_of

from .best import as_chosen, in_fewest_bits, settled, weight_options, weights_loss
from .fitting import fitted, smallest
from .model import ModelShape
from .plan import UnitCost
from .scenario import Scenario, Workload
from .search.choose import least_lossy_units
from .search.knapsack import Item, front
from .solve import least_lossy
from .workspace import CacheShape

#: Most options of a unit that are considered.
_MOST_POINTS = 65
#: Kinds of cache whose bits are chosen; in the second, sliding layers keep only their window.
KINDS = ("fp16", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCache:
    """The chosen cache.

    Attributes:
        scenario: with the chosen caches, and the chosen weights where they were open.
        kind: of cache, or None for the scenario's own.
        pairs: of bits, one per layer of the first model's cache; "" for a layer without keys and
            values. Empty where the kind decides.
        loss: of caches and weights together, where it is known.
    """

    scenario: Scenario
    kind: str | None
    pairs: tuple[str, ...]
    loss: float

    @property
    def cache(self) -> CacheShape:
        """The first model's cache."""
        return self.scenario.workloads[0].promise.caches[0]

    @property
    def name(self) -> str:
        """Name of the kind of cache; "by layer" if it has none."""
        alike = set(filter(None, self.pairs))
        if self.kind is not None and alike <= {EXACT}:
            return self.kind
        named = {"8/8": "8bit", "4/4": "4bit", "2/2": "2bit"} if self.kind != KINDS[1] else {}
        return named.get(alike.pop(), "by layer") if len(alike) == 1 else "by layer"

    def __str__(self) -> str:
        if self.name != "by layer":
            return self.name
        windows = ", and the window alone where layers slide" if self.kind == KINDS[1] else ""
        return f"by layer, keys/values of {described(self.pairs)} bits{windows}"

    def values(self) -> dict[str, Any]:
        """For JSON: the name, and bits by layer as :class:`exkv.QuantizedCache` takes them."""
        bits = [bits_of(pair or EXACT) for pair in self.pairs]
        sides = zip(("key_bits", "value_bits"), zip(*bits, strict=True), strict=False)
        return {"cache": self.name, **{side: list(each) for side, each in sides}}


def known(scenario: Scenario) -> bool:
    """Whether the loss of fewer cache bits is known for every model."""
    return all(workload.model.cache_losses() for workload in scenario.workloads)


def best_kind(scenario: Scenario) -> BestCache | None:
    """The best among caches that keep every token that a layer sees, on its device; None where
    nothing fits. If losses aren't known, the first of ``BY_LOSS`` that fits."""
    if not known(scenario):
        name = least_lossy(scenario)
        if name is None:
            return None
        of_kind = scenario.as_kind(CACHES[name])
        return BestCache(scenario=of_kind, kind=name, pairs=(), loss=0.0)
    kinds = KINDS if any(map(_slides, scenario.workloads)) else KINDS[:1]
    found = []
    for name in kinds:
        if (best := best_bits(scenario.as_kind(CACHES[name]))) is not None:
            found.append(replace(best, kind=name))
        if found and found[0].loss == 0:
            break
    return min(found, key=lambda best: best.loss, default=None)


def _slides(workload: Workload) -> bool:
    config = workload.model.config
    return any(map(config.slides, range(config.num_hidden_layers)))


def best_bits(scenario: Scenario) -> BestCache | None:
    """The best choice of bits for the scenario's own kind of cache; None where nothing fits. If
    losses aren't known, the most bits that fit, the same for all layers."""
    if any(workload.model.losses() for workload in scenario.workloads):
        least = fitted(scenario, lambda way: in_fewest_bits(in_fewest_bits_of_caches(way)).fits())
        return _best_in(least)
    found = [best for way in smallest(scenario) if (best := _best_in(way)) is not None]
    if not found:
        return None
    best = min(found, key=lambda best: best.loss)
    return replace(best, scenario=settled(_with_bits_of(scenario, best)))  # in calls that fit


def _best_in(scenario: Scenario) -> BestCache | None:
    """The best choice of bits with the scenario's calls as they are."""
    if not known(scenario):
        return _best_uniform(scenario, [pair for pair in PAIRS if len({*bits_of(pair)}) == 1])
    return _by_layer(scenario) or _best_uniform(scenario, _by_loss(scenario))


def _by_loss(scenario: Scenario) -> list[str]:
    """Pairs of bits, the least lossy first."""
    return sorted(_pairs(scenario.workloads[0]), key=lambda pair: _uniform_loss(scenario, pair))


def _uniform_loss(scenario: Scenario, pair: str) -> float:
    """Summed loss with this pair in all layers of all models; 0 where it isn't known."""
    losses = (workload.model.cache_losses() for workload in scenario.workloads)
    return sum(each.alike(pair) for each in losses if each is not None)


def _with_bits_of(scenario: Scenario, best: BestCache) -> Scenario:
    """The scenario with the cache bits that were chosen for another."""
    first, *others = scenario.workloads
    stored = {layer: pair for layer, pair in enumerate(best.pairs) if pair}
    if not (others and stored):
        return replace(scenario, workloads=(first.stored(stored), *others))
    return _with_uniform_pair(scenario, next(iter(stored.values())))


def _layers(workload: Workload) -> dict[str, int]:
    """Unit name -> layer index, for units whose layers have keys and values."""
    stored = workload.promise.caches[0].layers
    units = workload.model.units
    named = {unit.name: unit.spec.layer for unit in units if unit.spec.layer is not None}
    return {name: layer for name, layer in named.items() if stored[layer].spec.state is None}


def _pairs(workload: Workload) -> tuple[str, ...]:
    """Pairs of bits that a layer may have, most bits first."""
    layers = _layers(workload).values()
    specs = [workload.promise.caches[0].layers[layer].spec for layer in layers]
    return pairs_of(specs[0]) if specs else (EXACT,)


def _uniform_pairs(workload: Workload, pair: str) -> dict[int, str]:
    """This pair for every layer."""
    return dict.fromkeys(_layers(workload).values(), pair)


def _with_uniform_pair(scenario: Scenario, pair: str) -> Scenario:
    return scenario.each(lambda workload: workload.stored(_uniform_pairs(workload, pair)))


def in_fewest_bits_of_caches(scenario: Scenario) -> Scenario:
    return _with_uniform_pair(scenario, PAIRS[-1])


def _best_uniform(scenario: Scenario, pairs: Sequence[str]) -> BestCache | None:
    """The best with one of these pairs for all layers of all models. The first pair loses least,
    but if weights are open, a later one may lose less together with them."""
    found: list[BestCache] = []
    for pair in pairs:
        lost = _uniform_loss(scenario, pair)
        if found and lost >= min(best.loss for best in found):
            break
        tried = settled(_with_uniform_pair(scenario, pair))
        if tried.fits():
            stored = _uniform_pairs(tried.workloads[0], pair)
            found.append(_best(tried, stored, lost + weights_loss(tried)))
    return min(found, key=lambda best: best.loss, default=None)


def _best(scenario: Scenario, stored: Mapping[int, str], loss: float) -> BestCache:
    count = len(scenario.workloads[0].promise.caches[0].layers)
    pairs = tuple(stored.get(layer, "") for layer in range(count))
    return BestCache(scenario=scenario, kind=None, pairs=pairs, loss=loss)


# Layer by layer ---------------------------------------------------------------------------------


def _by_layer(scenario: Scenario) -> BestCache | None:
    """The best choice layer by layer; None where layers can't be chosen apart, or it doesn't
    fit."""
    (first, *others), layers = scenario.workloads, _layers(scenario.workloads[0])
    if others or any(first.model.config.reads(layer) is not None for layer in layers.values()):
        return None
    if first.model.losses() is None:
        costs = first.costs(first.peaks(scenario.budgets), scenario.home)
        of_weights = [[cost] for cost in costs]
    else:
        whole, mixes = weight_options(first, scenario)
        of_weights = mixes or whole
    of_caches = _cache_options(first, scenario)
    options = list(map(_options_of_both, of_weights, of_caches))
    chosen = least_lossy_units(options, scenario.budgets, scenario.order)
    if chosen is None:
        return None
    stored = {layers[cost.name]: cost.stored for cost in chosen if cost.stored is not None}
    found = scenario
    if first.model.losses() is not None:
        found = as_chosen(scenario, 0, [_without_cache(cost, first.model) for cost in chosen])
    found = replace(found, workloads=(found.workloads[0].stored(stored),))
    if not found.fits():
        return None
    return _best(found, stored, sum(cost.loss for cost in chosen))


def _without_cache(cost: UnitCost, model: ModelShape) -> UnitCost:
    """The cost with the loss of its weights alone."""
    losses = model.cache_losses()
    assert losses is not None, "known"
    lost = 0.0 if cost.stored is None else losses.of(cost.name, cost.stored)
    return replace(cost, loss=cost.loss - lost)


def _cache_options(workload: Workload, scenario: Scenario) -> list[list[UnitCost]]:
    """Each unit's ledger lines for every pair of bits of its layer's keys and values; unchanged for
    a unit without a cache."""
    losses, layers, pairs = workload.model.cache_losses(), _layers(workload), _pairs(workload)
    assert losses is not None, "known"
    ways = []
    for pair in pairs:
        there = workload.stored(_uniform_pairs(workload, pair))
        ways.append((there, there.peaks(scenario.budgets)))
    sizes = frozenset[int]().union(*(there.allocated_sizes(peaks) for there, peaks in ways))
    costs = [there.costs(peaks, scenario.home, sizes) for there, peaks in ways]
    return [
        [
            replace(cost, stored=pair, loss=losses.of(cost.name, pair))
            for pair, cost in zip(pairs, of_unit, strict=True)
        ]
        if of_unit[0].name in layers
        else [of_unit[0]]
        for of_unit in zip(*costs, strict=True)
    ]


def _options_of_both(
    of_weights: Sequence[UnitCost], of_cache: Sequence[UnitCost]
) -> list[UnitCost]:
    """A unit's options over both; the workspace is the larger of the two."""
    if len(of_cache) == 1:
        return list(of_weights)
    exact = of_cache[0]
    weights = Item(
        np.array([cost.weights for cost in of_weights]), np.array([c.loss for c in of_weights])
    )
    cache = Item(
        np.array([cost.cache + cost.host_cache for cost in of_cache]),
        np.array([cost.loss for cost in of_cache]),
    )
    _, chosen = front([weights, cache], _MOST_POINTS)
    return list(_combined(of_weights, of_cache, chosen, exact))


def _combined(
    of_weights: Sequence[UnitCost],
    of_cache: Sequence[UnitCost],
    chosen: Sequence[Sequence[int]],
    exact: UnitCost,
) -> Iterator[UnitCost]:
    for one, other in chosen:
        made, stored = of_weights[one], of_cache[other]
        both = (made, stored)
        yield replace(
            made,
            cache=stored.cache,
            host_cache=stored.host_cache,
            traffic=made.traffic + stored.traffic - exact.traffic,
            segments=max(cost.segments for cost in both),
            workspace={k: max(cost.workspace[k] for cost in both) for k in made.workspace},
            reserved={k: max(cost.reserved[k] for cost in both) for k in made.reserved},
            stored=stored.stored,
            loss=made.loss + stored.loss,
        )

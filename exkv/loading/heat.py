"""The loss of a layer's experts in fewer bits, by how often they are chosen: the counts of
``exkv.loading.usage`` split the losses of ``exkv.loading.losses`` and ``calibrated_losses`` by
groups of experts (``exkv.weights.expert_groups``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exkv.models import Transformer
from exkv.models.units import UnitSpec
from exkv.weights.choice import Losses
from exkv.weights.expert_groups import by_heat, groups_of
from exkv.weights.on_load import BITS

from .losses import has_its_own


def with_usage(
    losses: Losses, model: Transformer, usage: Mapping[str, tuple[float, ...]] | None
) -> Losses:
    """Split losses into hot and cold experts in units whose usage is known and uneven; the losses
    of other units are unchanged."""
    uneven = {unit: each for unit, each in (usage or {}).items() if len(groups_of(each)) > 1}
    if not uneven:
        return losses
    specs = model.specs_kept(next(iter(BITS)))
    matrices = dict(losses.matrices)
    if not matrices and all(map(has_its_own, specs)):
        whole = {unit for unit, lost in losses.units.items() if len(lost) > 1}
        whole &= uneven.keys()
        matrices = {s.name: _by_size(s, losses.units[s.name]) for s in specs if s.name in whole}
    apart = {unit: by_heat(matrices[unit], uneven[unit]) for unit in uneven.keys() & matrices}
    return replace(losses, matrices=matrices | apart)


def _by_size(spec: UnitSpec, lost: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Split a unit's losses over classes of its matrices, in proportion to their weights."""
    numbers = {
        name: sum(spec.shapes[f"{path}.codes"].numel() for path in paths)
        for name, paths in spec.classes.items()
    }
    total = sum(numbers.values())
    return {
        name: {option: each * count / total for option, each in lost.items()}
        for name, count in numbers.items()
    }

"""``plan_device_map``: place every block of a transformers model, with its cache and workspace.

``measuring.py`` measures the blocks; exkv's planner places them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from exkv.caching_allocator import LARGE, SMALL, Rules
from exkv.devices import allocator_rules
from exkv.planning import Budget, Plan, UnitCost, make_budgets
from exkv.planning.budgets import Devices, Sizes
from exkv.planning.reserved import shared_bytes
from exkv.planning.search.placement import place_units

from .measuring import Promise, Unit, measured


def plan_device_map(
    model: PreTrainedModel | PretrainedConfig,
    *,
    max_seq_len: int,
    batch_size: int = 1,
    max_input_len: int | None = None,
    encoder_len: int | None = None,
    cache: str = "dynamic",
    cache_config: Mapping[str, Any] | None = None,
    cross_cache: str = "dynamic",
    cross_config: Mapping[str, Any] | None = None,
    devices: Devices | None = None,
    reserve: Sizes | None = None,
    objective: str = "pack",
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Plan a map from module to device, for ``from_pretrained(device_map=...)`` or accelerate's
    ``dispatch_model``.

    GPUs are planned by what they reserve: transformers allocates parameters one by one.

    It holds for ``HFCache(config, cache, max_seq_len=max_seq_len, **cache_config)`` (for an
    encoder-decoder, as the first of an ``EncoderDecoderCache``, with ``HFCache(config, cross_cache,
    **cross_config)`` as the second), for calls of up to ``max_input_len`` tokens per row, and for
    the attention "exkv", or transformers' default if the model has its own kinds. Modules that
    share a tensor are placed on one device. A model of images and text is planned for text.

    Args:
        model: loaded or not, or its config.
        max_seq_len: tokens per row; for an encoder-decoder, of the decoder.
        max_input_len: tokens per row of one call; None for all, or, for an encoder-decoder's
            decoder, for the first four.
        encoder_len: tokens of an encoder's input; None for ``max_seq_len``. The number of features
            follows from the config.
        cache: kind of cache, with the settings of ``cache_config``.
        cross_cache: kind of the cache for an encoder's keys, with ``cross_config``.
        devices, reserve: see ``exkv.planning.make_budgets``.
        objective: see ``Model.load``: "pack", "balance", "fewest".
        dtype: of the weights; None for the config's, or float32.

    Raises:
        PlacementError: it doesn't fit; the error says where, and by how much.
        ValueError: transformers can't build the model from its config, its code can't run on
            shapes, or a setting is invalid.
    """
    config = model if isinstance(model, PretrainedConfig) else model.config
    if dtype is None and isinstance(model, PreTrainedModel):
        dtype = model.dtype
    promise = Promise(
        max_seq_len=max_seq_len,
        batch_size=batch_size,
        max_input_len=max_input_len,
        encoder_len=encoder_len,
        cache=cache,
        cache_config=cache_config or {},
        cross_cache=cross_cache,
        cross_config=cross_config or {},
    )
    budgets = make_budgets(devices, reserve=reserve)
    units, plan = plan_blocks(config, promise, budgets, objective=objective, dtype=dtype)
    return map_of(units, plan)


def config_of(folder: Path) -> PretrainedConfig:
    """Read a folder's config.json with transformers, and its errors."""
    return AutoConfig.from_pretrained(folder)


def plan_blocks(
    config: PretrainedConfig,
    promise: Promise,
    budgets: Sequence[Budget],
    *,
    objective: str = "pack",
    dtype: torch.dtype | None = None,
) -> tuple[list[Unit], Plan]:
    """Measure the model's units and place them; arguments and errors are those of
    :func:`plan_device_map`."""
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    kinds = {budget.device.type for budget in budgets}
    first = next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu")
    units = measured(config, dtype, promise, first)
    return units, place_units(_costs(units, budgets), budgets, objective=objective)


def _costs(units: Sequence[Unit], budgets: Sequence[Budget]) -> list[UnitCost]:
    kinds = {budget.device.type for budget in budgets}
    rules = {kind: found for kind in kinds if (found := allocator_rules(kind))}
    one = next(iter(rules.values()), None)
    opened = _open_segments(units, one) if one else 0
    costs: list[UnitCost] = []
    for unit in units:
        weights = sum(unit.tensors.values())
        costs.append(
            UnitCost(
                name=unit.name,
                weights=weights,
                cache=unit.cache,
                workspace=dict.fromkeys(kinds, unit.workspace),
                segments=_shared(unit, one) - weights - unit.cache if one else 0,
                reserved=dict.fromkeys(rules, unit.reserved + opened),
                traffic=weights + unit.cache,
            )
        )
    return costs


def _open_segments(units: Sequence[Unit], rules: Rules) -> int:
    """Bytes of partly filled segments: with weights, which transformers allocates one by one; with
    caches, which are allocated during calls; and with what one call left and the next doesn't fit
    into, since transformers doesn't retry calls."""
    weights = (nbytes for unit in units for nbytes in unit.tensors.values())
    caches = (nbytes for unit in units for nbytes in unit.caches)
    left = SMALL, LARGE - 1  # one segment of each kind
    return sum(map(rules.open_segments, (weights, caches, left)))


def _shared(unit: Unit, rules: Rules) -> int:
    """Bytes reserved for a unit, which shares segments with similar ones."""
    weights = tuple(nbytes for nbytes in unit.tensors.values() if nbytes)
    return shared_bytes(weights, rules) + sum(map(rules.share, unit.caches))


def map_of(units: Sequence[Unit], plan: Plan) -> dict[str, str]:
    """Module -> device."""
    where: dict[str, str] = {}
    for unit, placed in zip(units, plan.units, strict=True):
        where |= dict.fromkeys((unit.name, *unit.follows), str(placed.device))
    return where

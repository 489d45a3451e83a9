"""``plan_device_map``: where every block of a transformers model goes, cache and workspace counted.

``measuring.py`` says what each block takes; exkv's planner does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from exkv.planning import Budget, Plan, UnitCost, make_budgets
from exkv.planning.budgets import Devices, Sizes
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
    """Module -> device, for ``from_pretrained(device_map=...)`` or accelerate's
    ``dispatch_model``.

    It is good for ``HFCache(config, cache, max_seq_len=max_seq_len, **cache_config)`` (of an
    encoder-decoder as the first of an ``EncoderDecoderCache``, with ``HFCache(config, cross_cache,
    **cross_config)`` as the second), calls of up to ``max_input_len`` tokens a row, and the
    attention "exkv".

    Args:
        model: loaded or not, or its config.
        max_seq_len: tokens of a row; of an encoder-decoder, of its decoder.
        max_input_len: tokens that one call brings a row; None for all, of an encoder-decoder for
            the four or fewer with which its decoder begins.
        encoder_len: tokens that an encoder takes; None for ``max_seq_len``. Of features the config
            tells the number.
        cache: kind of cache, with the settings of ``cache_config``.
        cross_cache: of what an encoder-decoder keeps of its encoder's output.
        devices, reserve: as of ``exkv.planning.make_budgets``.
        objective: as of ``Model.load``: "pack", "balance", "fewest".
        dtype: of the weights; None for the config's, or float32.

    Raises:
        PlacementError: it does not fit; the error says where, and by how much.
        ValueError: a model that transformers can't build from its config, or a setting that makes
            no sense.
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
    """What transformers reads from a folder's config.json; its errors are transformers' own."""
    return AutoConfig.from_pretrained(folder)


def plan_blocks(
    config: PretrainedConfig,
    promise: Promise,
    budgets: Sequence[Budget],
    *,
    objective: str = "pack",
    dtype: torch.dtype | None = None,
) -> tuple[list[Unit], Plan]:
    """The model's units, and where each goes; arguments and errors as of
    :func:`plan_device_map`."""
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    kinds = {budget.device.type for budget in budgets}
    first = next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu")
    units = measured(config, dtype, promise, first)
    return units, place_units(_costs(units, budgets), budgets, objective=objective)


def _costs(units: Sequence[Unit], budgets: Sequence[Budget]) -> list[UnitCost]:
    kinds = {budget.device.type for budget in budgets}
    costs: list[UnitCost] = []
    holder: dict[int, int] = {}  # tensor -> the last unit that has it
    for index, unit in enumerate(units):
        # Units on a device follow each other: of those with one tensor on a device the last has it.
        shared: dict[int, int] = {}
        for key, nbytes in unit.tensors.items():
            if key in holder:
                shared[holder[key]] = shared.get(holder[key], 0) + nbytes
            holder[key] = index
        weights = sum(unit.tensors.values())
        costs.append(
            UnitCost(
                name=unit.name,
                weights=weights,
                cache=unit.cache,
                workspace=dict.fromkeys(kinds, unit.workspace),
                traffic=weights + unit.cache,
                shared=shared,
            )
        )
    return costs


def map_of(units: Sequence[Unit], plan: Plan) -> dict[str, str]:
    """Module -> device."""
    placed = {unit.name: str(unit.device) for unit in plan.units}
    first = placed[units[0].name]
    return {**placed, **dict.fromkeys(units[0].follows, first)}

"""Architectures by the name in config.json; a file is imported when its name is met."""

from __future__ import annotations

import importlib

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.families import FAMILIES

from .units import UnitSpec

#: ``architectures[0]`` of config.json -> module of this package; the table is the families'.
ARCHITECTURES = {name: family.module for name, family in FAMILIES.items()}


def unit_specs(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the config's architecture, in the order in which a token passes them.

    Raises:
        ValueError: the architecture has no file here.
    """
    module = ARCHITECTURES.get(config.architecture)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(
            f"{config.path or 'the config'}: architecture {config.architecture!r} is not "
            f"supported; known are: {known}"
        )
    return importlib.import_module(f"{__package__}.{module}").units(config, dtype)

"""Architectures, one file each: its layers and its :class:`exkv.checkpoint.families.Family`.

``transformer`` runs a model, ``units`` are its parts.
"""

import importlib
import pkgutil

from exkv.checkpoint.families import FAMILIES, Family

from .transformer import Transformer
from .units import Unit, UnitSpec, unit_specs

for _file in pkgutil.iter_modules(__path__):
    for _value in vars(importlib.import_module(f"{__name__}.{_file.name}")).values():
        if isinstance(_value, Family):
            FAMILIES[_value.architecture] = _value

__all__ = ["Transformer", "Unit", "UnitSpec", "unit_specs"]

"""Architectures: ``registry`` finds one by name, ``transformer`` runs it."""

from .registry import ARCHITECTURES
from .transformer import Transformer
from .units import Unit, UnitSpec

__all__ = ["ARCHITECTURES", "Transformer", "Unit", "UnitSpec"]

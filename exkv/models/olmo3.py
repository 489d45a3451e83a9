"""OLMo 3 (OLMo team, 2025): an OLMo 2 with a window on three of four layers, which rotate by
unscaled positions; the config says so layer by layer."""

from .olmo2 import units

__all__ = ["units"]

"""Gemma 3, text only (Gemma Team, 2025): Gemma 2's layers with norms over heads in place of
soft-caps, five with a window to one without, and rotary positions of their own for the five."""

from __future__ import annotations

import torch

from exkv.checkpoint import ModelConfig

from .gemma2 import GemmaLayer, gemma_norm, gemma_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    head_norm = gemma_norm(config, dtype)
    return gemma_units(config, dtype, lambda index: GemmaLayer(config, dtype, index, head_norm))

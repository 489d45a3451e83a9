"""Gemma 3, text only (Gemma Team, 2025): Gemma 2's layers with norms over heads in place of
soft-caps, five with a window to one without, and rotary positions of their own for the five."""

from __future__ import annotations

import torch

from exkv.checkpoint import GemmaConfig, ModelConfig

from .decoder import SandwichLayer, rms_norm
from .gemma2 import gemma_layer, gemma_units
from .units import UnitSpec


def units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    """The units of the model, in order."""
    head_norm = rms_norm(config, dtype, offset=True)

    def layer(index: int) -> SandwichLayer:
        return gemma_layer(config, dtype, index, head_norm)

    softcap = config.settings(GemmaConfig).final_logit_softcapping
    return gemma_units(config, dtype, layer, softcap)

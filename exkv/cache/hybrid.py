"""Caches that keep of each layer what its attention will ever look at.

Nothing is lost: a layer with a sliding window never sees what its ring has forgotten. Only going
back (``trim``, ``crop``, another prompt) beyond what a ring holds costs a prefill.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .base import CacheOwner, LayerSpec
from .full import Cache
from .retention import Window


class HybridCache(Cache):
    """Full precision; layers with a sliding window (``config.layer_types``) keep that window."""

    @classmethod
    def layer_specs(
        cls,
        model: CacheOwner,
        max_seq_len: int = -1,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> list[LayerSpec]:
        config = model.config
        return [
            replace(spec, retention=Window(config.sliding_window)) if config.slides(i) else spec
            for i, spec in enumerate(super().layer_specs(model, max_seq_len, batch_size, dtype))
        ]

"""A layer with both attention and a state of fixed size (Falcon-H1, Zamba).

The state is transformers' own; keys and values are exkv's.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch

from exkv.cache import LayerSpec

from .layer import HFLayer
from .versions import LinearAttentionCacheLayerMixin, LinearAttentionLayer


class HFHybridLayer(HFLayer, LinearAttentionLayer):
    """Keys and values, and a state; operations on rows or tokens apply to both. ``family.py`` makes
    subclasses.

    Args:
        number_of_states: number of convolution and recurrent states of the layer.
        others: see :class:`HFLayer`.
    """

    file_type = "HFHybridLayer"
    device: Any = None  # of the states

    def __init__(self, template: LayerSpec, number_of_states: int, **others: Any) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states)
        super().__init__(template, **others)

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        """Allocate keys and values if given by position, or states if by name, as transformers
        does."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            super().lazy_initialization(*keys_and_values)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # an attribute there
        states = LinearAttentionCacheLayerMixin.is_croppable.fget(self)  # type: ignore[attr-defined]
        return states and super().is_croppable

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Crop both.

        Raises:
            RuntimeError: there is a recurrent state, which can't go back.
        """
        LinearAttentionLayer.crop(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, cast(torch.LongTensor, beam_idx))
        super().reorder_cache(beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFHybridLayer:
        other = super().__deepcopy__(memo)
        assert isinstance(other, HFHybridLayer)
        for name, value in vars(LinearAttentionLayer(self.number_of_states)).items():
            if isinstance(value, dict):
                setattr(other, name, copy.deepcopy(getattr(self, name), memo))
        return other

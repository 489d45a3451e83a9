"""A layer with attention and a state of one size side by side (Falcon-H1, Zamba).

The state is transformers' own; keys and values are exkv's.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch

from exkv.cache import LayerSpec

from .layer import HFLayer
from .versions import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


class HFHybridLayer(HFLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]  # bases
    """Both at once; what changes rows or tokens changes both.

    (transformers' two bases type ``device`` and ``dtype`` unlike each other.)

    Args:
        number_of_states: convolution and recurrent states of the layer.
        others: as of :class:`HFLayer`.
    """

    is_compileable = False

    def __init__(self, template: LayerSpec, number_of_states: int, **others: Any) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states)
        HFLayer.__init__(self, template, **others)

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        """Of keys and values by position, or of states by name, as transformers asks for it."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            HFLayer.lazy_initialization(self, *keys_and_values)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # an attribute there
        states = LinearAttentionCacheLayerMixin.is_croppable.fget(self)  # type: ignore[attr-defined]
        return states and HFLayer.is_croppable.fget(self)  # type: ignore[attr-defined]

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        HFLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        """As of both; a recurrent state can't go back.

        Raises:
            RuntimeError: there is one.
        """
        LinearAttentionLayer.crop(self, tokens_to_remove)
        HFLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        HFLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, cast(torch.LongTensor, beam_idx))
        HFLayer.reorder_cache(self, beam_idx)

    def offload(self) -> None:
        HFLayer.offload(self)

    def prefetch(self) -> None:
        HFLayer.prefetch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFHybridLayer:
        other = HFLayer.__deepcopy__(self, memo)
        assert isinstance(other, HFHybridLayer)
        for name, value in vars(LinearAttentionLayer(self.number_of_states)).items():
            if isinstance(value, dict):
                setattr(other, name, copy.deepcopy(getattr(self, name), memo))
        return other

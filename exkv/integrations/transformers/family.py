"""Subclasses of :class:`HFLayer` by what stands in their place in a stock cache.

``isinstance(layer, DynamicSlidingWindowLayer)`` is true of a layer that slides, and so on. They
are virtual subclasses, which inherit nothing: a method of stock layers that exkv's don't have is
missing, and doesn't act on tensors that are not there.
"""

from __future__ import annotations

import functools

from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .hybrid import HFHybridLayer
from .layer import HFLayer
from .static import HFStaticLayer, HFStaticSlidingLayer
from .versions import STOCK_HYBRIDS, BaseQuantizedLayer


class HFDynamicLayer(HFLayer):
    """As a stock ``DynamicLayer``: every token, or what the kind of cache keeps."""


class HFSlidingLayer(HFDynamicLayer):
    """As a stock ``DynamicSlidingWindowLayer``: the model's own window.

    Attributes:
        cumulative_length: tokens of the longest row, including those that were forgotten.
    """

    @property
    def sliding_window(self) -> int:
        return self.window

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]  # an attribute there
        return self.get_seq_length()


class HFQuantizedLayer(HFDynamicLayer):
    """As a stock ``BaseQuantizedLayer``: keys and values are copies, which nobody should write to.

    Attributes:
        cumulative_length: tokens of the longest row.
    """

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]  # an attribute there
        return self.get_seq_length()


class HFQuantizedSlidingLayer(HFQuantizedLayer, HFSlidingLayer):
    """Both."""


_STANDS_FOR: dict[type[HFLayer], type] = {
    HFDynamicLayer: DynamicLayer,
    HFSlidingLayer: DynamicSlidingWindowLayer,
    HFQuantizedLayer: BaseQuantizedLayer,
    HFStaticLayer: StaticLayer,
    HFStaticSlidingLayer: StaticSlidingWindowLayer,
}
for _ours, _stock in _STANDS_FOR.items():
    _stock.register(_ours)  # type: ignore[attr-defined]  # all are abstract base classes


def layer_class(*, slides: bool, static: bool, lossless: bool, hybrid: bool) -> type[HFLayer]:
    """The class for a layer of a cache of a static kind or another, with or without the model's
    window, and with or without states beside keys and values."""
    one: type[HFLayer]
    if static:
        one = HFStaticSlidingLayer if slides else HFStaticLayer
    elif lossless:
        one = HFSlidingLayer if slides else HFDynamicLayer
    else:
        one = HFQuantizedSlidingLayer if slides else HFQuantizedLayer
    return _with_states(one, STOCK_HYBRIDS[static, slides]) if hybrid else one


@functools.cache
def _with_states(one: type[HFLayer], stock: type) -> type[HFLayer]:
    both = type(one.__name__.replace("HF", "HFHybrid"), (HFHybridLayer, one), {})
    stock.register(both)  # type: ignore[attr-defined]
    return both

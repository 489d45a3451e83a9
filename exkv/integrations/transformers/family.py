"""Subclasses of :class:`HFLayer` for the layers of stock caches that they replace.

``isinstance(layer, DynamicSlidingWindowLayer)`` is true for a layer that slides, and so on. They
are virtual subclasses, which inherit nothing: a method that only stock layers have is missing, and
doesn't act on tensors that don't exist.
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
    """Like a stock ``DynamicLayer``: every token, or those that the kind of cache keeps."""


class HFSlidingLayer(HFDynamicLayer):
    """Like a stock ``DynamicSlidingWindowLayer``: the model's own window.

    Attributes:
        cumulative_length: tokens of the longest row, including evicted ones.
    """

    @property
    def sliding_window(self) -> int:
        return self.window

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]  # an attribute there
        return self.get_seq_length()


class HFQuantizedLayer(HFDynamicLayer):
    """Like a stock ``BaseQuantizedLayer``: keys and values are copies; writing to them has no
    effect.

    Attributes:
        cumulative_length: tokens of the longest row.
    """

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]  # an attribute there
        return self.get_seq_length()


class HFQuantizedSlidingLayer(HFQuantizedLayer, HFSlidingLayer):
    """A quantized layer with the model's own window."""


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
    """The class of a layer: with the model's window or not, of a static kind or not, without
    rounding or with it, with states besides keys and values or not."""
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

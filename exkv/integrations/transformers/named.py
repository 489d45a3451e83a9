"""Cache classes of transformers 4.4x and 4.5x, as kinds of :class:`HFCache`.

Hugging Face's guides construct them; :func:`~exkv.integrations.transformers.enable` puts those that
were removed from transformers back. Some were constructed without a config: they learn the model
when ``generate`` is called, and are empty before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from .cache import HFCache, HFQuantizedCache, HFStaticCache

#: Their arguments that an :class:`HFCache` learns from the first keys.
_LEARNT = ("batch_size", "max_batch_size", "device", "layer_device_map", "offload_device")


class QuantizedCacheConfig(dict[str, Any]):
    """Settings of a quantized cache by name: ``nbits``, ``axis_key``, ``q_group_size``, ..."""

    def __init__(self, backend: str = "quanto", **settings: Any) -> None:
        super().__init__(backend=backend, **settings)


class NamedCache(HFCache):
    """Base of the classes below.

    Args:
        config: the model's; None to learn it from ``generate``, after ``enable()``.
        cache_config: settings of the kind, as a mapping.
        settings: those of the kind, and the arguments in transformers: ``max_cache_len``,
            ``dtype``; numbers of rows and devices are ignored, as the first keys determine them.
    """

    kind_here: ClassVar[str]

    def __init__(
        self,
        config: PretrainedConfig | None = None,
        cache_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings = {**(cache_config or {}), **settings}
        self.layers = []
        self._settings = {key: x for key, x in settings.items() if key not in _LEARNT}
        if config is None:
            Cache.__init__(self, layers=[])
            self.kind, self._snapshots = self.kind_here, {}
        else:
            self.learn(config)

    def learn(self, config: PretrainedConfig) -> None:
        """Set the model's config, unless it is known."""
        if not self.layers:
            HFCache.__init__(self, config, self.kind_here, **self._settings)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See transformers' ``Cache.update``.

        Raises:
            ValueError: the model is unknown.
        """
        if not self.layers:
            name = type(self).__name__
            raise ValueError(
                f"this {name} doesn't know its model: make it with {name}(config=model.config, "
                "...), or pass it to generate() after exkv.integrations.transformers.enable()"
            )
        return super().update(*args, **kwargs)


class OffloadedStaticCache(NamedCache, HFStaticCache):
    """A cache of fixed size in host memory."""

    kind_here = "offloaded_static"


class QuantoQuantizedCache(NamedCache, HFQuantizedCache):
    """A cache of few bits."""

    kind_here = "quantized"


class HQQQuantizedCache(QuantoQuantizedCache):
    """The same; exkv has no backends."""


class SinkCache(NamedCache):
    """Keeps the first and the last tokens of a text."""

    kind_here = "sink"

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit: unlike in the guide, prompts needn't be truncated to it."""
        return sys.maxsize


#: Other names -> kinds; a Mamba's states are in transformers' own layers.
_OTHERS = {
    "OffloadedCache": "offloaded",
    "SlidingWindowCache": "hybrid",
    "HybridCache": "hybrid",
    "MambaCache": "dynamic",
}
_CLASSES = (
    *(QuantizedCacheConfig, OffloadedStaticCache, SinkCache),
    *(QuantoQuantizedCache, HQQQuantizedCache),
)
NAMED: dict[str, type] = {each.__name__: each for each in _CLASSES} | {
    name: type(name, (NamedCache,), {"kind_here": kind}) for name, kind in _OTHERS.items()
}

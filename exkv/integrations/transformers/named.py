"""The caches' classes of transformers 4.4x and 4.5x by their names, as kinds of :class:`HFCache`.

Hugging Face's guides build them by hand; :func:`~exkv.integrations.transformers.enable` puts those
that are gone from transformers back there. Some were built without a config: they learn the model
when ``generate`` is called, and before that hold nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from .cache import HFCache, HFQuantizedCache, HFStaticCache

#: What they took and an :class:`HFCache` learns from the first keys.
_LEARNT = ("batch_size", "max_batch_size", "device", "layer_device_map", "offload_device")


class QuantizedCacheConfig(dict[str, Any]):
    """Settings of a quantized cache by name: ``nbits``, ``axis_key``, ``q_group_size``, ..."""

    def __init__(self, backend: str = "quanto", **settings: Any) -> None:
        super().__init__(backend=backend, **settings)


class NamedCache(HFCache):
    """What the classes below share.

    Args:
        config: the model's; None to learn it from ``generate``, under ``enable()``.
        cache_config: settings of the kind, as a mapping.
        settings: those of the kind, and what the class took in transformers: ``max_cache_len``,
            ``dtype``; numbers of rows and devices, which the first keys tell, make no difference.
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
        """The model for which this cache is, unless it is known."""
        if not self.layers:
            HFCache.__init__(self, config, self.kind_here, **self._settings)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As of transformers' caches.

        Raises:
            ValueError: the model is not known.
        """
        if not self.layers:
            name = type(self).__name__
            raise ValueError(
                f"this {name} knows no model yet: build it as {name}(config=model.config, ...), or "
                "pass it to generate() after exkv.integrations.transformers.enable()"
            )
        return super().update(*args, **kwargs)


class OffloadedStaticCache(NamedCache, HFStaticCache):
    """In host memory, of one size."""

    kind_here = "offloaded_static"


class QuantoQuantizedCache(NamedCache, HFQuantizedCache):
    """Of few bits."""

    kind_here = "quantized"


class HQQQuantizedCache(QuantoQuantizedCache):
    """Alike."""


class SinkCache(NamedCache):
    """The first tokens of a text and the last ones."""

    kind_here = "sink"

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Tokens that a prompt may have. The guide cuts prompts to so many; here it needn't."""
        return sys.maxsize


#: Other names -> kinds; transformers' own layers keep the states of a Mamba.
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

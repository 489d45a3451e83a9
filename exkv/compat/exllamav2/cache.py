"""ExLlamaV2's caches over exkv's, which are their ``exkv``.

``current_seq_len`` includes left padding, as in ExLlamaV2. exkv stores no padding, so the cache
remembers each row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch

from exkv import Cache, Cache4bit, Cache8bit, KVCache, Model, QuantizedCache

from .missing import Adapter, missing_from, placeholder, refuse_arguments

if TYPE_CHECKING:
    from .generator.dynamic import ExLlamaV2DynamicGenerator
    from .model import ExLlamaV2

ExLlamaV2Cache_TP = placeholder("ExLlamaV2Cache_TP", __name__)


class ExLlamaV2CacheBase(Adapter):
    """Base class of the caches.

    Args:
        model: loaded or not.
        batch_size: number of rows.
        max_seq_len: capacity of a row in tokens; -1 for ``config.max_seq_len``.
        copy_from: a cache of the same kind to copy.
        lazy: without effect: storage is allocated once the layers' devices are known.

    Attributes:
        exkv: the :class:`exkv.KVCache` that does the work.
        pads: left padding of each row in tokens.
    """

    #: exkv's class, and its arguments.
    kind: ClassVar[type[KVCache] | None] = None
    properties: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        model: ExLlamaV2,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: ExLlamaV2CacheBase | None = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: int | None = None,
    ) -> None:
        name = type(self).__name__
        if self.kind is None:
            raise TypeError(f"{name} is a base class: build an ExLlamaV2Cache")
        refuse_arguments(name, num_key_value_heads=num_key_value_heads, fixed_device=fixed_device)
        if not isinstance(getattr(model, "exkv", None), Model):
            raise TypeError(f"model is a {type(model).__name__}; it must be an ExLlamaV2")
        self.model = model
        self.pads: tuple[int, ...] = ()
        self._holder: ref[ExLlamaV2DynamicGenerator] | None = None
        if copy_from is None:
            length = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
            self.exkv = self.kind(
                model.exkv, length, batch_size, lazy, snapshots=True, **self.properties
            )
        elif type(copy_from) is not type(self) or lazy:
            raise ValueError(
                f"copy_from is a {type(copy_from).__name__} and lazy is {lazy}: a {name} copies "
                "one of its own kind, which can't be lazy"
            )
        else:
            self.exkv, self.pads = copy_from.exkv.clone(), copy_from.pads

    @property
    def max_seq_len(self) -> int:
        return self.exkv.max_seq_len

    @property
    def batch_size(self) -> int:
        return self.exkv.batch_size

    @property
    def dtype(self) -> torch.dtype:
        return self.exkv.dtype

    @property
    def num_hidden_layers(self) -> int:
        return self.model.exkv.config.num_hidden_layers

    @property
    def num_key_value_heads(self) -> int:
        return self.exkv.layers[0].spec.num_heads

    @property
    def head_dim(self) -> int:
        return self.exkv.layers[0].spec.head_dim

    @property
    def has_scales(self) -> bool:
        return not self.exkv.layers[0].spec.storage.lossless

    @property
    def current_seq_len(self) -> int:
        """Filled columns, including padding. Set a smaller value to truncate all rows."""
        return max(held + pad if held else 0 for held, pad in self._rows())

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        if not 0 <= length <= self.current_seq_len:
            raise ValueError(
                f"current_seq_len is {self.current_seq_len} and can't be set to {length}: it can "
                "only be reduced"
            )
        self.exkv.crop([max(length - pad, 0) for _, pad in self._rows()])

    def _rows(self) -> list[tuple[int, int]]:
        """Tokens and padding of each row."""
        pads = (*self.pads, *[0] * self.batch_size)
        return list(zip(self.exkv.seq_lens, pads, strict=False))

    def agreed_padding(self, pads: Sequence[int] | None, rows: int) -> Sequence[int]:
        """Padding of each row: the call's for an empty cache, the remembered one otherwise.

        Raises:
            ValueError: the call's padding differs from the rows' own.
        """
        if not self.current_seq_len:
            return [0] * rows if pads is None else pads
        known = [pad for _, pad in self._rows()[:rows]]
        if pads is not None and list(pads) != known:
            raise ValueError(
                f"rows have {list(pads)} tokens of padding by input_mask, but {known} in the "
                "cache: pass the mask with which they began, or reset() the cache"
            )
        return known

    def take_over(self, holder: ExLlamaV2DynamicGenerator | None) -> None:
        """Lend the cache to a generator, and close a dynamic one that holds it, unless that has
        jobs: then the cache refuses the new one."""
        before = None if self._holder is None else self._holder()
        if before is not None:
            if before.num_remaining_jobs():
                return
            before.exkv.close()
        self._holder = None if holder is None else ref(holder)

    def update_cache_tensors(self) -> None:
        """Allocate the storage of all placed layers that have none."""
        self.exkv.allocate(self.model.exkv.cache_map)

    def reset(self) -> None:
        """Drop all tokens."""
        self.current_seq_len = 0

    def clone(self) -> ExLlamaV2CacheBase:
        """Copy the cache with its tokens."""
        return type(self)(self.model, copy_from=self)

    def all_tensors(self) -> list[torch.Tensor]:
        """The stored tensors, in exkv's own layout."""
        return [tensor for layer in self.exkv.layers for tensor in layer.tensors.values()]

    def footprint(self) -> list[int]:
        """Bytes on each accelerator by index; on the host if there is none."""
        sizes = {device.index or 0: size for device, size in self.exkv.nbytes().items()}
        return [sizes.get(index, 0) for index in range(max(sizes, default=-1) + 1)]


class ExLlamaV2Cache(ExLlamaV2CacheBase):
    """Floats of the model's dtype: :class:`exkv.Cache`."""

    kind = Cache


class ExLlamaV2Cache_8bit(ExLlamaV2CacheBase):
    """int8 with a scale per 32 values (:class:`exkv.Cache8bit`), which loses less than ExLlamaV2's
    truncated floats."""

    kind = Cache8bit


class ExLlamaV2Cache_Q8(ExLlamaV2CacheBase):
    """:class:`exkv.Cache8bit`: 8.5 bits per value."""

    kind = Cache8bit


class ExLlamaV2Cache_Q6(ExLlamaV2CacheBase):
    """8 bits for keys and 4 for values, as in ExLlamaV2: :class:`exkv.QuantizedCache`."""

    kind = QuantizedCache
    properties: ClassVar[dict[str, Any]] = {"key_bits": 8, "value_bits": 4}


class ExLlamaV2Cache_Q4(ExLlamaV2CacheBase):
    """:class:`exkv.Cache4bit`: 5 bits per value."""

    kind = Cache4bit


__getattr__ = missing_from(__name__)

"""Host memory tiers: where unreferenced pages are moved to, and brought back from.

:class:`~exkv.cache.paging.pool.PagePool` tracks which page is where; this module holds one layer's
memory for them. Pages are copied in their stored format on the device's own stream, so the host
does not wait: later work on the device sees the finished copy. Where a tier stores fewer bits, the
host converts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from exkv import devices
from exkv.cache.spec import LayerSpec
from exkv.cache.storage import Layout, Storage

from .growth import HostTier, Paged


class HostPages:
    """One layer's part of a cache's host memory tiers.

    Args:
        spec: the layer's, with ``Paged`` growth.
        device: the layer's, which pages are copied from and to.
    """

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._tensors = self._empty()

    @classmethod
    def of(cls, spec: LayerSpec, device: torch.device) -> HostPages | None:
        """Allocate the layer's tiers; None if it has none."""
        return cls(spec, device) if _tiers(spec) else None

    @staticmethod
    def nbytes(spec: LayerSpec) -> int:
        """Bytes of host memory for a layer of this spec."""
        return sum(
            devices.rounded(math.prod(shape) * dtype.itemsize)
            for tier in _tiers(spec)
            for shape, dtype in _layout(spec, tier).values()
        )

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all tiers."""
        for tier in self._tensors:
            yield from tier.values()

    def store_as(self, spec: LayerSpec) -> None:
        """Switch to another spec; the contents are lost."""
        if spec != self._spec:
            self._spec, self._tensors = spec, []
            self._tensors = self._empty()

    def _empty(self) -> list[dict[str, Tensor]]:
        return [
            devices.zeros(_layout(self._spec, tier), devices.CPU, near=self._device)
            for tier in _tiers(self._spec)
        ]

    def move(self, pool: dict[str, Tensor], page: int, tier: int, to: int, to_tier: int) -> None:
        """Copy ``page`` of one tier to page ``to`` of another; tier 0 is the pool."""
        source, target = (self._tensors[i - 1] if i else pool for i in (tier, to_tier))
        stored, wanted = self._storage(tier), self._storage(to_tier)
        if stored == wanted:
            for name, tensor in target.items():
                tensor[to].copy_(source[name][page], non_blocking=True)
            return
        devices.synchronize(self._device)  # copies to the host must be complete before decoding
        spec = self._spec
        there = {name: x[page : page + 1].to(devices.CPU) for name, x in source.items()}
        k, v = stored.decode(there, spec.dtype, spec.head_dim)
        for name, x in wanted.encode(k, v, spec.dtype).items():
            target[name][to].copy_(x[0])

    def _storage(self, tier: int) -> Storage:
        own = _tiers(self._spec)[tier - 1].storage if tier else None
        return self._spec.storing(own) if own else self._spec.storage


def _tiers(spec: LayerSpec) -> tuple[HostTier, ...]:
    if spec.state is not None or not isinstance(spec.growth, Paged):
        return ()
    return spec.growth.tiers


def _layout(spec: LayerSpec, tier: HostTier) -> Layout:
    assert isinstance(spec.growth, Paged)
    shape = (tier.pages, spec.growth.page, spec.num_heads, spec.head_dim)
    return spec.storing(tier.storage or spec.storage).layout(shape, spec.dtype)

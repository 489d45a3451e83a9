"""The specification of one cache layer: its shape and its four properties; a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from exkv import devices
from exkv.checkpoint import StateTensor

from .arrangement import Arrangement, KVArrangement, OneState, OneStore
from .growth import Growth, Static
from .residence import OnDevice, Residence
from .retention import KeepAll, Retention, Sinks
from .storage import Storage
from .tiers import SinksFirst, TwoTiers

#: The properties of a layer with a state, which is stored as computed.
_OF_STATES = {"storage": Storage(), "retention": KeepAll(), "residence": OnDevice()}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: The four properties: a method that identifies each, and an example.
PROPERTIES = {
    "storage": ("formats", 'Storage(keys="int8", values="int8")'),
    "retention": ("capacity", "Window(1024)"),
    "residence": ("storage_device", "OnHost()"),
    "growth": ("room_for", "Dynamic(256)"),
}


class LayerWindows(Protocol):
    """What a kind of cache needs of a model's config."""

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a sliding layer sees."""

    @property
    def cache_layers(self) -> int:
        """Layers of the cache."""

    def slides(self, layer: int) -> bool:
        """Whether the layer has a sliding window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The shape of shared prefixes: row ``i`` begins with the first ``lens[i]`` tokens of row
    ``rows[i]`` of another cache."""

    rows: tuple[int, ...]
    lens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one layer's storage, B rows of up to S tokens, H_kv heads of D values, and its
    four properties; all combine, except pages with sinks or with recent floats.

    Attributes:
        prefix: shared prefixes of a fork; S counts the tokens after them.
        state: tensors of a row that the layer has in place of keys and values, perhaps none; None
            if it has keys and values. A state has a fixed storage, retention and residence,
            whichever are given.
        beside: index of the decoder layer that has this state beside keys and values, which are
            another cache layer; None if the decoder layer has one cache layer.
        values_are_keys: whether the model's values are its keys (latent attention), so that one
            tensor is stored for both, whichever storage is chosen.
        reads: an earlier layer with the same keys and values, so that one storage serves both on
            the same device; None for keys and values of its own.

    Raises:
        ValueError: a dtype other than float32, float16 and bfloat16, or pages with a property that
            they don't combine with.
        TypeError: an invalid property.
    """

    batch_size: int
    max_seq_len: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    storage: Storage = Storage()
    retention: Retention = KeepAll()
    residence: Residence = OnDevice()
    growth: Growth = Static()
    prefix: Prefix | None = None
    state: tuple[StateTensor, ...] | None = None
    beside: int | None = None
    values_are_keys: bool = False
    reads: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, only in _OF_STATES.items() if self.state is not None else ():
            object.__setattr__(self, name, only)
        if self.dtype not in _DTYPES:
            names = ", ".join(map(str, _DTYPES))
            raise ValueError(f"a cache's dtype is one of {names}, not {self.dtype}")
        for name, (method, example) in PROPERTIES.items():
            value = getattr(self, name)
            if isinstance(value, type) or not hasattr(value, method):
                raise TypeError(f"{name} is {value!r}: it must be a value such as {example}")
        object.__setattr__(self, "storage", self.storing(self.storage))
        _ = self.arrangement  # raises if the growth can't lay it out

    def storing(self, storage: Storage) -> Storage:
        """The storage, adapted to whether the model's values are its keys."""
        if storage.values_are_keys == self.values_are_keys:
            return storage
        return replace(storage, values_are_keys=self.values_are_keys)

    @property
    def alone(self) -> LayerSpec:
        """The spec of the layer by itself, with a storage of its own."""
        return replace(self, reads=None)

    @property
    def arrangement(self) -> Arrangement:
        """Which tensors there are, and where each token is stored."""
        return self.kv if self.state is None else OneState(self.state)

    @property
    def kv(self) -> KVArrangement:
        """The arrangement of keys and values."""
        if not self.storage.recent:
            return self.growth.arranged(OneStore(self.storage, self.retention))
        if isinstance(self.retention, Sinks):
            return self.growth.arranged(SinksFirst(self.storage, self.retention))
        return self.growth.arranged(TwoTiers(self.storage, self.retention.size))

    def is_exact(self, tokens: int) -> bool:
        """Whether a row of ``tokens`` tokens is stored whole and without loss."""
        whole = self.retention.capacity(tokens) == tokens
        return whole and (self.storage.lossless or tokens <= self.storage.recent)

    @property
    def capacity(self) -> int:
        """Tokens of a row at full growth; 1 for a state."""
        return self.kept.capacity(self.max_seq_len) if self.state is None else 1

    @property
    def kept(self) -> Retention:
        """The effective retention: which tokens are stored, whatever queries see of them."""
        return self.growth.kept(self.retention)

    def layout(self, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype of each tensor with room for ``tokens`` tokens a row; the first
        two dimensions are (B, S), or entries for several tokens each."""
        shape = (self.batch_size, tokens, self.num_heads, self.head_dim)
        return self.arrangement.layout(shape, self.dtype)

    def nbytes(self, tokens: int) -> int:
        """Bytes that these tensors take from a device."""
        return sum(
            devices.rounded(math.prod(shape) * dtype.itemsize)
            for shape, dtype in self.layout(tokens).values()
        )


def placed(
    specs: Sequence[LayerSpec], cache_map: Mapping[int, torch.device]
) -> dict[int, torch.device]:
    """Cache layer -> device of its decoder layer, for layers of these specs that are placed."""
    owners = [index if spec.beside is None else spec.beside for index, spec in enumerate(specs)]
    return {index: cache_map[owner] for index, owner in enumerate(owners) if owner in cache_map}

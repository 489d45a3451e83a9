"""Arrangements: which tensors a layer stores, and where a token lies in each. One store, the tiers
of ``tiers.py``, or a state (``state.py``).

Everything that slices a layer's tensors (row moves, files, copies to a device, conversions) asks
the arrangement which entries hold which positions: not every tensor has one entry a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.checkpoint import StateTensor
from exkv.ops.attention import AttentionParams

from .retention import Retention
from .slots import Slots
from .spans import TokenSpan, put_at
from .storage import Layout, Shape, Storage
from .views import Tensors, View


class Arrangement(Protocol):
    """A value: equal arrangements lay tokens out alike."""

    @property
    def group(self) -> int:
        """Tokens of a row that are encoded together."""

    @property
    def alone(self) -> int:
        """First tokens that belong to no group; groups start after them."""

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of each tensor for rows of (B, S, H_kv, D)."""

    def slots(self, name: str, first: int, last: int) -> Slots:
        """Entries of a tensor's second dimension that may hold the tokens at positions ``first`` to
        ``last - 1``: a slice, or indices in the order of positions."""

    def stays(self, longest: int) -> bool:
        """Whether stored tokens stay in place, unchanged and in order, while rows grow to
        ``longest``, so that forks can share them."""

    def in_place(self, common: int, written: int, new: int) -> int:
        """Of the first ``common`` tokens that two rows share, how many need no copying when one row
        becomes the other, of ``new`` tokens; the :meth:`slots` of later tokens are copied.

        Args:
            written: the most tokens that either row has had.
        """

    def lost(self, length: int, kept: int) -> bool:
        """As :meth:`Retention.lost`."""


class KVArrangement(Arrangement, Protocol):
    """Of keys and values."""

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensors:
        """Encode k, v (B, T, H_kv, D) as far as possible without knowing what is stored."""

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        """Store what was encoded. Returns all that was written, for :meth:`write`, and the view
        that the queries of these tokens attend to."""

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        """The view of :meth:`store`, without overwriting what a repeated call needs: for layers
        whose keys and values a later layer stores."""

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        """Repeat the write on another copy of the tensors."""

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Decode k, v (B, N, H_kv, D) of these positions, from host memory. For positions that a
        row does not store, values are arbitrary: those of the nearest stored one, or of whatever is
        in their slot."""

    def put(
        self, stored: Tensors, span: TokenSpan, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        """Inverse of :meth:`read`, on any device."""


@dataclass(frozen=True, slots=True)
class OneStore:
    """Everything that the retention keeps, in one storage."""

    storage: Storage
    retention: Retention
    group: ClassVar[int] = 1
    alone: ClassVar[int] = 0

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return self.storage.layout(shape, dtype)

    def slots(self, name: str, first: int, last: int) -> Slots:
        return self.retention.slots(first, last)

    def stays(self, longest: int) -> bool:
        return self.retention.slots(0, longest).stop == longest

    def in_place(self, common: int, written: int, new: int) -> int:
        return common if self.stays(written) else 0

    def lost(self, length: int, kept: int) -> bool:
        return self.retention.lost(length, kept)

    def encode(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensors:
        return self.storage.encode(k, v, dtype)

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        return new, self.retention.store(stored, new, batch, params)

    def show(self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams) -> View:
        return self.retention.show(stored, new, batch, params)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.retention.write(stored, new, lengths, None)

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        row = torch.arange(len(span.lens)).unsqueeze(-1)
        place = self.retention.place(span.nearest_stored())
        taken = {name: tensor[row, place] for name, tensor in stored.items()}
        return self.storage.decode(taken, dtype, head_dim)

    def put(
        self, stored: Tensors, span: TokenSpan, k: Tensor, v: Tensor, dtype: torch.dtype
    ) -> None:
        place = self.retention.place(span.positions())
        put_at(stored, self.storage.encode(k, v, dtype), place, span.are_stored())


@dataclass(frozen=True, slots=True)
class OneState:
    """The arrangement of a state: one entry a row in each of its tensors, if it has any."""

    tensors: tuple[StateTensor, ...]
    group: ClassVar[int] = 1
    alone: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"a state of {', '.join(map(str, self.tensors)) or 'nothing'}"

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rows = shape[0]
        return {each.name: ((rows, 1, *each.shape), each.dtype or dtype) for each in self.tensors}

    def slots(self, name: str, first: int, last: int) -> slice:
        return slice(0, min(last, 1))

    def stays(self, longest: int) -> bool:
        return not self.tensors

    def in_place(self, common: int, written: int, new: int) -> int:
        return new if common == written == new or not self.tensors else 0

    def lost(self, length: int, kept: int) -> bool:
        return kept < length and bool(self.tensors)

"""Which tensors a layer keeps and where a token lies in each: one store, or those in ``tiers.py``.

Everyone who cuts a layer's tensors (rows that move, files, copies to a device, conversions) asks
here which entries of a tensor hold which positions: not every tensor has one entry a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from exkv.batch import Batch, Lengths
from exkv.ops.attention import AttentionParams

from .retention import Retention
from .slots import Slots
from .spans import TokenSpan, put_at
from .storage import Layout, Shape, Storage
from .views import Tensors, View


class Arrangement(Protocol):
    """A value: two layers with equal ones are arranged alike."""

    @property
    def group(self) -> int:
        """Tokens of a row that are encoded together."""

    @property
    def alone(self) -> int:
        """First tokens that are in no group; groups are counted from behind them."""

    def layout(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """Name -> shape and dtype of each tensor for rows of so many tokens, (B, S, H_kv, D)."""

    def slots(self, name: str, first: int, last: int) -> Slots:
        """Which entries of a tensor's second dimension hold the tokens at positions ``first`` to
        ``last - 1``, at most: a slice, or indices in the order of positions."""

    def stays(self, longest: int) -> bool:
        """Whether what is stored of a token stays as it is while rows grow to this length, and
        lies in order, so that forks can read it where it is."""

    def in_place(self, common: int, written: int, new: int) -> int:
        """How many of the first ``common`` tokens, which two rows have in common, can stay where
        they are when one row becomes like another of ``new`` tokens; the :meth:`slots` of what
        comes after are copied.

        Args:
            written: the most tokens that either row has had.
        """

    def lost(self, length: int, kept: int) -> bool:
        """As :meth:`Retention.lost`."""

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Tensors:
        """k, v (B, T, H_kv, D) as far as they can be encoded before it is known what is stored."""

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        """Keep what was encoded. Returns all that was written, for :meth:`write`, and what the
        queries of these tokens see."""

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        """Write the same once more, elsewhere."""

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v of these positions (B, N, H_kv, D), from host memory; for positions that a row does
        not store, the nearest that it does, or what lies in their place."""

    def put(
        self, stored: Tensors, span: TokenSpan, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """The inverse of :meth:`read`, on any device."""


@dataclass(frozen=True, slots=True)
class OneStore:
    """All that the retention keeps, in one storage."""

    storage: Storage
    retention: Retention

    @property
    def group(self) -> int:
        return 1

    @property
    def alone(self) -> int:
        return 0

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

    def encode(self, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> Tensors:
        return self.storage.encode(k, v, dtype)

    def store(
        self, stored: Tensors, new: Tensors, batch: Batch, params: AttentionParams
    ) -> tuple[Tensors, View]:
        return new, self.retention.store(stored, new, batch, params)

    def write(self, stored: Tensors, new: Tensors, lengths: Lengths) -> None:
        self.retention.write(stored, new, lengths, None)

    def read(
        self, stored: Tensors, span: TokenSpan, dtype: torch.dtype, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.arange(len(span.lens)).unsqueeze(-1)
        place = self.retention.place(span.nearest_stored())
        taken = {name: tensor[row, place] for name, tensor in stored.items()}
        return self.storage.decode(taken, dtype, head_dim)

    def put(
        self, stored: Tensors, span: TokenSpan, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
    ) -> None:
        place = self.retention.place(span.positions())
        put_at(stored, self.storage.encode(k, v, dtype), place, span.are_stored())

"""Views of stored keys and values: what a retention hands to attention to read.

Contiguous if a row's keys are in order from its first one on; otherwise segmented: attention runs
over the segments one by one, and merges the outputs exactly (see ``exkv.ops.attention_parts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from exkv.batch import Factors

#: Name -> (B, S, ...): stored tensors, or a chunk's values to be stored.
Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousView:
    """Contiguous keys, as ``exkv::attention`` takes them.

    Attributes:
        stored: tensors of B rows.
        past_lens: int32 (B,), tokens of a row before the queries' own.
        kv_len: keys of the longest row.
        ragged: whether rows differ in length or in new tokens.
        window: most keys that a query sees, its own included; 0 for all.
        formats: of keys and values; None for the storage's.
    """

    stored: Tensors
    past_lens: Tensor
    kv_len: int
    ragged: bool
    window: int
    formats: tuple[str, str] | None = None

    def as_segment(self, past_lens: Tensor | None = None) -> Segment:
        """The view as a segment of rows with ``past_lens``, int32 (B,), tokens before the queries'
        own; None for the view's own."""
        start = torch.zeros_like(self.past_lens)
        return Segment(
            stored=self.stored,
            start=start if past_lens is None else past_lens - self.past_lens,
            count=start + self.kv_len,  # keys after a row's end are masked by causality
            kv_len=self.kv_len,
            window=self.window,
            formats=self.formats,
        )

    def as_segments(self, past_lens: Tensor | None = None) -> SegmentedView:
        """The view as a single segment; ``past_lens`` as :meth:`as_segment` takes it."""
        segment = self.as_segment(past_lens)
        past_lens = self.past_lens if past_lens is None else past_lens
        return SegmentedView(past_lens=past_lens, segments=(segment,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some keys of each row, as ``exkv::attention_part`` takes them.

    Attributes:
        stored: tensors of B rows, or of one row shared by all.
        start: int32 (B,), position of a row's first key.
        count: int32 (B,), number of keys.
        kv_len: upper bound of ``count``.
        window: most keys that a query sees, its own included; 0 for all.
        rotary: cos, sin (B, T, R) to rotate queries by for these keys.
        rows: rows of the call that these keys are for, the B above; None for all.
        skip_last: tokens right before a query, its own included, that are masked here.
        formats: of keys and values; None for the storage's.
        block_table: pages of each row, if ``stored`` is a pool of pages; see ``exkv.ops.pages``.
    """

    stored: Tensors
    start: Tensor
    count: Tensor
    kv_len: int
    window: int = 0
    rotary: Factors | None = None
    rows: list[int] | None = None
    skip_last: int = 0
    formats: tuple[str, str] | None = None
    block_table: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedView:
    """Segments that together are all keys that the queries see; query ``t`` of a row is at position
    ``past_lens[b] + t``."""

    past_lens: Tensor
    segments: tuple[Segment, ...]

    def as_segments(self, past_lens: Tensor | None = None) -> SegmentedView:
        """Returns itself; see :class:`ContiguousView`."""
        return self


#: What the queries of a call see.
View: TypeAlias = ContiguousView | SegmentedView

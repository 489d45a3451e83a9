"""Views of stored keys and values: what a retention hands to attention to read.

Contiguous where a row's keys follow each other from its first one on; segmented where they lie in
several places, over which attention runs one by one, and merges the outputs exactly (see
``exkv.ops.attention_parts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from exkv.batch import Factors

#: Name -> (B, S, ...): stored tensors, or a chunk's values to be stored.
Tensors: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousView:
    """One stretch of keys, as ``exkv::attention`` takes it.

    Attributes:
        stored: tensors of B rows.
        past_lens: int32 (B,), tokens of a row before the queries' own.
        kv_len: keys of the longest row.
        ragged: whether rows differ in what they hold or bring.
        window: keys that a query sees at most, its own included; 0 for all.
        formats: of keys and values; None for the storage's.
    """

    stored: Tensors
    past_lens: torch.Tensor
    kv_len: int
    ragged: bool
    window: int
    formats: tuple[str, str] | None = None

    def as_segment(self, past_lens: torch.Tensor | None = None) -> Segment:
        """The same keys as a segment: of rows in which so many tokens, int32 (B,), come before the
        queries' own, or of the view's rows."""
        start = torch.zeros_like(self.past_lens)
        return Segment(
            stored=self.stored,
            start=start if past_lens is None else past_lens - self.past_lens,
            count=start + self.kv_len,  # keys behind a row's end are masked by causality
            kv_len=self.kv_len,
            window=self.window,
            formats=self.formats,
        )

    def as_segments(self) -> SegmentedView:
        """The same view, of one segment."""
        return SegmentedView(past_lens=self.past_lens, segments=(self.as_segment(),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some keys of each row, as ``exkv::attention_part`` takes them.

    Attributes:
        stored: tensors of B rows, or of one row that serves all.
        start: int32 (B,), the position of a row's first key.
        count: int32 (B,), how many there are.
        kv_len: how many any row has at most.
        window: keys that a query sees at most, its own included; 0 for all.
        rotary: cos, sin (B, T, R) by which queries are rotated for these keys.
        rows: which rows of the call these keys are for, the B above; None for all.
        skip_last: tokens right before a query, its own included, that it does not see here.
        formats: of keys and values; None for the storage's.
        block_table: where ``stored`` is a pool of pages, which of them are a row's; see
            ``exkv.ops.pages``.
    """

    stored: Tensors
    start: torch.Tensor
    count: torch.Tensor
    kv_len: int
    window: int = 0
    rotary: Factors | None = None
    rows: list[int] | None = None
    skip_last: int = 0
    formats: tuple[str, str] | None = None
    block_table: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedView:
    """Segments that together are all keys that the queries see; query ``t`` of a row is at
    position ``past_lens[b] + t``."""

    past_lens: torch.Tensor
    segments: tuple[Segment, ...]

    def as_segments(self) -> SegmentedView:
        """Itself: see :class:`ContiguousView`."""
        return self


#: What the queries of a call see.
View: TypeAlias = ContiguousView | SegmentedView

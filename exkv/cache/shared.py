"""Shared prefixes: the beginning of a fork's rows, stored in another cache.

A fork's rows store what comes after the prompt. The prompt's keys and values are shared by any
number of forks, and attention merges both segments exactly (the idea of Hydragen, Juravsky et al.,
2024). They are copied on write: see ``KVCache.fork``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from exkv.batch import Batch, Lengths, token_index
from exkv.ops.attention import AttentionParams

from .views import Segment, SegmentedView, View


class Shared:
    """Shared prefixes of one layer's rows.

    Args:
        tensors: another layer's, (rows, tokens, ...), never written to; a conversion replaces them
            in place, for all that share them.
        rows, lens: as in :class:`Prefix`; lists of the fork's cache, one for all its layers.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], rows: list[int], lens: list[int]) -> None:
        self.tensors = tensors
        self.rows = rows
        self.lens = lens

    def rest(self, batch: Batch) -> Batch:
        """The call as the fork's own storage sees it: positions count from the prefix's end."""
        old, lens = batch.lengths, self._lens(batch)
        past = tuple(p - n for p, n in zip(old.past, self.lens, strict=False))
        lengths = Lengths(past=past, new=old.new, later=old.later)
        index = token_index(lengths, lens.device) if lengths.ragged else None
        return replace(batch, lengths=lengths, past_lens=batch.past_lens - lens, write_index=index)

    def _lens(self, batch: Batch) -> torch.Tensor:
        lens = torch.tensor(self.lens[: len(batch.lengths.past)], dtype=torch.int32)
        return lens.to(batch.past_lens.device)

    def before(
        self, own: View, batch: Batch, params: AttentionParams, *, fetched: bool
    ) -> SegmentedView:
        """What queries see: the prefix, and the fork's own tokens after it.

        Args:
            fetched: whether the prefix is on another device, and must be copied.
        """
        lens = self._lens(batch)
        behind = (
            replace(segment, start=segment.start + lens) for segment in own.as_segments().segments
        )
        segments = (*self._prefixes(batch, params, fetched), *behind)
        return SegmentedView(past_lens=batch.past_lens, segments=segments)

    def _prefixes(self, batch: Batch, params: AttentionParams, fetched: bool) -> Iterator[Segment]:
        """Yield a segment for each distinct prefix row, for all rows that share it."""
        count, rows = self._lens(batch), self.rows[: len(batch.lengths.past)]
        for source in sorted(set(rows)):
            serves = [row for row, other in enumerate(rows) if other == source]
            kv_len = max(self.lens[row] for row in serves)
            if kv_len == 0:
                continue
            all_of_them = len(serves) == len(rows)
            yield Segment(
                stored={
                    name: tensor[source : source + 1, :kv_len].to(count.device, copy=fetched)
                    for name, tensor in self.tensors.items()
                },
                start=torch.zeros_like(count[: len(serves)]),
                count=count if all_of_them else count[serves],
                kv_len=kv_len,
                window=params.window,
                rows=None if all_of_them else serves,
            )

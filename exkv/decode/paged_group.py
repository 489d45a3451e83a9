"""Jobs that decode in one call: the rows of one cache, whose pages come from a shared pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from exkv.batch import pad_rows
from exkv.cache import KVCache
from exkv.cache.paging.pool import PageTable
from exkv.models import Transformer

from .guidance import logits_of_jobs
from .rows import Row
from .speculation import Limits


class PagedGroup:
    """A group of an engine's jobs.

    Args:
        cache: shares its pool.
        rows: most parts of jobs.
        proposed: most proposed tokens of a job that a call verifies.

    Attributes:
        parts: parts of jobs, by row.
    """

    def __init__(self, model: Transformer, cache: KVCache, rows: int, proposed: int) -> None:
        self.parts: list[Row] = []
        self.cache = cache.sharing_pool(rows, call_len=1 + proposed)
        self._model = model
        self._limits = Limits(model, self.cache)

    @property
    def decoding(self) -> list[Row]:
        return [part for part in self.parts if not part.is_negative]

    @property
    def table(self) -> PageTable:
        """The block table."""
        table = self.cache.pages
        assert table is not None
        return table

    # Joining and leaving --------------------------------------------------------------------

    def take(self, part: Row, cache: KVCache, row: int) -> None:
        """Move a part here from a row of another cache."""
        self.cache.move_row(len(self.parts), cache, row)
        self.parts.append(part)

    def take_from(self, other: PagedGroup, handle: Row) -> None:
        """Move a job here from another group."""
        for part in handle.parts:
            self.take(part, other.cache, other.parts.index(part))
            other.drop(part)

    def drop(self, part: Row) -> None:
        """Release a part's row and pages; the last part takes over the row."""
        row, last = self.parts.index(part), self.parts.pop()
        if last is not part:
            self.parts[row] = last
            self.cache.move_row(row, self.cache, len(self.parts))
        elif self.table.rows[row]:
            lens = self.cache.seq_lens
            self.cache.crop([*lens[:row], 0, *lens[row + 1 :]])

    # Calls ----------------------------------------------------------------------------------

    def pages_needed(self) -> int:
        """Pages that the next call needs."""
        size, table = self.table.pool.size, self.table
        more = 0
        for held, length in zip(table.rows, self.cache.seq_lens[: len(self.parts)], strict=False):
            new = len(held) * size == length  # else it may have rolled back into a shared page
            more += new or table.pool.holders[held[length // size]] > 1
        return more

    def pages_missing(self) -> int:
        return max(self.pages_needed() - self.table.pool.available, 0)

    def room(self, wanted: Sequence[int], spare: int) -> list[int]:
        """How many of the wanted tokens the next call may verify for each job, if it may take
        ``spare`` pages."""
        given = iter(wanted)
        asked = [0 if part.is_negative else next(given) for part in self.parts]
        most = [self._limits.of_row(row, count) for row, count in enumerate(asked)]
        most = self._limits.shared(most)
        table, lens = self.table, self.cache.seq_lens
        for row, count in enumerate(most):
            end = lens[row] + 1
            held = max(len(table.rows[row]), table.pages_for(end))
            more = min(max(table.pages_for(end + count) - held, 0), max(spare, 0))
            most[row] = min(count, (held + more) * table.pool.size - end)
            spare -= more
        pairs = zip(self.parts, most, strict=True)
        return [count for part, count in pairs if not part.is_negative]

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        behind, parts = iter(proposed), list(self.parts)
        rows = [[p.newest, *([] if p.is_negative else next(behind))] for p in parts]
        ids, lengths = pad_rows(rows)
        begun = self._model.begin_forward(
            ids, self.cache, new_lens=lengths, each_token=True, adapter=self._adapters
        )
        return lambda: logits_of_jobs(parts, begun()[:, 0], list(lengths))

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        parts = list(self.parts)
        ids, _ = pad_rows([[part.newest] for part in parts])
        if placed is not None and len(placed) < len(parts):
            placed = None  # negative prompts have rows, too
        placed_ids = None if placed is None else placed[:, None]
        begun = self._model.begin_forward(
            ids, self.cache, last_id_only=True, placed_ids=placed_ids, adapter=self._adapters
        )
        return lambda: logits_of_jobs(parts, begun()[:, 0])

    @property
    def _adapters(self) -> list[str | None]:
        return [part.job.adapter for part in self.parts]

    def drop_rejected(self, parts: set[Row]) -> None:
        """Truncate those of these parts that are in this group to all tokens but the newest."""
        kept = self.cache.seq_lens
        for row, part in enumerate(self.parts):
            if part in parts:
                kept[row] = min(kept[row], part.stored)
        if kept != self.cache.seq_lens:
            self.cache.crop(kept)

"""The bookkeeping of a cache: each row's tokens, and what is known about them. No tensors but the
hidden states from which an MTP head goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .hidden import Hidden
from .spec import Prefix

#: ``made_with`` of rows computed with several adapters, or partly with none.
MIXED = "mixed"
#: What :class:`Rows` records of each row beside its tokens -> its value for an empty row.
_FACTS: dict[str, Any] = {
    "rotary_variants": None,
    "made_with": None,
    "hidden": None,
    "snapshot_lens": 0,
    "written": 0,
}


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class Rows:
    """Rows and their tokens.

    Attributes:
        sequences: token ids of each row, compared for prefix reuse.
        rotary_variants: variant of the rotary frequencies behind each row's keys, if the model has
            several (longrope); None if unknown.
        made_with: key of the adapter behind each row's keys and values; None for none, ``MIXED``
            for several.
        stale: rows that were cropped into tokens which their ring had overwritten; the model
            recomputes them on next use.
        snapshot_lens: length of each row at its snapshot of recurrent states; 0 for none.
        written: most tokens that each row has had since it was empty or recomputed; if more than it
            has now, its ring may have overwritten some.
        hidden: the last hidden states of each row's newest tokens, where the model has an MTP
            head; None where none are known.
        alike: int64 (rows, rows), known length of the common prefix of two rows.
        prefix_rows, prefix_lens: shared prefixes of a fork, see :class:`Prefix`; no rows and zeros
            for any other cache.
    """

    sequences: list[list[int]]
    rotary_variants: list[tuple[bool, ...] | None]
    made_with: list[str | None]
    stale: set[int]
    snapshot_lens: list[int]
    written: list[int]
    hidden: list[Hidden | None]
    alike: np.ndarray

    def __init__(self, prefix: Prefix) -> None:
        self.prefix_rows = list(prefix.rows)
        self.prefix_lens = list(prefix.lens)
        self.become([])

    @property
    def seq_lens(self) -> list[int]:
        """Tokens in each row."""
        return [len(sequence) for sequence in self.sequences]

    def advance(
        self,
        tokens: Sequence[Sequence[int]],
        made_with: Sequence[str | None] | None = None,
        snapshot_at: Sequence[int] = (),
    ) -> None:
        """Append tokens that every layer has stored, with the adapters in use, and record the
        snapshots taken after the first ``snapshot_at`` of them; called once a forward call."""
        for row, count in enumerate(snapshot_at):
            if count:
                self.snapshot_lens[row] = len(self.sequences[row]) + count
        for row, new in enumerate(tokens):
            key = None if made_with is None else made_with[row]
            if new and self.made_with[row] != key:
                self.made_with[row] = MIXED if self.sequences[row] else key
            self.sequences[row].extend(new)
            self.written[row] = max(self.written[row], len(self.sequences[row]))

    def drop_snapshots(self, snapshot_at: Sequence[int]) -> None:
        """Forget the snapshots of rows that are about to get another one."""
        for row, count in enumerate(snapshot_at):
            if count:
                self.snapshot_lens[row] = 0

    def forget_after(self, row: int, kept: int, *, lost: bool) -> None:
        """Truncate a row to ``kept`` tokens; ``lost`` if tokens that the next one would see were
        overwritten."""
        del self.sequences[row][kept:]
        self.prefix_lens[row] = min(self.prefix_lens[row], kept)
        for known in (self.alike[row], self.alike[:, row]):
            known[:] = known.clip(max=kept)
        if self.snapshot_lens[row] > kept:
            self.snapshot_lens[row] = 0
        if kept == 0:
            self.made_with[row] = self.hidden[row] = None
            self.stale.discard(row)
            self.written[row] = 0
        elif lost:
            self.stale.add(row)

    def renewed(self, rows: Iterable[int]) -> None:
        """Mark these rows as recomputed."""
        for row in rows:
            self.stale.discard(row)
            self.written[row] = len(self.sequences[row])

    def common(self, first: int, second: int) -> int:
        """Length of the common prefix of two rows. Tokens already known to be equal are skipped, so
        that beams over a long prompt take no longer."""
        if first == second:
            return len(self.sequences[first])
        known = int(self.alike[first, second])
        if not self._made_alike(first, second):
            return known
        known += common_prefix(*(self.sequences[row][known:] for row in (first, second)))
        self.alike[first, second] = self.alike[second, first] = known
        return known

    def _made_alike(self, first: int, second: int) -> bool:
        """Whether equal tokens of two rows have equal keys and values."""
        key = self.made_with[first]
        return key == self.made_with[second] and key != MIXED

    def alike_among(self, rows: Sequence[int]) -> np.ndarray:
        """Known common prefix lengths of these rows, int64 (N, N); a row may occur several
        times."""
        alike = self.alike.copy()
        np.fill_diagonal(alike, self.seq_lens)
        return alike[np.ix_(rows, rows)]

    def prefix_of(self, row: int) -> tuple[int, int]:
        return self.prefix_rows[row] if self.prefix_rows else 0, self.prefix_lens[row]

    def rename(self, source: Sequence[int], common: Sequence[int]) -> None:
        """Record a reorder: row ``i`` becomes old row ``source[i]``, with which it had
        ``common[i]`` tokens in common; rows after the last one become empty."""
        alike, used = self.alike_among(source), len(source)
        self.alike = np.zeros_like(self.alike)
        self.alike[:used, :used] = alike
        self._copy_facts(self, source)
        spare = len(self.sequences) - used
        # Others hold these lists: change them in place, and only after the common prefix.
        prefixes = [self.prefix_of(row) for row in source]
        tails = [self.sequences[row][n:] for row, n in zip(source, common, strict=True)]
        for to, n in enumerate([*common, *[0] * spare]):
            self.sequences[to][n:] = tails[to] if to < used else []
            row, self.prefix_lens[to] = prefixes[to] if to < used else (0, 0)
            if self.prefix_rows:
                self.prefix_rows[to] = row

    def copy_rows(self, other: Rows, source: Sequence[int]) -> None:
        """Record a copy: row ``i`` of this cache holds what row ``source[i]`` of another one
        does."""
        self.become([other.sequences[row] for row in source])
        self._copy_facts(other, source)
        self.alike = other.alike_among(source)

    def _copy_facts(self, other: Rows, source: Sequence[int]) -> None:
        spare = len(self.sequences) - len(source)
        for name, empty in _FACTS.items():
            of = getattr(other, name)
            setattr(self, name, [of[row] for row in source] + [empty] * spare)
        self.stale = {to for to, row in enumerate(source) if row in other.stale}

    def facts(self, row: int) -> dict[str, Any]:
        """What is recorded of a row beside its tokens, by attribute."""
        return {name: getattr(self, name)[row] for name in _FACTS}

    def set_facts(self, row: int, facts: Mapping[str, Any]) -> None:
        """Record these :meth:`facts` of another row for this one."""
        for name, value in facts.items():
            getattr(self, name)[row] = value

    def become(self, sequences: Sequence[Sequence[int]], stale: Iterable[int] = ()) -> None:
        """Set the tokens of all rows, whose keys and values were put into the layers directly."""
        rows = len(self.prefix_lens)
        self.sequences = [*map(list, sequences), *([] for _ in range(rows - len(sequences)))]
        for name, empty in _FACTS.items():
            setattr(self, name, [empty] * rows)
        self.written, self.stale = self.seq_lens, set(stale)
        self.alike = np.zeros((rows, rows), dtype=np.int64)

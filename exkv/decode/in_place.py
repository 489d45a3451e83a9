"""One batch in the rows of any cache, for ``Generator`` and ``generate``.

Row ``i`` belongs to the ``i``-th job; the rows of negative prompts follow if jobs are guided, which
all are or none. A prefix of a prompt that its row already holds is not run again, and the row's
contents stay for the next prompt. All prompts prefill together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from exkv.sampling.scores import where_there_is_room

from .guidance import Guidance, logits_of_jobs
from .rows import Row, Rows
from .runner import Runner
from .speculation import Limits
from .speculation.draft import Guess
from .speculation.heads import propose


class InPlace(Rows[Any]):
    """The rows of one batch; each is used once.

    Args:
        repeats: adjacent rows with the same prompt, which prefills once.
        guidance: runs its rows beside these.
        on_host: whether to copy logits to the host, for the caller's functions.
    """

    def __init__(
        self,
        runner: Runner,
        repeats: int = 1,
        guidance: Guidance | None = None,
        on_host: bool = False,
    ) -> None:
        self.decoding: list[Row] = []
        self._runner = runner
        self._repeats = repeats
        self._guidance = guidance
        self._on_host = on_host
        self._limits = Limits(runner.model, runner.cache)
        self._filling: list[Row] = []
        self._rows: list[Row | None] = []  # None once its job has ended
        self._ended: dict[int, int] = {}  # row -> its final length

    @property
    def groups(self) -> Sequence[InPlace]:
        return (self,)

    @property
    def jobs(self) -> list[Row]:
        return [*self.decoding, *self._filling]

    def begin(self, row: Row) -> None:
        self._filling.append(row)

    def leave(self, row: Row) -> None:
        if row in self._filling:
            self._filling.remove(row)
            return
        self.decoding.remove(row)
        for part in row.parts:
            at = self._rows.index(part)
            self._rows[at], self._ended[at] = None, part.stored

    def is_full(self, row: Row) -> bool:
        # The cache's own length counts proposed tokens.
        longest = max(len(part.prompt) for part in row.parts)
        return longest + len(row.tokens) >= self._runner.cache.max_seq_len

    def pages_missing(self) -> int:
        return 0

    def fill(self) -> tuple[list[Row], Callable[[], Tensor]] | None:
        if not self._filling:
            return None
        negative = [row.negative for row in self._filling if row.negative is not None]
        parts = [*self._filling, *negative]
        logits = self._prefill([part.prompt for part in parts[:: self._repeats]])
        if self._guidance is not None:
            self._guidance.prefill()
        self.found_tokens = self._runner.cached_tokens
        self._rows, self.decoding, self._filling = [*parts], self._filling, []
        if negative:
            logits = logits_of_jobs(parts, logits)
        return self.decoding, lambda: logits

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        logits, repeats = self._runner.prefill(prompts), self._repeats
        if self._on_host:
            logits = logits.cpu()
        self._runner.repeat(len(prompts), repeats)
        if repeats == 1:
            return logits
        return where_there_is_room(lambda x: x.repeat_interleave(repeats, 0), logits)

    def fork(self, sources: Sequence[int]) -> None:
        """Make row ``i`` continue row ``sources[i]``."""
        self._runner.reorder(sources)
        before = [[] if row is None else row.tokens.copy() for row in self._rows]
        for row, source in zip(self._rows, sources, strict=True):
            if row is not None:
                row.tokens[:] = before[source]

    def room(self, group: InPlace, wanted: Sequence[int]) -> list[int]:
        rows = [row for row, part in enumerate(self._rows) if part and not part.is_negative]
        pairs = zip(rows, wanted, strict=True)
        return self._limits.shared([self._limits.of_row(row, most) for row, most in pairs])

    def guess(
        self,
        group: InPlace,
        most: Mapping[Row, int],
        guesses: Mapping[Row, Guess],
        confidence: float,
    ) -> dict[Row, list[int]]:
        model, cache = self._runner.model, self._runner.cache
        with self._runner.using():
            return propose(model, cache, self._rows, most, guesses, confidence)

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        following = iter(proposed)
        rows = [[] if row is None else [row.newest, *next(following)] for row in self._rows]
        logits = self._runner.verify(rows)
        return lambda: logits.cpu() if self._on_host else logits

    def drop_rejected(self, rows: Sequence[Row]) -> None:
        kept = self._runner.cache.seq_lens
        for at, row in enumerate(self._rows):
            kept[at] = min(kept[at], self._ended[at] if row is None else row.stored)
        self._runner.crop(kept)

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        parts = [row for row in self._rows if row is not None]
        going = [row is not None and not row.idle for row in self._rows]
        newest = [0 if row is None else row.newest for row in self._rows]
        all_here = len(parts) == len(self._rows)
        if placed is not None and len(placed) < len(parts):
            placed = None  # negative prompts have rows, too
        logits = self._runner.step(newest, going, placed if all_here else None)
        if self._on_host:
            logits = logits.cpu()
        if self._guidance is not None:
            self._guidance.step(newest, going)
        if not all_here:
            logits = logits[[index for index, row in enumerate(self._rows) if row is not None]]
        if len(parts) > len(self.decoding):
            logits = logits_of_jobs(parts, logits)
        return lambda: logits

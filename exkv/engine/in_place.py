"""One batch in the rows of any cache, as it is: what ``Generator`` runs its jobs on.

Row ``i`` is the ``i``-th job's; behind these come the rows of negative prompts, if jobs are guided:
all are, or none. What a row holds of its prompt already is kept, and what it holds at the end
stays, for the prompt that goes on from there. All prompts are run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from exkv.generation.runner import Runner
from exkv.generation.speculation import Limits

from .guiding import logits_of_jobs
from .job import Handle


class InPlace:
    """The :class:`exkv.engine.scheduler.Rows` of one batch; each is used once.

    Args:
        runner: of the model and the cache.
    """

    puts_away = lost = overlaps = False
    away_tokens: int | None = None

    def __init__(self, runner: Runner) -> None:
        self.decoding: list[Handle] = []
        self.found_tokens = 0
        self._runner = runner
        self._limits = Limits(runner.model, runner.cache)
        self._filling: list[Handle] = []
        self._rows: list[Handle | None] = []  # whose each is, until it has ended
        self._ended: dict[int, int] = {}  # tokens that rows keep whose job has ended

    @property
    def groups(self) -> Sequence[InPlace]:
        return (self,)

    @property
    def jobs(self) -> list[Handle]:
        return [*self.decoding, *self._filling]

    def can_begin(self, handle: Handle) -> bool:
        return True  # there are as many rows as jobs

    def begin(self, handle: Handle) -> None:
        self._filling.append(handle)

    def could_leave(self, handles: Sequence[Handle]) -> bool:
        return True  # none does

    def in_the_way_of(self, handle: Handle) -> list[Handle]:
        return []

    def leave(self, handle: Handle) -> None:
        if handle in self._filling:
            self._filling.remove(handle)
            return
        self.decoding.remove(handle)
        for part in handle.parts:
            row = self._rows.index(part)
            self._rows[row], self._ended[row] = None, part.stored

    def put_away(self, handle: Handle) -> None:
        raise AssertionError("a job keeps its row")

    def start_over(self) -> list[Handle]:
        return []  # the next call runs again what rows had

    def is_full(self, handle: Handle) -> bool:
        # The cache may have more, that is proposed only.
        longest = max(len(part.prompt) for part in handle.parts)
        return longest + len(handle.tokens) >= self._runner.cache.max_seq_len

    def pages_missing(self) -> int:
        return 0

    def fill(self) -> tuple[list[Handle], Callable[[], Tensor]] | None:
        if not self._filling:
            return None
        negative = [handle.negative for handle in self._filling if handle.negative is not None]
        parts = [*self._filling, *negative]
        logits = self._runner.prefill([part.prompt for part in parts])
        self.found_tokens = self._runner.cached_tokens
        self._rows, self.decoding, self._filling = [*parts], self._filling, []
        logits = logits_of_jobs(parts, logits)
        return self.decoding, lambda: logits

    def join(self, jobs: Sequence[Handle]) -> None:
        pass  # they have their rows

    def even_out(self, idle: Sequence[InPlace]) -> None:
        pass  # there is one group

    def room(self, group: InPlace, wanted: Sequence[int]) -> list[int]:
        rows = [row for row, part in enumerate(self._rows) if part and not part.is_negative]
        pairs = zip(rows, wanted, strict=True)
        return self._limits.shared([self._limits.of_row(row, most) for row, most in pairs])

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        following = iter(proposed)
        logits = self._runner.verify(
            [[] if each is None else [each.newest, *next(following)] for each in self._rows]
        )
        return lambda: logits

    def forget_refused(self, jobs: Sequence[Handle]) -> None:
        kept = self._runner.cache.seq_lens  # no other job is here
        for row, handle in enumerate(self._rows):
            kept[row] = min(kept[row], self._ended[row] if handle is None else handle.stored)
        self._runner.crop(kept)

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        logits = self._decode(placed)
        return lambda: logits

    def _decode(self, placed: Tensor | None) -> Tensor:
        going = [handle is not None for handle in self._rows]
        newest = [0 if handle is None else handle.newest for handle in self._rows]
        if len(self.decoding) == len(self._rows):
            return self._runner.step(newest, going, placed)
        logits = self._runner.step(newest, going)
        if not all(going):
            logits = logits[[row for row, goes in enumerate(going) if goes]]
        return logits_of_jobs([part for part in self._rows if part is not None], logits)

"""Proposals for jobs, by lookup in their own text, by a draft model or by the model's own
MTP head, for the scheduler to verify. See ``exkv.decode.speculation``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exkv.models import Transformer

from ..chooser import Chooser
from ..rows import Row
from .draft import Draft, Guess
from .heads import MTP, OWN_HEAD, check_has_head
from .limits import check_promised, check_same_vocabulary
from .ngrams import NGramIndex, NGrams

#: Wanted tokens of each job -> how many the next call takes.
Room = Callable[[Sequence[int]], list[int]]

#: Has the MTP head propose for some rows, given each one's most tokens and chooser, and a
#: confidence.
ByHead = Callable[[Mapping[Row, int], Mapping[Row, Guess], float], Mapping[Row, list[int]]]

#: Tokens to look up for a new job.
FIRST = 4


class Speculation:
    """Proposes by lookup, or by the draft if that finds nothing.

    Args:
        draft: a model, or how to use the model's own MTP head; "mtp" for ``MTP()``.
        chunk: most prompt tokens that the draft runs in a step; None for all.

    Raises:
        TypeError: not a draft, or no n-grams.
        ValueError: a draft with another vocabulary, or a model that was placed without room for
            verifying, or has no MTP head.
    """

    def __init__(
        self,
        model: Transformer,
        draft: Draft | MTP | str | None,
        ngrams: NGrams | int | None,
        chunk: int | None = None,
    ) -> None:
        if isinstance(ngrams, int) and not isinstance(ngrams, bool):
            ngrams = NGrams(tokens=ngrams)
        if not isinstance(ngrams, NGrams | None):
            raise TypeError(
                f"ngrams is {ngrams!r:.60}; it must be NGrams, a number of tokens or None"
            )
        draft = MTP() if draft == OWN_HEAD else draft
        if not isinstance(draft, Draft | MTP | None):
            raise TypeError(
                f'draft is {draft!r:.60}; it must be Draft(model, cache), MTP() or "mtp"'
            )
        if isinstance(draft, Draft):
            check_same_vocabulary(model, draft.model)
        if isinstance(draft, MTP):
            check_has_head(model)
        if draft is not None or ngrams is not None:
            check_promised(model)
        self.draft = draft if isinstance(draft, Draft) else None
        self._head = draft if isinstance(draft, MTP) else None
        self._ngrams = ngrams
        self._chunk = chunk
        self._texts: dict[Row, NGramIndex] = {}
        self._rows: dict[Row, int] = {}  # of the draft's cache
        self._most: dict[Row, int] = {}  # tokens that are looked up next

    @property
    def tokens(self) -> int:
        """Most tokens to propose for a job at a time."""
        drafts = self.draft or self._head
        drafted = 0 if drafts is None else drafts.tokens
        return max(drafted, 0 if self._ngrams is None else self._ngrams.tokens)

    def propose(
        self, jobs: Sequence[Row], room: Room, chooser: Chooser[Any], by_head: ByHead
    ) -> list[list[int]]:
        """Propose tokens after the newest of each decoding job."""
        found = [self._looked_up(row) for row in jobs]
        most = room(
            [len(tokens) or self._drafted(row) for row, tokens in zip(jobs, found, strict=True)]
        )
        found = [tokens[:count] for tokens, count in zip(found, most, strict=True)]
        if self._head is not None:
            self._ask_head(self._head, jobs, found, most, chooser, by_head)
        if self.draft is not None:
            self._ask(self.draft, jobs, found, most, chooser)
        return [chooser.valid(row, ids) for row, ids in zip(jobs, found, strict=True)]

    def forget(self, row: Row) -> None:
        """Drop a row that no longer runs."""
        self._texts.pop(row, None)
        self._rows.pop(row, None)
        self._most.pop(row, None)

    def learn(
        self, jobs: Sequence[Row], proposed: Sequence[Sequence[int]], right: Sequence[int]
    ) -> None:
        """Adapt to the numbers of accepted tokens: next look up twice as many if all were accepted,
        else one more than were, since verifying takes time."""
        for row, tokens, count in zip(jobs, proposed, right, strict=True):
            if tokens and not row.done:
                self._most[row] = 2 * count if count == len(tokens) else count + 1

    def rolled_back(self, row: Row) -> None:
        """Note that a row has dropped tokens."""
        self._texts.pop(row, None)

    def _left(self, row: Row) -> int:
        """How many tokens may be proposed so that one more can follow; 0 for a guided job, whose
        next token depends on two rows."""
        if not row.job.speculate or row.negative is not None:
            return 0
        return row.job.max_new_tokens - len(row.tokens) - 1

    def _looked_up(self, row: Row) -> list[int]:
        left = self._left(row)
        if self._ngrams is None or left <= 0:
            return []
        known = self._texts.get(row)
        if known is None:
            known = self._texts[row] = NGramIndex(self._ngrams.longest, row.prompt)
        known.extend(row.tokens[len(known) - len(row.prompt) :])
        return known.propose(min(self._ngrams.tokens, left, self._most.get(row, FIRST)))

    def _drafted(self, row: Row) -> int:
        """Tokens that the draft would propose."""
        if self._head is not None:
            return max(min(self._head.tokens, self._left(row)), 0)
        if self.draft is None or self._left(row) <= 0:
            return 0
        if row not in self._rows:
            free = set(range(self.draft.cache.batch_size)) - set(self._rows.values())
            if not free:
                return 0
            self._rows[row] = min(free)
        return min(self.draft.tokens, self._left(row))

    def _ask_head(
        self,
        head: MTP,
        jobs: Sequence[Row],
        found: list[list[int]],
        most: Sequence[int],
        chooser: Chooser[Any],
        by_head: ByHead,
    ) -> None:
        """Ask the MTP head for jobs without a proposal."""
        asked = {row: at for at, row in enumerate(jobs) if most[at] and not found[at]}
        if not asked:
            return
        guesses = {row: chooser.guessing(row) for row in asked}
        proposed = by_head({row: most[at] for row, at in asked.items()}, guesses, head.confidence)
        for row, at in asked.items():
            found[at] = proposed[row]

    def _ask(
        self,
        draft: Draft,
        jobs: Sequence[Row],
        found: list[list[int]],
        most: Sequence[int],
        chooser: Chooser[Any],
    ) -> None:
        """Ask the draft for jobs without a proposal."""
        asked = {
            self._rows[row]: index
            for index, row in enumerate(jobs)
            if most[index] and not found[index]
        }
        if not asked:
            return
        texts = {row: jobs[i].prompt + jobs[i].tokens for row, i in asked.items()}
        guesses = {row: chooser.guessing(jobs[i]) for row, i in asked.items()}
        proposed = draft.propose(
            texts,
            {row: most[index] for row, index in asked.items()},
            guesses,
            self._chunk,
        )
        for row, index in asked.items():
            found[index] = proposed[row]

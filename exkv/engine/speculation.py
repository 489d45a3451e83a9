"""Tokens that are proposed for jobs, by lookup in their own text or by a draft model; what comes of
them is the scheduler's to say. See ``exkv.generation.speculation``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exkv.generation.speculation import Draft, NGramIndex, NGrams, check_promised
from exkv.generation.speculation.limits import check_same_vocabulary
from exkv.models import Transformer
from exkv.sampling.chain import greedy, sample

from .job import Handle

#: Numbers of tokens that are wanted for jobs -> how many the next call takes.
Room = Callable[[Sequence[int]], list[int]]

#: Tokens that are looked up for a job at first.
FIRST = 4


class Speculation:
    """Proposes by lookup where that finds anything, else by the draft.

    Args:
        chunk: tokens of a prompt that the draft runs in a step at most; None for all.

    Raises:
        TypeError: something that is no draft, or no n-grams.
        ValueError: a draft of another vocabulary, or a model that was placed without room for it.
    """

    def __init__(
        self,
        model: Transformer,
        draft: Draft | None,
        ngrams: NGrams | int | None,
        chunk: int | None = None,
    ) -> None:
        if isinstance(ngrams, int) and not isinstance(ngrams, bool):
            ngrams = NGrams(tokens=ngrams)
        if not isinstance(ngrams, NGrams | None):
            raise TypeError(
                f"ngrams is {ngrams!r:.60}; it must be NGrams, a number of tokens or None"
            )
        if not isinstance(draft, Draft | None):
            raise TypeError(f"draft is {draft!r:.60}; it must be Draft(model, cache)")
        if draft is not None:
            check_same_vocabulary(model, draft.model)
        if draft is not None or ngrams is not None:
            check_promised(model)
        self.draft = draft
        self._ngrams = ngrams
        self._chunk = chunk
        self._texts: dict[Handle, NGramIndex] = {}
        self._rows: dict[Handle, int] = {}  # of the draft's cache
        self._most: dict[Handle, int] = {}  # tokens that are looked up next

    @property
    def tokens(self) -> int:
        """That are proposed for a job at a time, at most."""
        drafted = 0 if self.draft is None else self.draft.tokens
        return max(drafted, 0 if self._ngrams is None else self._ngrams.tokens)

    def propose(self, jobs: Sequence[Handle], room: Room) -> list[list[int]]:
        """For each of the jobs that decode what may come behind its newest token."""
        found = [self._looked_up(handle) for handle in jobs]
        most = room(
            [
                len(tokens) or self._drafted(handle)
                for handle, tokens in zip(jobs, found, strict=True)
            ]
        )
        found = [tokens[:count] for tokens, count in zip(found, most, strict=True)]
        if self.draft is not None:
            self._ask(self.draft, jobs, found, most)
        return [
            tokens
            if handle.completion.follower is None
            else handle.completion.follower.valid(tokens)
            for handle, tokens in zip(jobs, found, strict=True)
        ]

    def forget(self, handle: Handle) -> None:
        """It runs no more."""
        self._texts.pop(handle, None)
        self._rows.pop(handle, None)
        self._most.pop(handle, None)

    def learn(self, handle: Handle, proposed: int, right: int) -> None:
        """How much came of a proposal: twice as many tokens are looked up where all were right,
        else one more than were, since each one that is checked takes its time."""
        if proposed:
            self._most[handle] = 2 * max(proposed, 1) if right == proposed else right + 1

    def went_back(self, handle: Handle) -> None:
        """Some of its tokens are not its any more."""
        self._texts.pop(handle, None)

    def _left(self, handle: Handle) -> int:
        """Tokens of it that may be proposed: one comes behind them. None of a guided job, whose
        next token is that of two rows."""
        if not handle.job.speculate or handle.negative is not None:
            return 0
        return handle.job.max_new_tokens - len(handle.tokens) - 1

    def _looked_up(self, handle: Handle) -> list[int]:
        left = self._left(handle)
        if self._ngrams is None or left <= 0:
            return []
        known = self._texts.get(handle)
        if known is None:
            known = self._texts[handle] = NGramIndex(self._ngrams.longest, handle.prompt)
        known.extend(handle.tokens[len(known) - len(handle.prompt) :])
        return known.propose(min(self._ngrams.tokens, left, self._most.get(handle, FIRST)))

    def _drafted(self, handle: Handle) -> int:
        """How many tokens the draft would propose."""
        if self.draft is None or self._left(handle) <= 0:
            return 0
        if handle not in self._rows:
            free = set(range(self.draft.cache.batch_size)) - set(self._rows.values())
            if not free:
                return 0
            self._rows[handle] = min(free)
        return min(self.draft.tokens, self._left(handle))

    def _ask(
        self,
        draft: Draft,
        jobs: Sequence[Handle],
        found: list[list[int]],
        most: Sequence[int],
    ) -> None:
        """Proposals of the draft for those jobs for which nothing was found."""
        asked = {
            self._rows[handle]: index
            for index, handle in enumerate(jobs)
            if most[index] and not found[index]
        }
        if not asked:
            return
        texts = {row: jobs[i].prompt + jobs[i].tokens for row, i in asked.items()}
        guesses = {row: _Guess(jobs[i]) for row, i in asked.items()}
        proposed = draft.propose(
            texts,
            {row: most[index] for row, index in asked.items()},
            lambda row, logits, so_far: guesses[row](logits, so_far),
            self._chunk,
        )
        for row, index in asked.items():
            found[index] = proposed[row]


class _Guess:
    """Chooses from a draft's logits as the job will from the model's, with the same random
    numbers, which stay to be drawn."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        rng = handle.completion.rng
        self._rng = None if rng is None else torch.Generator().set_state(rng.get_state())

    def __call__(self, logits: Tensor, proposed: Sequence[int]) -> int:
        settings = self._handle.settings
        if settings.is_greedy and not settings.needs_history and not settings.token_bias:
            return max(int(greedy(logits)), 0)
        history = None
        if settings.needs_history:
            history = [torch.tensor(self._handle.prompt + self._handle.tokens + list(proposed))]
        try:
            return int(sample(logits, settings, history, self._rng))
        except ValueError:  # no token to choose: the model may have one
            return 0

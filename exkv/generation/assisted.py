"""Greedy decoding and sampling with proposals: several tokens of a sequence in one call, of which
those are kept that would have been chosen without it.

Why tokens are the same: ``exkv.generation.speculation``. Sequences that run ahead of each other
draw from one generator in turn; so of several at once only greedy tokens are those of
``sample_sequences``, and drawn ones have the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from exkv.sampling.chain import greedy
from exkv.sampling.scores import check_choosable, where_there_is_room

from .hooks import Hooks
from .processors import processors
from .sampling import next_tokens
from .speculation import Draft, Limits, NGramIndex
from .task import Completions, Task

_GOES = torch.ones(1, dtype=torch.bool)


class Proposals(Protocol):
    """Where proposals come from.

    Attributes:
        most: tokens at a time.
    """

    most: int

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        """At most so many tokens behind each row."""


class Row:
    """One sequence.

    Attributes:
        number: which row of the cache.
        tokens: that were chosen so far.
        proposed: to come behind them.
        accepted: of all that were proposed.
        over: whether it has ended.
    """

    def __init__(self, task: Task, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.proposed: list[int] = []
        self.accepted = 0
        self.over = False
        (self.prompt,) = task.prompts.rows
        self._task = task
        self._device = torch.device("cpu")

    @property
    def text(self) -> list[int]:
        """Prompt and tokens."""
        return self.prompt + self.tokens

    def take(self, logits: Tensor) -> None:
        """Choose what follows, and what follows each proposed token as far as these are right, from
        logits (1 + proposed, V)."""
        self._device = logits.device
        likeliest = None
        if self._task.takes_likeliest:
            likeliest = where_there_is_room(greedy, logits).tolist()
        for at, proposed in enumerate([*self.proposed, None]):
            token = self._next(logits[at : at + 1], None if likeliest is None else likeliest[at])
            right = token == proposed
            self.accepted += right
            if self.over or not right:
                return

    def _next(self, logits: Tensor, likeliest: int | None) -> int:
        """Choose a token; logits (1, V)."""
        task, scores, tokens = self._task, None, torch.tensor([self.tokens], dtype=torch.int64)
        if likeliest is None:
            chosen, scores, _ = next_tokens(task, logits, tokens, _GOES)
        else:
            chosen = torch.tensor([likeliest])
            if likeliest < 0:
                check_choosable(logits, "the logits")
        self.tokens.append(int(chosen))
        self.over = bool(task.ended(torch.cat((tokens, chosen[:, None]), -1), scores))
        if task.hooks.streamer is not None:
            task.hooks.streamer.put(chosen)
        return self.tokens[-1]

    def guessing(self) -> Guess:
        """How a draft chooses for this row."""
        return Guess(self._task, self.tokens, self._device)


class Guess:
    """Chooses from a draft's logits as the row will from the model's: by the same processors, but
    for the caller's functions, and with the same random numbers, which stay to be drawn."""

    def __init__(self, task: Task, tokens: Sequence[int], device: torch.device) -> None:
        steps = processors(task.config, Hooks())
        self._task = replace(task, processors=steps, generators={device: task.copied(device)})
        self._tokens = tokens
        self._device = device

    def __call__(self, logits: Tensor, proposed: Sequence[int]) -> int:
        """The next token behind what was proposed; logits (1, V)."""
        task, tokens = self._task, torch.tensor([[*self._tokens, *proposed]], dtype=torch.int64)
        scores = task.process(logits.to(self._device).float(), tokens)
        return int(task.draw(scores, 1) if task.config.do_sample else scores.argmax(-1))


class NGramProposals:
    """By lookup; see ``speculation.ngrams``."""

    def __init__(self, most: int, longest: int | None) -> None:
        self.most = most
        self._longest = longest or 2
        self._known: dict[int, NGramIndex] = {}

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        return [self._of(row).propose(count) for row, count in zip(rows, most, strict=True)]

    def _of(self, row: Row) -> NGramIndex:
        known = self._known.setdefault(row.number, NGramIndex(self._longest))
        known.extend(row.text[len(known) :])
        return known


class DraftProposals:
    """By a model; see ``speculation.draft``."""

    def __init__(self, draft: Draft, most: int) -> None:
        self.most = most
        self._draft = draft

    def propose(self, rows: Sequence[Row], most: Sequence[int]) -> list[list[int]]:
        texts = {row.number: row.text for row, count in zip(rows, most, strict=True) if count}
        counts = {row.number: count for row, count in zip(rows, most, strict=True)}
        if not texts:
            return [[] for _ in rows]
        guesses = {row.number: row.guessing() for row in rows}
        found = self._draft.propose(
            texts, counts, lambda row, logits, proposed: guesses[row](logits, proposed)
        )
        return [found.get(row.number, []) for row in rows]


def assisted_sequences(task: Task, proposals: Proposals) -> Completions:
    """Decode each prompt ``num_return_sequences`` times, as ``sample_sequences``."""
    logits = list(task.prefill(task.config.num_return_sequences).split(1))
    rows = [Row(task.alone(number), number) for number in range(len(logits))]
    streamer, limits = task.hooks.streamer, Limits(task.runner.model, task.runner.cache)
    if streamer is not None:
        streamer.put(task.prompts.followed_by(torch.empty((len(rows), 0), dtype=torch.int64)))
    proposed = 0
    while True:
        for row, own in zip(rows, logits, strict=True):
            if not row.over:
                row.take(own)
        del logits  # not to be there beside those of the next step
        _forget_refused(task, rows)
        going = [row for row in rows if not row.over]
        if not going:
            break
        _propose(task, proposals, going, limits)
        proposed += sum(len(row.proposed) for row in going)
        logits = task.verify([[] if row.over else [row.tokens[-1], *row.proposed] for row in rows])
    if streamer is not None:
        streamer.end()
    return _completions(task, rows, proposed)


def _forget_refused(task: Task, rows: Sequence[Row]) -> None:
    """The cache keeps all tokens of each row but the newest one, which is still to be run."""
    cache = task.runner.cache
    kept = cache.seq_lens
    for row in rows:
        kept[row.number] = min(kept[row.number], len(row.prompt) + len(row.tokens) - 1)
    if kept != cache.seq_lens:
        task.runner.crop(kept)


def _propose(task: Task, proposals: Proposals, rows: Sequence[Row], limits: Limits) -> None:
    """Give each row its proposals, no more than it may still have tokens."""
    left = [task.config.max_new_tokens - len(row.tokens) for row in rows]
    wanted = [
        limits.of_row(row.number, min(proposals.most, count - 1))
        for row, count in zip(rows, left, strict=True)
    ]
    found = proposals.propose(rows, limits.shared(wanted))
    for row, tokens in zip(rows, found, strict=True):
        row.proposed = tokens


def _completions(task: Task, rows: Sequence[Row], proposed: int) -> Completions:
    lengths = tuple(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), max(lengths)), task.config.pad_token_id)
    for row, length in zip(rows, lengths, strict=True):
        tokens[row.number, :length] = torch.tensor(row.tokens)
    accepted = sum(row.accepted for row in rows)
    return Completions(tokens=tokens, lengths=lengths, proposed=proposed, accepted=accepted)

"""The chooser of jobs, each with its own settings, grammar and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exkv.sampling import SamplingParams
from exkv.sampling.chain import greedy, sample, sample_placed
from exkv.sampling.logprobs import TokenLogprobs, token_logprobs

from .chooser import Choice, Chooser, Guess, Token, copied
from .completion import Piece, only_allowed
from .job import Event, Handle


class JobChooser(Chooser[Handle]):
    """The chooser of an engine or a generator.

    Args:
        is_full: whether a job's row has no room for another token.
    """

    def __init__(self, is_full: Callable[[Handle], bool]) -> None:
        self._is_full = is_full

    def choose(self, rows: Sequence[Handle], logits: Tensor) -> Choice:
        tokens, placed = choose(rows, logits)
        return replace(self.chosen(rows, logits, tokens), placed=placed)

    def chosen(self, rows: Sequence[Handle], logits: Tensor, tokens: Sequence[Token]) -> Choice:
        return Choice(tokens=tokens, details=logprobs_of(rows, logits, tokens))

    def choose_ahead(self, rows: Sequence[Handle], logits: Tensor) -> Sequence[Token] | None:
        for row in rows:
            settings = row.settings
            if not settings.is_greedy or settings.needs_history or row.completion.is_constrained:
                return None
        return choose(rows, logits)[0]

    def take(self, rows: Sequence[Handle], choice: Choice) -> list[Event]:
        events = []
        for row, token, logprobs in zip(rows, choice.tokens, choice.details, strict=True):
            try:
                if isinstance(token, ValueError):
                    raise token
                full = self._is_full(row)
                pieces = row.completion.take(token, cache_full=full, logprobs=logprobs)
            except ValueError as error:  # no token, an unknown one, or too complex a grammar
                row.error, row.reason = error.with_traceback(None), "error"
                events += self.ended(row)
            else:
                events += _events_of(row, pieces)
        return events

    def ended(self, row: Handle) -> list[Event]:
        return [Event(handle=row, reason=row.reason)]

    def valid(self, row: Handle, proposed: list[int]) -> list[int]:
        follower = row.completion.follower
        return proposed if follower is None else follower.valid(proposed)

    def guessing(self, row: Handle) -> Guess:
        settings, rng = row.settings, row.completion.rng
        rng = None if rng is None else copied(rng, rng.device)

        def guess(logits: Tensor, proposed: Sequence[int]) -> int:
            if settings.is_greedy and not settings.needs_history and not settings.token_bias:
                return max(int(greedy(logits)), 0)
            history = None
            if settings.needs_history:
                history = [torch.tensor(row.prompt + row.tokens + list(proposed))]
            try:
                return int(sample(logits, settings, history, rng))
            except ValueError:  # the draft has no token to choose; the model may have one
                return 0

        return guess


def _events_of(row: Handle, pieces: Sequence[Piece]) -> list[Event]:
    """Events of final pieces; the last one has the reason, if the job has ended."""
    events = []
    row.reason = row.completion.reason
    for piece in pieces:
        row.text += piece.text
        if piece.logprobs is not None:
            row.logprobs.append(replace(piece.logprobs, logits=None))
        events.append(
            Event(
                handle=row,
                text=piece.text,
                token=piece.token,
                logprobs=piece.logprobs,
                reason=row.reason if piece is pieces[-1] else "",
            )
        )
    return events


def choose(jobs: Sequence[Handle], logits: Tensor) -> tuple[Sequence[Token], Tensor | None]:
    """A token for each job, or the error if there is none, by logits (jobs, V); and the tokens on
    the logits' device, int64 (jobs,), if one call chose all there."""
    groups = _grouped(jobs)
    if len(groups) == 1:
        return _sampled(jobs, logits)
    chosen: list[Token] = [0] * len(jobs)
    for rows in groups:
        tokens, _ = _sampled([jobs[row] for row in rows], logits[rows])
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen, None


def logprobs_of(
    jobs: Sequence[Handle], logits: Tensor, chosen: Sequence[Token]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the chosen tokens, for jobs that ask for them; logits (jobs, V)."""
    found: list[TokenLogprobs | None] = [None] * len(jobs)
    asked: dict[int, dict[int, int]] = {}
    for row, (handle, token) in enumerate(zip(jobs, chosen, strict=True)):
        most = handle.job.logprobs
        if most is not None and not isinstance(token, ValueError):
            asked.setdefault(most, {})[row] = token
    for most, tokens in asked.items():
        rows = list(tokens)
        wanted = token_logprobs(logits[rows], list(tokens.values()), most)
        for row, each in zip(rows, wanted, strict=True):
            asks = jobs[row].job.return_logits
            found[row] = replace(each, logits=logits[row].float().cpu()) if asks else each
    return found


def _grouped(jobs: Sequence[Handle]) -> Sequence[Sequence[int]]:
    """Group the indices of jobs by settings, since one call chooses for each group."""
    first = jobs[0].settings
    if all(handle.settings is first for handle in jobs):
        return [range(len(jobs))]
    groups: dict[SamplingParams, list[int]] = {}
    for index, handle in enumerate(jobs):
        groups.setdefault(handle.settings, []).append(index)
    return list(groups.values())


def _sampled(jobs: Sequence[Handle], logits: Tensor) -> tuple[Sequence[Token], Tensor | None]:
    """:func:`choose` for jobs with the same settings."""
    settings, rows = jobs[0].settings, [handle.completion for handle in jobs]
    history = None
    if settings.needs_history:
        history = [row.history.on(logits.device) for row in rows]
    generators = [row.rng for row in rows if row.rng is not None]
    states = [rng.get_state() for rng in generators] if len(rows) > 1 else []
    allowed = only_allowed(logits, rows)
    try:
        tokens, placed = sample_placed(allowed, settings, history, generators or None)
        return tokens.tolist(), None if placed.is_cpu else placed
    except ValueError as error:
        if len(jobs) == 1:
            return [error.with_traceback(None)], None  # the traceback's frames hold the logits
    for rng, state in zip(generators, states, strict=True):  # retry to find the one without a token
        rng.set_state(state)
    singles = (_sampled([handle], logits[i : i + 1])[0] for i, handle in enumerate(jobs))
    return [token for (token,) in singles], None

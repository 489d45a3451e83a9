"""From the logits of a step to a token for each job."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exkv.generation.completion import only_allowed
from exkv.sampling import SamplingParams
from exkv.sampling.chain import sample_placed
from exkv.sampling.logprobs import TokenLogprobs, token_logprobs

from .job import Handle


def choose(
    jobs: Sequence[Handle], logits: Tensor
) -> tuple[Sequence[int | ValueError], Tensor | None]:
    """A token for each of these jobs, or why there is none.

    Args:
        logits: (jobs, V).

    Returns:
        The tokens; and the same int64 (jobs,) where the logits lie, if that is a device and all
        were chosen there in one call.
    """
    groups = _alike(jobs)
    if len(groups) == 1:
        return _sampled(jobs, logits)
    chosen: list[int | ValueError] = [0] * len(jobs)
    for rows in groups:
        tokens, _ = _sampled([jobs[row] for row in rows], logits[rows])
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen, None


def logprobs_of(
    jobs: Sequence[Handle], logits: Tensor, chosen: Sequence[int | ValueError]
) -> list[TokenLogprobs | None]:
    """How likely the chosen tokens are, for the jobs that ask; logits (jobs, V)."""
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
            found[row] = each
    return found


def _alike(jobs: Sequence[Handle]) -> Sequence[Sequence[int]]:
    """Which of the jobs have the same settings, so that one call chooses for them."""
    first = jobs[0].settings
    if all(handle.settings is first for handle in jobs):
        return [range(len(jobs))]
    groups: dict[SamplingParams, list[int]] = {}
    for index, handle in enumerate(jobs):
        groups.setdefault(handle.settings, []).append(index)
    return list(groups.values())


def _sampled(
    jobs: Sequence[Handle], logits: Tensor
) -> tuple[Sequence[int | ValueError], Tensor | None]:
    """The same of jobs whose settings are alike."""
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
            return [error.with_traceback(None)], None  # its frames hold the logits
    for rng, state in zip(generators, states, strict=True):  # one of them has no token: which?
        rng.set_state(state)
    singles = (_sampled([handle], logits[i : i + 1])[0] for i, handle in enumerate(jobs))
    return [token for (token,) in singles], None

"""Classifier-free guidance: scores shifted away from those of a negative prompt.

With log-probabilities p after a row's prompt and n after its negative one, the scores are
n + guidance_scale * (p - n) (Sanchez et al., 2023, "Stay on topic with Classifier-Free Guidance";
transformers' formula).

A guided job has two parts, itself and its negative prompt with the same new tokens, each with a row
of its own; they join, leave and decode together. In ``generate`` the negative prompts have a second
cache, and guidance is the first processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exkv.sampling.scores import where_there_is_room

from .rows import Row
from .runner import Runner

if TYPE_CHECKING:
    from .processors import SoFar


def guided(logits: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Scores (N, V), float32, from logits of the prompts and of the negative ones."""
    away = negative.float().log_softmax(-1)
    return away + scale * (logits.float().log_softmax(-1) - away)


class Guidance:
    """The logits processor of a guided batch.

    Args:
        runner: over a cache with a row for each sequence.
        prompts: each row's negative prompt.
    """

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], scale: float) -> None:
        self._runner = runner
        self._prompts = prompts
        self._scale = scale
        self._logits: Tensor | None = None  # (N, V)

    def prefill(self) -> None:
        """Run the negative prompts."""
        self._logits = self._runner.prefill(self._prompts)

    def step(self, newest: Sequence[int], going: Sequence[bool]) -> None:
        """Run the newest token of each running row; the logits of others are 0."""
        self._logits = None  # free them before the next ones
        logits, goes = self._runner.step(newest, going), torch.tensor(going)[:, None]
        self._logits = logits if all(going) else logits.where(goes.to(logits.device), 0.0)

    def __call__(self, scores: Tensor, at: SoFar) -> Tensor:
        """Guide scores (N, V)."""
        assert self._logits is not None, "they have run"
        return guided(scores, self._logits.to(scores.device), self._scale)


def logits_of_jobs(parts: Sequence[Row], logits: Tensor, counts: list[int] | None = None) -> Tensor:
    """Logits of jobs (tokens, V) from those of their parts, in the same order.

    Args:
        logits: (tokens, V), part after part.
        counts: tokens of each part, 1 of a guided one; None for 1 of each.
    """
    if not any(part.negative for part in parts):
        return logits
    jobs = [part for part in parts if not part.is_negative]

    def combined(logits: Tensor) -> Tensor:
        own = dict(zip(parts, logits.split(counts or 1), strict=True))
        return torch.cat([_scores(own, job) for job in jobs])

    return where_there_is_room(combined, logits)


def _scores(logits: Mapping[Row, Tensor], job: Row) -> Tensor:
    """A job's scores in float32, since guided ones don't fit the model's dtype."""
    own = logits[job]
    if job.negative is None:
        return own.float()
    return guided(own, logits[job.negative], job.job.guidance_scale)

"""Logits of guided jobs, see ``exkv.generation.guidance``.

A guided job has two parts: itself, and its negative prompt with the same new tokens. Each part has
a row of its own, and the two come, go and decode together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from exkv.generation.guidance import guided
from exkv.sampling.scores import where_there_is_room

from .job import Handle


def logits_of_jobs(
    parts: Sequence[Handle], logits: Tensor, counts: list[int] | None = None
) -> Tensor:
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


def _scores(logits: Mapping[Handle, Tensor], job: Handle) -> Tensor:
    """Float32, since guided ones are no numbers of the model's type."""
    own = logits[job]
    if job.negative is None:
        return own.float()
    return guided(own, logits[job.negative], job.job.guidance_scale)

"""Steps that forbid tokens, force them, or replace invalid scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def forbid_ngrams(
    scores: Tensor, history: Sequence[Tensor], among: Sequence[Tensor], n: int
) -> Tensor:
    """Drop each token that would complete an n-gram which its row of ``among`` contains."""
    out = scores.clone()
    for row, ids, known in zip(out, history, among, strict=True):
        if len(ids) >= n - 1 and len(known) >= n:
            ngrams = known.unfold(0, n, 1)  # (len - n + 1, n)
            begun = (ngrams[:, :-1] == ids[len(ids) - n + 1 :]).all(-1)
            row[ngrams[begun, -1]] = -math.inf
    return out


def forbid_words(
    scores: Tensor, history: Sequence[Tensor], words: Sequence[tuple[int, ...]]
) -> Tensor:
    """Drop each token that would complete a word of one token or several."""
    out = scores.clone()
    longest = max(map(len, words), default=0)
    for row, ids in zip(out, history, strict=True):
        recent = tuple(ids[max(0, len(ids) - longest) :].tolist())
        last = [w[-1] for w in words if recent[len(recent) - len(w) + 1 :] == w[:-1]]
        row[last] = -math.inf
    return out


def forbid_bad_words(
    scores: Tensor, at: Any, words: Sequence[tuple[int, ...]], ends: Sequence[int]
) -> Tensor:
    allowed = [word for word in words if len(word) > 1 or word[0] not in ends]
    return forbid_words(scores, at.histories_on_host, allowed)


def forbid(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Drop these tokens; ids outside the vocabulary have no effect."""
    columns = torch.isin(torch.arange(scores.shape[1]), torch.tensor(ids, dtype=torch.int64))
    return scores.masked_fill(columns.to(scores.device), -math.inf)


def force(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Leave only these tokens, all with the score 0."""
    forced = torch.full_like(scores, -math.inf)
    forced[:, list(ids)] = 0.0
    return forced


def remove_invalid(scores: Tensor) -> Tensor:
    """Replace NaN by 0, and infinities by the largest numbers."""
    limits = torch.finfo(scores.dtype)
    return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


def suppress_first(scores: Tensor, at: Any, ids: Sequence[int], forced: int | None) -> Tensor:
    first = 1 if at.width == 1 and forced is not None else 0
    return forbid(scores, ids) if at.new == first else scores

"""Steps that forbid tokens, force them, or take away what no token can be chosen by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .bounds import (
    LARGEST_ID,
    MOST_TOKENS,
    TOKEN_IDS,
    Bounds,
    count,
    switch,
    token_ids,
    token_sequences,
)
from .step import Setting, SoFar, Step

_NGRAM = count(0, MOST_TOKENS, off=(0,))
_IDS = Bounds(words=TOKEN_IDS, check=token_ids)


def forbid_ngrams(
    scores: Tensor, history: Sequence[Tensor], among: Sequence[Tensor], n: int
) -> Tensor:
    """Drop each token that would complete n tokens that are in a row's ``among``."""
    out = scores.clone()
    for row, ids, known in zip(out, history, among, strict=True):
        if len(ids) >= n - 1 and len(known) >= n:
            ngrams = known.unfold(0, n, 1)  # (len - n + 1, n)
            begun = (ngrams[:, :-1] == ids[len(ids) - n + 1 :]).all(-1)
            row[ngrams[begun, -1]] = -math.inf
    return out


NGRAMS = Step(
    name="ngrams",
    source="Paulus et al. 2018, arXiv 1705.04304",
    settings=(Setting(does="no n tokens of this many in a row occur twice", bounds=_NGRAM),),
    columns=lambda scores, at, n: forbid_ngrams(scores, at.histories, at.histories, n),
)

ENCODER_NGRAMS = Step(
    name="encoder_ngrams",
    source="transformers",
    settings=(
        Setting(does="no n tokens in a row that the prompt holds occur again", bounds=_NGRAM),
    ),
    columns=lambda scores, at, n: forbid_ngrams(scores, at.histories, at.prompt_histories, n),
)


def forbid_words(
    scores: Tensor, history: Sequence[Tensor], words: Sequence[tuple[int, ...]]
) -> Tensor:
    """Drop each token that would complete a word, which is one token or several in a row."""
    out = scores.clone()
    longest = max(map(len, words), default=0)
    for row, ids in zip(out, history, strict=True):
        recent = tuple(ids[max(0, len(ids) - longest) :].tolist())
        last = [w[-1] for w in words if recent[len(recent) - len(w) + 1 :] == w[:-1]]
        row[last] = -math.inf
    return out


def _bad_words(
    scores: Tensor, at: SoFar, words: Sequence[tuple[int, ...]], ends: Sequence[int]
) -> Tensor:
    allowed = [word for word in words if len(word) > 1 or word[0] not in ends]
    return forbid_words(scores, at.histories_on_host, allowed)


BAD_WORDS = Step(
    name="bad_words",
    source="transformers",
    settings=(
        Setting(
            does="words, each a list of ids, that never come up as a whole; a word that is one "
            "end-of-sequence token is left out",
            bounds=Bounds(words="a list of lists of ids, or None", check=token_sequences),
        ),
    ),
    columns=_bad_words,
)


def forbid(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Drop these tokens; those outside of the vocabulary don't come up anyway."""
    columns = torch.isin(torch.arange(scores.shape[1]), torch.tensor(ids, dtype=torch.int64))
    return scores.masked_fill(columns.to(scores.device), -math.inf)


MIN_LENGTH = Step(
    name="min_length",
    source="transformers",
    settings=(
        Setting(
            does="no sequence ends before it has this many new tokens; None for min_length",
            bounds=count(0, MOST_TOKENS, off=(0,)),
        ),
    ),
    columns=lambda scores, at, least, ends: forbid(scores, ends) if at.new < least else scores,
)


def force(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Leave only these tokens, all of them certain."""
    forced = torch.full_like(scores, -math.inf)
    forced[:, list(ids)] = 0.0
    return forced


FORCED_FIRST = Step(
    name="forced_first",
    source="transformers",
    settings=(
        Setting(
            does="the first new token where the longest prompt has one token",
            bounds=count(0, LARGEST_ID, off=(-1,), note="a token id, or None"),
        ),
    ),
    columns=lambda scores, at, token: (
        force(scores, (token,)) if at.new == 0 and at.width == 1 else scores
    ),
)

FORCED_LAST = Step(
    name="forced_last",
    source="transformers",
    settings=(
        Setting(
            does="what a sequence ends with at its greatest length; of several the first, or any "
            "where tokens are drawn",
            bounds=_IDS,
        ),
    ),
    columns=lambda scores, at, ids, most: force(scores, ids) if at.new == most - 1 else scores,
)


def remove_invalid(scores: Tensor) -> Tensor:
    """NaN becomes 0, and infinities the largest numbers."""
    limits = torch.finfo(scores.dtype)
    return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)


INVALID = Step(
    name="invalid",
    source="transformers",
    settings=(
        Setting(
            does="NaN and infinities become 0 and the largest numbers; without it NaN, +inf, and "
            "rows in which every token is at -inf are refused",
            bounds=switch(),
        ),
    ),
    columns=lambda scores, *_: remove_invalid(scores),
)

SUPPRESSED = Step(
    name="suppressed",
    source="Radford et al. 2022, arXiv 2212.04356 (Whisper)",
    settings=(
        Setting(does="never chosen; those outside of the vocabulary have no effect", bounds=_IDS),
    ),
    columns=lambda scores, _, ids: forbid(scores, ids),
)


def _suppress_first(scores: Tensor, at: SoFar, ids: Sequence[int], forced: int | None) -> Tensor:
    first = 1 if at.width == 1 and forced is not None else 0
    return forbid(scores, ids) if at.new == first else scores


SUPPRESSED_FIRST = Step(
    name="suppressed_first",
    source="Radford et al. 2022, arXiv 2212.04356 (Whisper)",
    settings=(
        Setting(does="not chosen as the first new token, or after one that is forced", bounds=_IDS),
    ),
    columns=_suppress_first,
)

LOG_PROBABILITIES = Step(
    name="log_probabilities",
    source="transformers",
    settings=(
        Setting(
            does="make the scores log-probabilities again after all that changes them",
            bounds=switch(),
        ),
    ),
    columns=lambda scores, *_: scores.log_softmax(-1),
)

"""What is done to the scores of the next token, in transformers' order.

Repetition penalty, forbidden n-grams; and where tokens are drawn, temperature, top-k, top-p and
min-p. Unlike those of ``exkv.sampler`` the steps leave each score in its token's column and compare
in float32, so that ``torch.multinomial`` draws from the very numbers that it sees in transformers.
What is the same in both chains is taken from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.sampler import keep_min_p, penalize_repetition

from .config import GenerationConfig


def needs_history(config: GenerationConfig) -> bool:
    """Whether the tokens so far change the outcome."""
    return config.repetition_penalty != 1 or config.no_repeat_ngram_size > 0


def process(scores: Tensor, history: Sequence[Tensor], config: GenerationConfig) -> Tensor:
    """The whole chain. (N, V) float32 and N times int64 (tokens,) -> (N, V)."""
    if config.repetition_penalty != 1:
        scores = penalize_repetition(scores, history, config.repetition_penalty)
    if config.no_repeat_ngram_size:
        scores = forbid_repeated_ngrams(scores, history, config.no_repeat_ngram_size)
    return truncate(scores, config) if config.do_sample else scores


def forbid_repeated_ngrams(scores: Tensor, history: Sequence[Tensor], n: int) -> Tensor:
    """Drop each token that would complete n tokens which the row has had already."""
    out = scores.clone()
    for row, ids in zip(out, history, strict=True):
        if len(ids) >= n:
            ngrams = ids.unfold(0, n, 1)  # (len - n + 1, n)
            begun = (ngrams[:, :-1] == ids[len(ids) - n + 1 :]).all(-1)
            row[ngrams[begun, -1]] = -math.inf
    return out


def truncate(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Temperature, and the tokens too unlikely to be drawn at -inf. (N, V) -> (N, V)."""
    # With beams there must be something left to go on with when a sequence ends.
    least = 1 + max(1, len(config.eos_token_id or ())) if config.num_beams > 1 else 1
    if config.temperature != 1:
        scores = scores / config.temperature
    if config.top_k:
        scores = keep_top_k(scores, max(config.top_k, least))
    if config.top_p < 1:
        scores = keep_top_p(scores, config.top_p, least)
    if config.min_p is not None:
        kept = keep_min_p(scores, config.min_p)
        scores = torch.where(likeliest(scores, least), scores, kept)
    return scores


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Drop what is below the k-th largest of its row; equals of that one all stay."""
    last = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < last, -math.inf)


def keep_top_p(scores: Tensor, p: float, least: int) -> Tensor:
    """Drop the least likely tokens that have a mass of at most 1 - p together."""
    rising, order = scores.sort(descending=False)
    dropped = rising.softmax(-1).cumsum(-1) <= 1 - p
    dropped[:, -least:] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -math.inf)


def likeliest(scores: Tensor, count: int) -> Tensor:
    """Which are the ``count`` largest of their row: bool (N, V)."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(1, scores.topk(min(count, scores.shape[-1])).indices, True)

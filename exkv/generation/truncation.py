"""What makes the choice smaller where tokens are drawn, in transformers' order.

Temperature, top-k, top-p, min-p, typical-p, epsilon and eta. Unlike those of
``exkv.generation.sampler`` the steps leave each score in its token's column and compare in float32,
so that ``torch.multinomial`` draws from the very numbers that it sees in transformers. What is the
same in both chains is taken from there. ``least`` is how many tokens must stay, whatever a step
would drop.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import GenerationConfig
from .sampler import keep_min_p

_VECTOR = 64  # a multiple of how many numbers torch sums side by side on any processor


def truncate(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Temperature, and the tokens too unlikely to be drawn at -inf. (N, V) -> (N, V)."""
    # With beams there must be something left to go on with when a sequence ends.
    least = 1 + max(1, len(config.ends)) if config.num_beams > 1 else 1
    if config.temperature != 1:
        scores = scores / config.temperature
    if config.top_k:
        scores = keep_top_k(scores, max(config.top_k, least))
    if config.top_p < 1:
        scores = keep_top_p(scores, config.top_p, least)
    if config.min_p is not None:
        kept = keep_min_p(scores, config.min_p)
        scores = torch.where(likeliest(scores, least), scores, kept)
    if config.typical_p < 1:
        scores = keep_typical(scores, config.typical_p, least)
    if config.epsilon_cutoff:
        scores = drop_below(scores, scores.new_tensor(config.epsilon_cutoff), least)
    if config.eta_cutoff:
        scores = drop_below(scores, eta(scores, config.eta_cutoff), least)
    return scores


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Drop what is below the k-th largest of its row; equals of that one all stay."""
    last = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < last, -math.inf)


def keep_top_p(scores: Tensor, p: float, least: int) -> Tensor:
    """Drop the least likely tokens that have a mass of at most 1 - p together."""
    # How many are possible is a number that an accelerator would have to be waited for.
    width = possible(scores) if scores.is_cpu else scores.shape[-1]
    if max(width, least) < scores.shape[-1]:
        rising = scores.topk(width).values.flip(-1)
        dropped = _unlikely(rising, p, least)
        lowest = rising.gather(-1, dropped.sum(-1, keepdim=True))  # that stays
        if not bool((dropped & (rising == lowest)).any()):
            return scores.masked_fill(scores < lowest, -math.inf)
    # Between equals the order decides that sort gives them here, and in transformers.
    rising, order = scores.sort(descending=False)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, order, _unlikely(rising, p, least)
    )
    return scores.masked_fill(dropped, -math.inf)


def _unlikely(rising: Tensor, p: float, least: int) -> Tensor:
    """Which of the scores, each row in rising order, a top-p drops: bool, the first of each row."""
    dropped = rising.softmax(-1).cumsum(-1) <= 1 - p
    dropped[:, -least:] = False
    return dropped


def possible(scores: Tensor) -> int:
    """How many of the likeliest tokens hold all that have a chance in any row.

    What is left out are whole vectors of a softmax over all, in sorted order, and the probabilities
    come out the same to the bit: vectors have 64 numbers at most, and those left out add nothing.
    """
    vocab_size = scores.shape[-1]
    count = max(_VECTOR, int((scores > -math.inf).sum(-1).max()))
    return min(vocab_size, count + (vocab_size - count) % _VECTOR)


def keep_typical(scores: Tensor, mass: float, least: int) -> Tensor:
    """Keep the tokens nearest to the expected surprise until they have this mass, and those as
    near as the last of them (Meister et al. 2022)."""
    log_p = scores.log_softmax(-1)
    entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 * -inf is 0 here
    distance, order = (-log_p - entropy).abs().sort()
    before = scores.gather(1, order).softmax(-1).cumsum(-1) < mass
    last = before.sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    dropped = distance > distance.gather(1, last)
    dropped[:, :least] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -math.inf)


def drop_below(scores: Tensor, threshold: Tensor, least: int) -> Tensor:
    """Drop what has a probability below the threshold, one for all or (N, 1)."""
    last = scores.topk(min(least, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill((scores.softmax(-1) < threshold) & (scores < last), -math.inf)


def eta(scores: Tensor, epsilon: float) -> Tensor:
    """min(epsilon, sqrt(epsilon) * exp(-entropy)) of each row: (N, 1) (Hewitt et al. 2022)."""
    limit = scores.new_tensor(epsilon)
    entropy = torch.distributions.Categorical(logits=scores).entropy()
    return torch.minimum(limit, limit.sqrt() * (-entropy).exp())[:, None]


def likeliest(scores: Tensor, count: int) -> Tensor:
    """Which are the ``count`` largest of their row: bool (N, V)."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(1, scores.topk(min(count, scores.shape[-1])).indices, True)

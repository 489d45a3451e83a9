"""Steps that drop tokens that are too unlikely, or too likely.

Dropped tokens get -inf, and the next step sees the rest renormalized. ``mask_`` functions leave
scores in their columns and compute as transformers does, in float32, so that ``torch.multinomial``
sees the same numbers; ``least`` is how many tokens must stay. ``keep_`` functions are for sorted
candidates; those of the fused op are in ``exkv.ops.sample``.
"""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor

from exkv.ops.sample import keep_min_p, keep_top_k

from .step import Candidates

_VECTOR = 64  # a multiple of torch's vector width on any processor


def mask_top_k(scores: Tensor, k: int, least: int) -> Tensor:
    """Drop scores below the k-th largest of their row; ties stay."""
    last = scores.topk(min(max(k, least), scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < last, -math.inf)


def sort_top_k(those: Candidates, k: int) -> Candidates:
    scores, columns = keep_top_k(those.scores, k)
    return Candidates(scores=scores, ids=those.ids.gather(-1, columns))


def mask_top_n_sigma(scores: Tensor, n: float) -> Tensor:
    """Drop scores more than n standard deviations below their row's largest. (N, V) -> same."""
    there = scores > -math.inf
    count = there.sum(-1, keepdim=True)
    mean = scores.where(there, 0.0).sum(-1, keepdim=True) / count
    deviation = ((scores - mean).square().where(there, 0.0).sum(-1, keepdim=True) / count).sqrt()
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) - n * deviation, -math.inf)


def mask_top_p(scores: Tensor, p: float, least: int) -> Tensor:
    """Drop the least likely tokens, with a mass of at most 1 - p."""
    # On an accelerator, counting possible tokens would synchronize.
    width = possible(scores) if scores.is_cpu else scores.shape[-1]
    if max(width, least) < scores.shape[-1]:
        rising = scores.topk(width).values.flip(-1)
        dropped = _unlikely(rising, p, least)
        lowest = rising.gather(-1, dropped.sum(-1, keepdim=True))  # to stay
        if not bool((dropped & (rising == lowest)).any()):
            return scores.masked_fill(scores < lowest, -math.inf)
    # Ties are broken by sort's order, as in transformers.
    rising, order = scores.sort(descending=False)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(
        1, order, _unlikely(rising, p, least)
    )
    return scores.masked_fill(dropped, -math.inf)


def _unlikely(rising: Tensor, p: float, least: int) -> Tensor:
    """Mask of the scores, ascending in each row, that top-p drops: bool."""
    dropped = rising.softmax(-1).cumsum(-1) <= 1 - p
    dropped[:, -least:] = False
    return dropped


def possible(scores: Tensor) -> int:
    """How many of the likeliest tokens include all with a probability above 0 in any row.

    Only whole vectors of the softmax over all tokens are left out, in sorted order, so that
    probabilities are bit-identical: vectors have at most 64 numbers, and these add 0.
    """
    vocab_size = scores.shape[-1]
    count = max(_VECTOR, int((scores > -math.inf).sum(-1).max()))
    return min(vocab_size, count + (vocab_size - count) % _VECTOR)


def keep_top_a(scores: Tensor, top_a: float) -> Tensor:
    """Drop probabilities below top_a times the square of the largest. (B, K) -> (B, K)."""
    probabilities = scores.softmax(-1)
    least = top_a * probabilities.amax(-1, keepdim=True).square()
    return scores.masked_fill(probabilities < least, -math.inf)


def mask_min_p(scores: Tensor, min_p: float, least: int) -> Tensor:
    """Drop probabilities below min_p times the largest. (N, V) -> (N, V)."""
    likeliest = torch.zeros_like(scores, dtype=torch.bool)
    likeliest.scatter_(1, scores.topk(min(least, scores.shape[-1])).indices, True)
    return torch.where(likeliest, scores, keep_min_p(scores, min_p))


def keep_tail_free(scores: Tensor, share: float) -> Tensor:
    """Drop the tail of sorted probabilities, from where their curvature has used up this share.

    The curvature is the absolute second difference, normalised to the sum 1; the first token whose
    cumulative curvature exceeds the share is the last to stay. (B, K), descending -> (B, K).
    """
    probabilities = scores.double().softmax(-1)
    if probabilities.shape[-1] < 3:
        return scores
    curvature = probabilities.diff(dim=-1).diff(dim=-1).abs()
    used = curvature.cumsum(-1) / curvature.sum(-1, keepdim=True).clamp(min=1e-300)
    # Without curvature there is no tail. There are two more tokens than second differences.
    beyond = torch.nn.functional.pad((used > share) & (used > 0), (1, 1))
    beyond[:, -1] = beyond[:, -2]
    beyond[:, 0] = False
    return scores.masked_fill(beyond, -math.inf)


def mask_typical(scores: Tensor, mass: float, least: int) -> Tensor:
    """Keep the tokens nearest to the expected surprise up to this mass, and ties of the last."""
    log_p = scores.log_softmax(-1)
    entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 * -inf is 0 here
    distance, order = (-log_p - entropy).abs().sort()
    before = scores.gather(1, order).softmax(-1).cumsum(-1) < mass
    last = before.sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    dropped = distance > distance.gather(1, last)
    dropped[:, :least] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -math.inf)


def mask_epsilon(scores: Tensor, epsilon: float | Tensor, least: int) -> Tensor:
    """Drop probabilities below epsilon, one for all or (N, 1). (N, V) -> (N, V)."""
    last = scores.topk(min(least, scores.shape[-1])).values[:, -1:]
    unlikely = scores.softmax(-1) < torch.as_tensor(epsilon, dtype=scores.dtype)
    return scores.masked_fill(unlikely & (scores < last), -math.inf)


def mask_eta(scores: Tensor, epsilon: float, least: int) -> Tensor:
    """Drop probabilities below min(epsilon, sqrt(epsilon) * exp(-entropy)) of each row."""
    limit = scores.new_tensor(epsilon)
    entropy = torch.distributions.Categorical(logits=scores).entropy()
    lowest = torch.minimum(limit, limit.sqrt() * (-entropy).exp())
    return mask_epsilon(scores, lowest[:, None], least)


def exclude_top_choices(scores: Tensor, threshold: float, excludable: Tensor) -> Tensor:
    """Drop the tokens with at least this probability, except the least likely of them.

    Args:
        scores: (B, K).
        excludable: bool (B, K), the tokens to consider.
    """
    probabilities = scores.softmax(-1)
    top = (probabilities >= threshold) & excludable
    least = probabilities.masked_fill(~top, 2.0).argmin(-1, keepdim=True)
    return scores.masked_fill(top.scatter(-1, least, False), -math.inf)


def xtc(
    those: Candidates, probability: float, threshold: float, ignored: Set[int] | None
) -> Candidates:
    """Mix two distributions instead of flipping a coin, so that a seed gives the same tokens
    however a model is split."""
    ids = torch.tensor(sorted(ignored or ()), dtype=those.ids.dtype, device=those.ids.device)
    excludable = torch.isin(those.ids, ids, invert=True)
    others = exclude_top_choices(those.scores, threshold, excludable)
    return Candidates(scores=those.scores, ids=those.ids, others=others, share=probability)

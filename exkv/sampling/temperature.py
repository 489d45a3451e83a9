"""Steps that make a distribution flatter or steeper, without dropping a token."""

from __future__ import annotations

import math

from torch import Tensor

from .step import Candidates


def smooth(scores: Tensor, factor: float) -> Tensor:
    """Move a score from d to ``factor * d²`` below the largest. (B, V) -> (B, V)."""
    largest = scores.amax(-1, keepdim=True)
    return largest - factor * (largest - scores).square()


def dynamic_temperature(scores: Tensor, low: float, high: float, exponent: float) -> Tensor:
    """Divide by a temperature that follows the row's entropy. (B, K) -> (B, K).

    ``low + (high - low) * (entropy / log n) ** exponent``, with n remaining tokens.
    """
    log_p = scores.log_softmax(-1)
    entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 * -inf is 0 here
    tokens = scores.isfinite().sum(-1, keepdim=True)
    share = (entropy / tokens.log().clamp(min=1e-30)).clamp(0.0, 1.0)
    temperature = (low + (high - low) * share**exponent).clamp(min=1e-30)
    return (scores - scores.amax(-1, keepdim=True)) / temperature


def skewed(those: Candidates, skew: float) -> Candidates:
    """Sorted candidates, drawn as if by ``u ** exp(-skew)`` instead of a uniform number u.

    That number is looked up in the cumulative probabilities, the likeliest first: it is below c if
    u is below ``c ** exp(skew)``.
    """
    those = those.mixed()
    scores, order = those.scores.sort(dim=-1, descending=True, stable=True)
    cumulated = scores.double().softmax(-1).cumsum(-1).clamp(max=1.0)
    steps = (cumulated ** math.exp(skew)).diff(prepend=cumulated.new_zeros(len(scores), 1))
    steps = steps.where(scores > -math.inf, 0.0)
    return Candidates(scores=steps.log().float(), ids=those.ids.gather(-1, order))

"""Steps of the sampler that change a distribution's shape, each a pure function on tensors.

They are what ExLlamaV2's people set beside the steps of ``exkv.ops.sample``: its names, and its
formulas where its settings have one. ``sampler.py`` says in which order they run. Scores are (B, K)
float32, -inf where a token is dropped; probabilities follow from them by a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import torch
from torch import Tensor

_LARGEST = 1e30  # of a penalty: beyond it float32 has no more numbers to subtract


def smooth(scores: Tensor, factor: float) -> Tensor:
    """The largest stays, and one that lies d below it comes to lie ``factor * d²`` below it.

    Quadratic sampling, as ExLlamaV2's smoothing_factor. (B, V) -> (B, V).
    """
    largest = scores.amax(-1, keepdim=True)
    return largest - factor * (largest - scores).square()


def penalize_continuing(
    scores: Tensor,
    history: Sequence[Tensor],
    multiplier: float,
    base: float,
    allowed_length: int,
    longest: int,
    window: int = 0,
    breakers: Set[int] | None = None,
) -> Tensor:
    """Make tokens less likely that would go on repeating what the history holds. (B, V) -> same.

    Where the last n tokens (at most ``longest``) occur in the history before, the token that
    followed them there loses ``multiplier * base ** (n - allowed_length)``, if n is that long; n is
    the largest of a token's. No repetition goes across one of ``breakers``. ("DRY", by p-e-w:
    oobabooga/text-generation-webui#5677.)

    Args:
        history: for each row the token ids so far, (n,), beside the scores.
        window: how many of the last tokens are looked at; 0 for all.
    """
    out = scores.clone()
    breaks = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    ids = [token for token in breakers or () if token < len(breaks)]
    breaks[torch.tensor(ids, dtype=torch.int64, device=scores.device)] = True
    for row, tokens in zip(out, history, strict=True):
        tokens = tokens[max(0, len(tokens) - window) if window else 0 :]
        if len(tokens) > 1:
            lengths = _repeated(tokens, breaks, longest)
            most = lengths.new_zeros(len(row)).scatter_reduce_(0, tokens[1:], lengths, "amax")
            penalty = multiplier * base ** (most - allowed_length).float()
            row -= penalty.clamp(max=_LARGEST).where(most >= allowed_length, 0.0)
    return out


def _repeated(tokens: Tensor, breaks: Tensor, longest: int) -> Tensor:
    """For each token but the first how many before it are the last ones of all: (n - 1,)."""
    stops = breaks[tokens]
    before, count = tokens[:-1], len(tokens) - 1
    alive = torch.ones(count, dtype=torch.bool, device=tokens.device)
    lengths = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    for back in range(min(longest, count)):  # the last but so many, and each token's the same
        same = (before[: count - back] == tokens[-1 - back]) & ~stops[-1 - back]
        alive = torch.nn.functional.pad(alive[back:] & same, (back, 0))
        lengths += alive
    return lengths.where(~stops[1:], 0)


def keep_top_a(scores: Tensor, top_a: float) -> Tensor:
    """Drop what is less likely than top_a times the square of the likeliest. (B, K) -> (B, K)."""
    probabilities = scores.softmax(-1)
    least = top_a * probabilities.amax(-1, keepdim=True).square()
    return scores.masked_fill(probabilities < least, -math.inf)


def keep_tail_free(scores: Tensor, share: float) -> Tensor:
    """Drop the tail: sorted probabilities from where their curvature has used up this share.

    The curvature is the absolute second difference of neighbours, normalised to the sum 1; the
    first token whose cumulated curvature exceeds the share is the last that stays (Phénix and Egan,
    "Tail free sampling", 2019). (B, K), in falling order -> (B, K).
    """
    probabilities = scores.double().softmax(-1)
    if probabilities.shape[-1] < 3:
        return scores
    curvature = probabilities.diff(dim=-1).diff(dim=-1).abs()
    used = curvature.cumsum(-1) / curvature.sum(-1, keepdim=True).clamp(min=1e-300)
    # Where nothing is curved there is no tail. Two tokens more than there are second differences.
    beyond = torch.nn.functional.pad((used > share) & (used > 0), (1, 1))
    beyond[:, -1] = beyond[:, -2]
    beyond[:, 0] = False
    return scores.masked_fill(beyond, -math.inf)


def dynamic_temperature(scores: Tensor, low: float, high: float, exponent: float) -> Tensor:
    """Divide by a temperature that a row's own entropy chooses. (B, K) -> (B, K).

    ``low + (high - low) * (entropy / log n) ** exponent``, n the number of its tokens that are not
    dropped: a sure row gets the low one, an even row the high one (kalomaze, as in ExLlamaV2).
    """
    log_p = scores.log_softmax(-1)
    entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 * -inf is 0 here
    tokens = scores.isfinite().sum(-1, keepdim=True)
    share = (entropy / tokens.log().clamp(min=1e-30)).clamp(0.0, 1.0)
    temperature = (low + (high - low) * share**exponent).clamp(min=1e-30)
    return (scores - scores.amax(-1, keepdim=True)) / temperature


def exclude_top_choices(scores: Tensor, threshold: float, excludable: Tensor) -> Tensor:
    """Drop the tokens that are at least so likely, but for the least likely of them.

    Args:
        scores: (B, K).
        excludable: bool (B, K), the tokens that may be dropped and that count.

    ("XTC", by p-e-w: oobabooga/text-generation-webui#6335.)
    """
    probabilities = scores.softmax(-1)
    top = (probabilities >= threshold) & excludable
    least = probabilities.masked_fill(~top, 2.0).argmin(-1, keepdim=True)
    return scores.masked_fill(top.scatter(-1, least, False), -math.inf)


def mixed(scores: Tensor, others: Tensor, share: float) -> Tensor:
    """The scores of drawing from the others so often, and else from the first. (B, K) -> same."""
    return ((1 - share) * scores.softmax(-1) + share * others.softmax(-1)).log()


def skewed(scores: Tensor, ids: Tensor, skew: float) -> tuple[Tensor, Tensor]:
    """Scores that are drawn from as if a uniform number u were ``u ** exp(-skew)``, and ids.

    That number is looked up in the cumulated probabilities, the likeliest first: it is below c
    where u is below ``c ** exp(skew)``. (B, K) -> sorted (B, K), (B, K).
    """
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    cumulated = scores.double().softmax(-1).cumsum(-1).clamp(max=1.0)
    steps = (cumulated ** math.exp(skew)).diff(prepend=cumulated.new_zeros(len(scores), 1))
    steps = steps.where(scores > -math.inf, 0.0)
    return steps.log().float(), ids.gather(-1, order)

"""Steps that make a distribution flatter or steeper, without dropping a token."""

from __future__ import annotations

import math

from torch import Tensor

from exkv.ops.sample import apply_temperature

from .bounds import LARGEST, SMALLEST, number, switch
from .step import Candidates, Setting, Step

TEMPERATURE = Step(
    name="temperature",
    source="Ackley et al. 1985, Cognitive Science 9",
    settings=(
        Setting(
            does="divides the logits",
            bounds=number(SMALLEST, LARGEST, off=(1.0,), note="do_sample=False is greedy"),
            short="-temp",
        ),
        Setting(
            does="apply the temperature after the steps that drop tokens, not before",
            bounds=switch(switches=False),
        ),
    ),
    columns=lambda scores, _, temperature: scores / temperature,
    candidates=lambda those, temperature, _: those.each(apply_temperature, temperature),
    is_drawn=True,
)


def smooth(scores: Tensor, factor: float) -> Tensor:
    """The largest stays, and one that lies d below it comes to lie ``factor * d²`` below it.

    (B, V) -> (B, V).
    """
    largest = scores.amax(-1, keepdim=True)
    return largest - factor * (largest - scores).square()


SMOOTHING = Step(
    name="smoothing",
    source="kalomaze, ExLlamaV2's smoothing_factor (quadratic sampling)",
    settings=(
        Setting(
            does="a logit's distance from the largest, d, becomes this times d²: near ones come "
            "nearer, far ones go",
            bounds=number(0.0, LARGEST, off=(0.0,)),
        ),
    ),
    columns=lambda scores, _, factor: smooth(scores, factor),
    is_drawn=True,
)


def dynamic_temperature(scores: Tensor, low: float, high: float, exponent: float) -> Tensor:
    """Divide by a temperature that a row's own entropy chooses. (B, K) -> (B, K).

    ``low + (high - low) * (entropy / log n) ** exponent``, n the number of its tokens that are not
    dropped: a sure row gets the low one, an even row the high one.
    """
    log_p = scores.log_softmax(-1)
    entropy = -(log_p * log_p.exp()).nansum(-1, keepdim=True)  # 0 * -inf is 0 here
    tokens = scores.isfinite().sum(-1, keepdim=True)
    share = (entropy / tokens.log().clamp(min=1e-30)).clamp(0.0, 1.0)
    temperature = (low + (high - low) * share**exponent).clamp(min=1e-30)
    return (scores - scores.amax(-1, keepdim=True)) / temperature


DYNAMIC_TEMPERATURE = Step(
    name="dynamic_temperature",
    source="kalomaze, as in ExLlamaV2",
    settings=(
        Setting(
            does="above min_temp, what is left after truncation is divided by a temperature "
            "between the two: its entropy, as a share of the largest that its tokens can have, to "
            "the power of temp_exponent, says where",
            bounds=number(0.0, LARGEST, off=(0.0,)),
            also_called=("dynatemp_high",),
        ),
        Setting(
            does="the lowest dynamic temperature",
            bounds=number(0.0, LARGEST),
            also_called=("dynatemp_low",),
        ),
        Setting(
            does="the power of the entropy's share",
            bounds=number(0.0, LARGEST, above=True),
            also_called=("dynatemp_exponent",),
        ),
    ),
    candidates=lambda those, high, low, exponent: those.each(
        dynamic_temperature, low, high, exponent
    ),
    is_drawn=True,
    is_on=lambda high, low, _: high > low,
)


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


def _skewed(those: Candidates, skew: float) -> Candidates:
    mixed = those.mixed()
    scores, ids = skewed(mixed.scores, mixed.ids, skew)
    return Candidates(scores=scores, ids=ids)


SKEW = Step(
    name="skew",
    source="ExLlamaV2",
    settings=(
        Setting(
            does="above 0 shifts choices to the less likely tokens, below 0 to the likelier ones",
            bounds=number(-50.0, 50.0, off=(0.0,)),
        ),
    ),
    candidates=_skewed,
    is_drawn=True,
)

"""From logits to the next token: SamplingParams, and the chain of steps that `sample` runs.

The steps, in this order; each is a pure function below, and a neutral value leaves it out:

1. `add_bias`               `token_bias`, and with -inf the tokens that `disallow_tokens` forbids
2. `penalize_repetition`    `token_repetition_penalty`, over `token_repetition_range` and `_decay`
3. `penalize_counts`        `token_frequency_penalty`, `token_presence_penalty`, over the same range
   -- `temperature` 0 or `top_k` 1: the first largest logit is the answer, no random number drawn --
4. `apply_temperature`      here, or after step 8 with `temperature_last`
5. `keep_top_k`             the k likeliest, sorted; from here on rows hold candidates, not ids
6. `keep_top_p`             the smallest set whose mass reaches p
7. `keep_min_p`             what is at least min_p times as likely as the likeliest
8. `keep_typical`           what is about as surprising as the distribution expects
9. `draw`                   one uniform number a row, looked up in the cumulated probabilities

A step that drops a token sets its score to -inf, and the next step sees the rest renormalised.
Everything runs on the CPU in float32, whatever device the logits come from: a seed gives the same
tokens however a model is split. `exkv.generator` calls `sample` once for each step of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

History: TypeAlias = Sequence[Sequence[int] | Tensor]

# field: (lowest, lowest is allowed, highest, what the range is in words)
_RANGES = {
    "temperature": (0.0, True, math.inf, "a finite number >= 0; 0 means greedy"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1]; 0 switches it off"),
    "typical": (0.0, True, 1.0, "in [0, 1]; 0 or 1 switches it off"),
    "token_repetition_penalty": (0.0, False, math.inf, "finite and > 0; 1 switches it off"),
    "token_frequency_penalty": (-math.inf, False, math.inf, "finite; 0 switches it off"),
    "token_presence_penalty": (-math.inf, False, math.inf, "finite; 0 switches it off"),
}
_COUNTS = {
    "top_k": (0, "an int >= 0; 0 switches it off"),
    "token_repetition_range": (-1, "an int >= 0, or -1 for the whole history"),
    "token_repetition_decay": (0, "an int >= 0; 0 ends the penalty at the range's edge"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Names and defaults are those of ExLlamaV2's sampler settings.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all, 1 is greedy.
        top_p: keep the smallest set of tokens with at least this mass (Holtzman et al. 2020).
        min_p: drop what is less than min_p times as likely as the likeliest (Nguyen et al. 2024).
        typical: mass of the locally typical set (Meister et al. 2022).
        token_repetition_penalty: positive logits of tokens in the history are divided by it,
            negative ones multiplied (Keskar et al. 2019, CTRL).
        token_repetition_range: how many of the last tokens are penalized in full; -1 is all.
        token_repetition_decay: over how many tokens before those the penalties fade to nothing.
        token_frequency_penalty: subtracted from a logit once for each time its token occurs.
        token_presence_penalty: subtracted once if its token occurs (both as in OpenAI's API).
        token_bias: {token id: number added to its logit}; -inf forbids the token.
        temperature_last: apply the temperature after the truncating steps, not before.

    Raises:
        ValueError, TypeError: naming the field, its value and what is allowed.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.8
    min_p: float = 0.0
    typical: float = 0.0
    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    token_bias: Mapping[int, float] | None = field(default=None, hash=False)
    temperature_last: bool = False

    def __post_init__(self) -> None:
        for name, (low, low_allowed, high, words) in _RANGES.items():
            value = _number(name, getattr(self, name))
            inside = low <= value if low_allowed else low < value
            if not (inside and value <= high and math.isfinite(value)):
                raise ValueError(f"SamplingParams.{name} is {value!r}; it must be {words}")
        for name, (low, words) in _COUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SamplingParams.{name} is {value!r}; it must be {words}")
            if value < low:
                raise ValueError(f"SamplingParams.{name} is {value}; it must be {words}")
        if not isinstance(self.temperature_last, bool):
            raise TypeError(
                f"SamplingParams.temperature_last is {self.temperature_last!r}; it must be a bool"
            )
        # A copy, so that a later change of the caller's dict does not reach a frozen value.
        object.__setattr__(self, "token_bias", _checked_bias(self.token_bias))

    @classmethod
    def greedy(cls) -> SamplingParams:
        """The plain argmax of the model's own logits: no penalty, no truncation, no randomness."""
        return cls(temperature=0.0, top_k=1, top_p=1.0, token_repetition_penalty=1.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far change the outcome (a caller may leave them out if not)."""
        return self.penalizes_repetition or self.penalizes_counts

    @property
    def penalizes_repetition(self) -> bool:
        """Whether step 2 does anything."""
        return self.token_repetition_penalty != 1

    @property
    def penalizes_counts(self) -> bool:
        """Whether step 3 does anything."""
        return self.token_frequency_penalty != 0 or self.token_presence_penalty != 0

    def with_bias(self, bias: Mapping[int, float]) -> SamplingParams:
        """A copy whose `token_bias` has these entries added, replacing those of the same ids."""
        return replace(self, token_bias={**(self.token_bias or {}), **bias})

    def disallow_tokens(self, ids: Iterable[int]) -> SamplingParams:
        """A copy that never chooses one of these token ids."""
        return self.with_bias(dict.fromkeys(ids, -math.inf))

    disallowing = disallow_tokens


def sample(
    logits: Tensor,
    params: SamplingParams,
    history: History | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Choose one token for each row.

    Args:
        logits: (B, V), any float dtype, any device.
        params: what to do, see `SamplingParams`.
        history: for each row the token ids so far (a list, or a 1-d tensor, which is faster when
            long), most recent last; None penalizes nothing.
        generator: a CPU generator for the whole batch, or one for each row, with which a row draws
            the same token as it would alone; None takes torch's global one.

    Returns:
        int64 (B,) on the CPU.

    Raises:
        ValueError: logits hold NaN or +inf, or a row has no token left to choose; shapes, ids or
            generators that do not fit.
    """
    scores = _as_rows(logits)
    rows, vocab_size = scores.shape
    _check_choosable(scores, "the logits")
    generators = _checked_generators(generator, rows)
    if params.token_bias:
        scores = add_bias(scores, params.token_bias)
        _check_choosable(scores, "the logits after token_bias")
    if history is not None and params.needs_history:
        scores = _penalize(scores, params, _checked_history(history, rows, vocab_size))
    if params.is_greedy:
        return scores.argmax(-1)
    scores, ids = _candidates(scores, params)
    column = draw(scores, _uniforms(generators, rows))
    return ids.gather(-1, column[:, None])[:, 0]


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a number to the logits of some ids in every row. (B, V) -> (B, V)."""
    ids = torch.tensor(list(bias), dtype=torch.int64)
    outside = ids[ids >= logits.shape[-1]].tolist()
    if outside:
        raise ValueError(
            f"token_bias names the id {outside[0]}, but the logits have only {logits.shape[-1]} ids"
        )
    return logits.index_add(-1, ids, torch.tensor(list(bias.values())).expand(len(logits), -1))


def penalize_repetition(
    logits: Tensor, history: Sequence[Tensor], penalty: float, window: int = -1, decay: int = 0
) -> Tensor:
    """Make tokens of the history less likely, once each, however often they occur. (B, V) -> same.

    A positive logit is divided by the penalty and a negative one multiplied (Keskar et al. 2019).
    The last `window` tokens (-1: all) count in full; going further back, the penalty falls to 1
    linearly over `decay` tokens, as in ExLlamaV2. A token counts where it occurred last.
    """
    out = logits.clone()
    for row, ids in zip(out, history, strict=True):
        ids, weight = _window(ids, window, decay)
        factor = 1 + (penalty - 1) * _strongest(ids, weight, len(row))
        value = row[ids]
        row[ids] = torch.where(value > 0, value / factor, value * factor)
    return out


def penalize_counts(
    logits: Tensor,
    history: Sequence[Tensor],
    frequency: float,
    presence: float,
    window: int = -1,
    decay: int = 0,
) -> Tensor:
    """Subtract `count * frequency`, and `presence` where count > 0. (B, V) -> (B, V).

    As OpenAI's API defines the two; `window` and `decay` as in `penalize_repetition`.
    """
    out = logits.clone()
    for row, ids in zip(out, history, strict=True):
        ids, weight = _window(ids, window, decay)
        counts = torch.zeros(len(row)).index_add_(0, ids, weight)[ids]
        row[ids] -= counts * frequency + _strongest(ids, weight, len(row)) * presence
    return out


def apply_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature. (B, K) -> (B, K), shifted so that the largest is 0.

    The shift changes no probability, and keeps a tiny temperature from overflowing; one that
    float32 would round to 0 is no different from the smallest that is used here.
    """
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, 1e-30)


def keep_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, in falling order. (B, V) -> scores (B, k), ids (B, k).

    Of equal scores the lower id comes first, also where the k-th place is shared. k = 0 or
    k > V keeps (and sorts) all.
    """
    vocab_size = scores.shape[-1]
    if 0 < k < vocab_size:
        ids = _unordered_top_k(scores, k).sort(-1).values
    else:
        ids = torch.arange(vocab_size).expand_as(scores)
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Drop all but the smallest leading set with a mass of at least p. (B, K) sorted -> same."""
    mass = scores.double().softmax(-1).cumsum(-1)
    before = mass.roll(1, -1)
    before[:, 0] = 0.0  # so that the likeliest always stays
    return scores.masked_fill(before >= p, -math.inf)


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Drop what is less than min_p times as likely as the likeliest. (B, K) -> (B, K)."""
    relative = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores.masked_fill(relative < min_p, -math.inf)


def keep_typical(scores: Tensor, mass: float) -> Tensor:
    """Keep the smallest set with this mass of the tokens nearest to the expected surprise.

    Surprise is -log p, and the entropy is its expectation (Meister et al. 2022). (B, K) -> (B, K).
    """
    log_p = scores.double().log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).nan_to_num(nan=0.0).sum(-1, keepdim=True)  # 0 * -inf is 0 here
    order = (-log_p - entropy).abs().sort(dim=-1, stable=True).indices
    before = p.gather(-1, order).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= mass)
    return scores.masked_fill(dropped, -math.inf)


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """One column for each row, by inverting the cumulated probabilities. (B, K), (B,) -> (B,).

    Uniforms are float64 in [0, 1). A column of probability 0 is never drawn: the cumulated sum
    does not grow there, and the search takes the first column where it exceeds the number.
    """
    cdf = scores.double().softmax(-1).cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def _penalize(scores: Tensor, params: SamplingParams, history: list[Tensor]) -> Tensor:
    window = (params.token_repetition_range, params.token_repetition_decay)
    if params.penalizes_repetition:
        scores = penalize_repetition(scores, history, params.token_repetition_penalty, *window)
    if params.penalizes_counts:
        penalties = (params.token_frequency_penalty, params.token_presence_penalty)
        scores = penalize_counts(scores, history, *penalties, *window)
    return scores


def _candidates(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Steps 4 to 8. (B, V) -> scores (B, K), ids (B, K)."""
    # Top-k first: a temperature changes no order, and K numbers are cheaper to divide than V.
    if params.top_k > 0 or params.top_p < 1:
        scores, ids = keep_top_k(scores, params.top_k)
    else:  # nothing needs an order, and sorting a whole vocabulary takes milliseconds
        ids = torch.arange(scores.shape[-1]).expand_as(scores)
    if not params.temperature_last:
        scores = apply_temperature(scores, params.temperature)
    if params.top_p < 1:
        scores = keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = keep_min_p(scores, params.min_p)
    if 0 < params.typical < 1:
        scores = keep_typical(scores, params.typical)
    if params.temperature_last:
        scores = apply_temperature(scores, params.temperature)
    return scores, ids


def _unordered_top_k(scores: Tensor, k: int) -> Tensor:
    """The ids of the k largest of each row, the lowest ids where the k-th place is shared."""
    values, ids = scores.topk(k)
    last = values[:, -1:]
    if int((scores >= last).sum()) == ids.numel():
        return ids
    # topk leaves open which of the equals it takes, and half precision makes equals common.
    above, equal = scores > last, scores == last
    room = k - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= room))
    return keep.nonzero()[:, 1].view(-1, k)


def _window(ids: Tensor, window: int, decay: int) -> tuple[Tensor, Tensor]:
    """The part of a history that is penalized, and how strongly: both (n,), the weight in (0, 1]"""
    if window < 0:
        return ids, torch.ones(len(ids))
    ids = ids[max(0, len(ids) - window - decay) :]
    age = torch.arange(len(ids) - 1, -1, -1, dtype=torch.float32)
    return ids, 1 - (age - window).clamp(min=0) / max(decay, 1)


def _strongest(ids: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """For each place of a history the largest weight that its token has anywhere. (n,) -> (n,)."""
    return torch.zeros(vocab_size).scatter_reduce_(0, ids, weight, "amax")[ids]


def _uniforms(generators: Sequence[torch.Generator | None], rows: int) -> Tensor:
    each = rows // len(generators)
    return torch.cat([torch.rand(each, generator=g, dtype=torch.float64) for g in generators])


def _as_rows(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a float tensor of shape (B, V), not {kind}")
    if logits.dim() != 2 or 0 in logits.shape:
        raise ValueError(f"logits must have the shape (B, V), not {tuple(logits.shape)}")
    return logits.detach().to("cpu", torch.float32)


def _check_choosable(scores: Tensor, what: str) -> None:
    largest = scores.amax(-1)  # NaN if the row has one, -inf if it has nothing else
    if bool(largest.isfinite().all()):
        return
    row = int((~largest.isfinite()).nonzero()[0])
    value = float(largest[row])
    if value == -math.inf:
        raise ValueError(f"row {row} of {what} is all -inf: no token is left to choose")
    raise ValueError(
        f"row {row} of {what} holds {value}: the model's forward overflowed or its weights are "
        "broken (float16 overflows above 65504; bfloat16 or float32 may help)"
    )


def _checked_history(history: History, rows: int, vocab_size: int) -> list[Tensor]:
    if len(history) != rows:
        raise ValueError(f"history has {len(history)} rows, but the logits have {rows}")
    tensors = [torch.as_tensor(ids, dtype=torch.int64, device="cpu") for ids in history]
    for row, ids in enumerate(tensors):
        if ids.dim() != 1:
            raise ValueError(f"history[{row}] must be a flat list of ids, not {tuple(ids.shape)}")
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"history[{row}] holds the id {int(wrong[0])}, outside of 0..{vocab_size - 1}"
            )
    return tensors


def _checked_generators(
    generator: torch.Generator | Sequence[torch.Generator] | None, rows: int
) -> Sequence[torch.Generator | None]:
    if generator is None or isinstance(generator, torch.Generator):
        generators: Sequence[torch.Generator | None] = [generator]
    elif len(generator) == rows:
        generators = generator
    else:
        raise ValueError(f"{len(generator)} generators for {rows} rows: give one, or one for each")
    for each in generators:
        if each is not None and each.device.type != "cpu":
            raise ValueError(
                f"a generator is on {each.device}: tokens are drawn on the CPU, so make it with "
                "torch.Generator()"
            )
    return generators


def _checked_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"SamplingParams.token_bias has the key {token!r}; keys are token ids")
        if not _number(f"token_bias[{token}]", value) < math.inf:
            raise ValueError(
                f"SamplingParams.token_bias[{token}] is {value!r}; it must be finite, or -inf"
            )
    return dict(bias)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"SamplingParams.{name} is {value!r}; it must be a number")
    return value

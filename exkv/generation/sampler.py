"""From logits to the next token: SamplingParams, and the chain of steps that `sample` runs.

The steps, in this order; each is a pure function here or in `exkv.ops.sample`, and a neutral value
leaves it out:

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
Everything runs where the logits lie, in float32, and only the tokens come back to the host. The
random numbers are drawn on the CPU and are an argument of `torch.ops.exkv.sample`, the op for steps
4 to 9, so a seed gives the same tokens however a model is split. `exkv.generation.generator` calls
`sample` once for each step of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from exkv.ops.sample import (
    apply_temperature,
    candidates,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
)

from .choosable import check_choosable, where_there_is_room
from .validation import SMALLEST, check_count, check_range, plain_number

__all__ = [
    "SamplingParams",
    "add_bias",
    "apply_temperature",
    "distribution",
    "draw",
    "greedy",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "keep_typical",
    "penalize_counts",
    "penalize_repetition",
    "sample",
]

History: TypeAlias = Sequence[Sequence[int] | Tensor]

_READABLE = (torch.float32, torch.bfloat16, torch.float16)  # by the op's kernel

_MOST = 1 / SMALLEST
# field: (lowest, lowest is allowed, highest, what the range is in words)
_RANGES = {
    "temperature": (0.0, True, _MOST, "0, which is greedy, or from 1e-30 to 1e30"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1]; 0 switches it off"),
    "typical": (0.0, True, 1.0, "in [0, 1]; 0 or 1 switches it off"),
    "token_repetition_penalty": (SMALLEST, True, _MOST, "from 1e-30 to 1e30; 1 switches it off"),
    "token_frequency_penalty": (-_MOST, True, _MOST, "from -1e30 to 1e30; 0 switches it off"),
    "token_presence_penalty": (-_MOST, True, _MOST, "from -1e30 to 1e30; 0 switches it off"),
}
_COUNTS = {
    "top_k": (0, "an int from 0 to 2**31 - 1; 0 switches it off"),
    "token_repetition_range": (-1, "an int from 0 to 2**31 - 1, or -1 for the whole history"),
    "token_repetition_decay": (0, "an int from 0 to 2**31 - 1; 0 ends the penalty at the range"),
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
        for name in (*_RANGES, *_COUNTS):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, limits in _RANGES.items():
            check_range(f"SamplingParams.{name}", getattr(self, name), *limits)
        for name, (low, words) in _COUNTS.items():
            check_count(f"SamplingParams.{name}", getattr(self, name), low, 2**31 - 1, words)
        if 0 < self.temperature < SMALLEST:
            words = _RANGES["temperature"][3]
            raise ValueError(
                f"SamplingParams.temperature is {self.temperature!r}; it must be {words}"
            )
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
        history: for each row the token ids so far (a list, or a 1-d int64 tensor, which is faster
            when long), most recent last; None penalizes nothing. A tensor on an accelerator is
            used as it is, without a look at its ids.
        generator: a CPU generator for the whole batch, or one for each row, with which a row draws
            the same token as it would alone; None takes torch's global one.

    Returns:
        int64 (B,) on the CPU.

    Raises:
        ValueError: logits hold NaN or +inf, or a row has no token left to choose; shapes, ids or
            generators that do not fit.
    """
    return sample_placed(logits, params, history, generator)[0]


def sample_placed(
    logits: Tensor,
    params: SamplingParams,
    history: History | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample`, and the same tokens where the logits lie."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is a {type(params).__name__}; it must be SamplingParams")
    raw = _as_rows(logits)
    rows, vocab_size = raw.shape
    generators = _checked_generators(generator, rows)
    known = _known(history, params, raw)
    _check_bias(params.token_bias, vocab_size)
    uniforms = None if params.is_greedy else _uniforms(generators, rows)
    placed = where_there_is_room(lambda x: _choose(x, params, known, uniforms), raw)
    tokens = placed.cpu()
    if min(tokens.tolist()) < 0:
        _explain(raw.cpu(), params, [ids.cpu() for ids in known])
    return tokens, placed


def distribution(
    logits: Tensor, params: SamplingParams, history: History | None = None
) -> tuple[Tensor, Tensor]:
    """What `sample` draws from: probabilities (B, K), 0 where a token is dropped, and ids (B, K).

    Arguments and errors as of `sample`; a greedy choice has all of the mass.
    """
    raw = _as_rows(logits)
    known = _known(history, params, raw)
    _check_bias(params.token_bias, raw.shape[1])
    scores = _scored(raw, params, known).float()
    check_choosable(scores, "the scores")
    if params.is_greedy:
        best = scores.argmax(-1, keepdim=True)
        return torch.ones_like(best, dtype=torch.float32), best
    scores, ids = candidates(
        scores,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.typical,
        params.temperature_last,
    )
    return scores.softmax(-1), ids


def greedy(logits: Tensor) -> Tensor:
    """The first largest of each row, -1 for a row that `sample` refuses: (B, V) -> int64 (B,),
    where the logits lie."""
    return torch.ops.exkv.sample(_as_rows(logits), None, 0.0, 0, 1.0, 0.0, 0.0, False)


def _choose(
    logits: Tensor, params: SamplingParams, history: Sequence[Tensor], uniforms: Tensor | None
) -> Tensor:
    """The chain, where the logits lie: (B, V) -> int64 (B,)."""
    return torch.ops.exkv.sample(
        _scored(logits, params, history),
        None if uniforms is None else uniforms.to(logits.device),
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.typical,
        params.temperature_last,
    )


def _scored(logits: Tensor, params: SamplingParams, history: Sequence[Tensor]) -> Tensor:
    """Steps 1 to 3."""
    if params.token_bias:
        logits = add_bias(logits.float(), params.token_bias)
    if history:
        logits = _penalize(logits.float(), params, [ids.to(logits.device) for ids in history])
    return logits


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a number to the logits of some ids in every row. (B, V) -> (B, V)."""
    _check_bias(bias, logits.shape[-1])
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    numbers = torch.tensor(list(bias.values()), device=logits.device)
    return logits.index_add(-1, ids, numbers.expand(len(logits), -1))


def _check_bias(bias: Mapping[int, float] | None, vocab_size: int) -> None:
    outside = [token for token in bias or () if token >= vocab_size]
    if outside:
        raise ValueError(
            f"token_bias names the id {outside[0]}, but the logits have only {vocab_size} ids"
        )


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
        counts = weight.new_zeros(len(row)).index_add_(0, ids, weight)[ids]
        row[ids] -= counts * frequency + _strongest(ids, weight, len(row)) * presence
    return out


def _penalize(scores: Tensor, params: SamplingParams, history: list[Tensor]) -> Tensor:
    window = (params.token_repetition_range, params.token_repetition_decay)
    if params.penalizes_repetition:
        scores = penalize_repetition(scores, history, params.token_repetition_penalty, *window)
    if params.penalizes_counts:
        penalties = (params.token_frequency_penalty, params.token_presence_penalty)
        scores = penalize_counts(scores, history, *penalties, *window)
    return scores


def _window(ids: Tensor, window: int, decay: int) -> tuple[Tensor, Tensor]:
    """The part of a history that is penalized, and how strongly: both (n,), the weight in (0, 1]"""
    if window < 0:
        return ids, torch.ones(len(ids), device=ids.device)
    ids = ids[max(0, len(ids) - window - decay) :]
    age = torch.arange(len(ids) - 1, -1, -1, dtype=torch.float32, device=ids.device)
    return ids, 1 - (age - window).clamp(min=0) / max(decay, 1)


def _strongest(ids: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """For each place of a history the largest weight that its token has anywhere. (n,) -> (n,)."""
    return weight.new_zeros(vocab_size).scatter_reduce_(0, ids, weight, "amax")[ids]


def _uniforms(generators: Sequence[torch.Generator | None], rows: int) -> Tensor:
    each = rows // len(generators)
    return torch.cat([torch.rand(each, generator=g, dtype=torch.float64) for g in generators])


def _as_rows(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits must be a float tensor of shape (B, V), not {kind}")
    if logits.dim() != 2 or 0 in logits.shape:
        raise ValueError(f"logits must have the shape (B, V), not {tuple(logits.shape)}")
    # The op reads half precision as the float32 that it is.
    logits = logits.detach()
    return logits if logits.dtype in _READABLE else logits.float()


def _explain(raw: Tensor, params: SamplingParams, history: Sequence[Tensor]) -> None:
    """Raise because a row has no token: by what it was at first, then with biases, then at last."""
    check_choosable(raw, "the logits")
    if params.token_bias:
        check_choosable(add_bias(raw.float(), params.token_bias), "the logits after token_bias")
    check_choosable(_scored(raw, params, history), "the logits after the penalties")


def _known(history: History | None, params: SamplingParams, logits: Tensor) -> list[Tensor]:
    """The history as tensors where the parameters look at it, else nothing."""
    if history is None or not params.needs_history:
        return []
    return _checked_history(history, *logits.shape)


def _checked_history(history: History, rows: int, vocab_size: int) -> list[Tensor]:
    if len(history) != rows:
        raise ValueError(f"history has {len(history)} rows, but the logits have {rows}")
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in history]
    for row, ids in enumerate(tensors):
        if ids.dim() != 1:
            raise ValueError(f"history[{row}] must be a flat list of ids, not {tuple(ids.shape)}")
        if not ids.is_cpu:
            continue
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
    if not isinstance(bias, Mapping):
        raise TypeError(f"SamplingParams.token_bias is {bias!r}; it must be a dict: {{id: number}}")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"SamplingParams.token_bias has the key {token!r}; keys are token ids")
        if value != -math.inf:
            name = f"SamplingParams.token_bias[{token}]"
            check_range(name, value, -_MOST, True, _MOST, "from -1e30 to 1e30, or -inf")
    return dict(bias)

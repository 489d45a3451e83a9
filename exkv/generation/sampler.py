"""From logits to the next token: SamplingParams, and the chain of steps that `sample` runs.

The steps, in this order; each is a pure function here, in `exkv.ops.sample` (o) or in `shaping.py`
(s), and a neutral value leaves it out:

 1. `add_bias`                `token_bias`, and with -inf the tokens that `disallow_tokens` forbids
 2. `penalize_repetition`     `token_repetition_penalty`, over `token_repetition_range`, `_decay`
 3. `penalize_counts`         `token_frequency_penalty`, `token_presence_penalty`, the same range
 4. `penalize_continuing` s   `dry_multiplier` and the other `dry_` fields
    -- `temperature` 0 or `top_k` 1: the first largest logit is the answer, no number is drawn --
 5. `smooth`              s   `smoothing_factor`
 6. `apply_temperature`   o   here, or at step 14 with `temperature_last`
 7. `keep_top_k`          o   the k likeliest, sorted; from here on rows hold candidates, not ids
 8. `keep_top_p`          o   the smallest set whose mass reaches p
 9. `keep_top_a`          s   what is at least as likely as top_a times the square of the likeliest
10. `keep_min_p`          o   what is at least min_p times as likely as the likeliest
11. `keep_tail_free`      s   `tfs`: what comes before the sorted probabilities flatten out
12. `keep_typical`        o   what is about as surprising as the distribution expects
13. `exclude_top_choices` s   `xtc_probability`, `xtc_threshold`
14. `dynamic_temperature` s   `min_temp`, `max_temp`, `temp_exponent`; else `temperature_last`'s
15. `skewed`              s   `skew`
16. `draw`                o   one uniform number a row, looked up in the cumulated probabilities

A step that drops a token sets its score to -inf, and the next step sees the rest renormalised.
Everything runs where the logits lie, in float32, and only the tokens come back to the host. The
random numbers are drawn on the CPU, one a row: step 13 is a mixture of two distributions, not a
coin. So a seed gives the same tokens however a model is split. `torch.ops.exkv.sample` does all
from step 6 on in one kernel where none of 9, 11 and 13 to 15 is asked for. ExLlamaV2's mirostat is
not here: it changes its own settings with each token. `exkv.engine.choosing` calls `sample`
once for each step of decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from .sampling_params import SamplingParams
from .shaping import (
    dynamic_temperature,
    exclude_top_choices,
    keep_tail_free,
    keep_top_a,
    mixed,
    penalize_continuing,
    skewed,
    smooth,
)

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
    check_bias(params.token_bias, vocab_size)
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
    check_bias(params.token_bias, raw.shape[1])
    scores = _scored(raw, params, known).float()
    check_choosable(scores, "the scores")
    if params.is_greedy:
        best = scores.argmax(-1, keepdim=True)
        return torch.ones_like(best, dtype=torch.float32), best
    scores, ids = _candidates(scores, params)
    return scores.softmax(-1), ids


def greedy(logits: Tensor) -> Tensor:
    """The first largest of each row, -1 for a row that `sample` refuses: (B, V) -> int64 (B,),
    where the logits lie."""
    return torch.ops.exkv.sample(_as_rows(logits), None, 0.0, 0, 1.0, 0.0, 0.0, False)


def _choose(
    logits: Tensor, params: SamplingParams, history: Sequence[Tensor], uniforms: Tensor | None
) -> Tensor:
    """The chain, where the logits lie: (B, V) -> int64 (B,)."""
    scores = _scored(logits, params, history)
    uniforms = None if uniforms is None else uniforms.to(logits.device)
    if uniforms is not None and params.is_shaped:
        return _draw_shaped(scores.float(), params, uniforms)
    return torch.ops.exkv.sample(
        scores,
        uniforms,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.typical,
        params.temperature_last,
    )


def _scored(logits: Tensor, params: SamplingParams, history: Sequence[Tensor]) -> Tensor:
    """Steps 1 to 5."""
    if params.token_bias:
        logits = add_bias(logits.float(), params.token_bias)
    if history:
        logits = _penalize(logits.float(), params, [ids.to(logits.device) for ids in history])
    if params.smoothing_factor and not params.is_greedy:
        logits = smooth(logits.float(), params.smoothing_factor)
    return logits


def _draw_shaped(scores: Tensor, params: SamplingParams, uniforms: Tensor) -> Tensor:
    """Steps 6 to 16: (B, V) -> int64 (B,), -1 for a row that can't be drawn from."""
    choosable = scores.amax(-1).isfinite()
    scores, ids = _candidates(scores.where(choosable[:, None], 0.0), params)
    return ids.gather(-1, draw(scores, uniforms)[:, None])[:, 0].where(choosable, -1)


def _candidates(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Steps 6 to 15. (B, V) -> scores (B, K), -inf where a token is dropped, and ids (B, K)."""
    if not params.is_shaped:
        return candidates(
            scores,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.typical,
            params.temperature_last,
        )
    if not params.temperature_last:
        scores = apply_temperature(scores, params.temperature)
    scores, ids = keep_top_k(scores, params.top_k)
    scores = _truncated(scores, params)
    kept = _tempered_last(scores, params)
    if params.xtc_probability:
        others = exclude_top_choices(scores, params.xtc_threshold, _excludable(ids, params))
        kept = mixed(kept, _tempered_last(others, params), params.xtc_probability)
    return skewed(kept, ids, params.skew) if params.skew else (kept, ids)


def _truncated(scores: Tensor, params: SamplingParams) -> Tensor:
    """Steps 8 to 12, of sorted scores (B, K)."""
    if params.top_p < 1:
        scores = keep_top_p(scores, params.top_p)
    if params.top_a:
        scores = keep_top_a(scores, params.top_a)
    if params.min_p:
        scores = keep_min_p(scores, params.min_p)
    if 0 < params.tfs < 1:
        scores = keep_tail_free(scores, params.tfs)
    if 0 < params.typical < 1:
        scores = keep_typical(scores, params.typical)
    return scores


def _tempered_last(scores: Tensor, params: SamplingParams) -> Tensor:
    """Step 14."""
    if params.has_dynamic_temperature:
        return dynamic_temperature(scores, params.min_temp, params.max_temp, params.temp_exponent)
    return apply_temperature(scores, params.temperature) if params.temperature_last else scores


def _excludable(ids: Tensor, params: SamplingParams) -> Tensor:
    """Which of the candidates XTC may drop: bool (B, K)."""
    ignored = torch.tensor(sorted(params.xtc_ignore_tokens or ()), dtype=ids.dtype)
    return torch.isin(ids, ignored.to(ids.device), invert=True)


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a number to the logits of some ids in every row. (B, V) -> (B, V)."""
    check_bias(bias, logits.shape[-1])
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    numbers = torch.tensor(list(bias.values()), device=logits.device)
    return logits.index_add(-1, ids, numbers.expand(len(logits), -1))


def check_bias(bias: Mapping[int, float] | None, vocab_size: int) -> None:
    """ValueError where a bias names an id that the logits don't have."""
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
    if params.dry_multiplier:
        scores = penalize_continuing(
            scores,
            history,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_max_ngram,
            params.dry_range,
            params.dry_sequence_breakers,
        )
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

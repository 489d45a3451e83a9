"""Steps that change scores by the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .bounds import LARGEST


def check_bias(bias: Mapping[int, float] | None, vocab_size: int) -> None:
    """ValueError for a bias of an id outside the vocabulary."""
    outside = [token for token in bias or () if token >= vocab_size]
    if outside:
        raise ValueError(
            f"token_bias names the id {outside[0]}, but the logits have only {vocab_size} ids"
        )


def add_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a number to the logits of some ids in every row. (B, V) -> (B, V)."""
    check_bias(bias, logits.shape[-1])
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    numbers = torch.tensor(list(bias.values()), device=logits.device)
    return logits.index_add(-1, ids, numbers.expand(len(logits), -1))


def bias_sequences(
    scores: Tensor, history: Sequence[Tensor], biases: Sequence[tuple[tuple[int, ...], float]]
) -> Tensor:
    """Add a number to each token that would complete a sequence of one token or several."""
    out = torch.zeros_like(scores)
    longest = max(len(ids) for ids, _ in biases)
    for row, ids in zip(out, history, strict=True):
        recent = tuple(ids[max(0, len(ids) - longest) :].tolist())
        for sequence, bias in biases:
            if recent[len(recent) - len(sequence) + 1 :] == sequence[:-1]:
                row[sequence[-1]] += bias
    return scores + out


def penalize_repetition(
    logits: Tensor, history: Sequence[Tensor], penalty: float, window: int = -1, decay: int = 0
) -> Tensor:
    """Make tokens of the history less likely, however often they occur. (B, V) -> same.

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


def _window(ids: Tensor, window: int, decay: int) -> tuple[Tensor, Tensor]:
    """The penalized part of a history and its weights in (0, 1]: both (n,)."""
    if window < 0:
        return ids, torch.ones(len(ids), device=ids.device)
    ids = ids[max(0, len(ids) - window - decay) :]
    age = torch.arange(len(ids) - 1, -1, -1, dtype=torch.float32, device=ids.device)
    return ids, 1 - (age - window).clamp(min=0) / max(decay, 1)


def _strongest(ids: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Largest weight of each token of a history. (n,) -> (n,)."""
    return weight.new_zeros(vocab_size).scatter_reduce_(0, ids, weight, "amax")[ids]


def penalize(
    scores: Tensor,
    at: Any,
    repetition: float,
    frequency: float = 0.0,
    presence: float = 0.0,
    window: int = -1,
    decay: int = 0,
) -> Tensor:
    """Apply both penalties, where they are on. (B, V) -> (B, V)."""
    if repetition != 1:
        scores = penalize_repetition(scores, at.histories, repetition, window, decay)
    if frequency or presence:
        scores = penalize_counts(scores, at.histories, frequency, presence, window, decay)
    return scores


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
    """Penalize tokens that would continue a repetition. (B, V) -> same.

    If the last n tokens (at most ``longest``) occur earlier in the history, the token that followed
    them there loses ``multiplier * base ** (n - allowed_length)``, for its largest n, if n >=
    ``allowed_length``. No repetition crosses one of ``breakers``.

    Args:
        history: for each row the token ids so far, (n,), on the scores' device.
        window: the number of last tokens to look at; 0 for all.
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
            # Float32 overflows beyond.
            row -= penalty.clamp(max=LARGEST).where(most >= max(allowed_length, 1), 0.0)
    return out


def _repeated(tokens: Tensor, breaks: Tensor, longest: int) -> Tensor:
    """For each token but the first, how many tokens before it equal the last ones: (n - 1,)."""
    stops = breaks[tokens]
    before, count = tokens[:-1], len(tokens) - 1
    alive = torch.ones(count, dtype=torch.bool, device=tokens.device)
    lengths = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    for back in range(min(longest, count)):  # the token that many before, and before the last
        same = (before[: count - back] == tokens[-1 - back]) & ~stops[-1 - back]
        alive = torch.nn.functional.pad(alive[back:] & same, (back, 0))
        lengths += alive
    return lengths.where(~stops[1:], 0)


def favour_ends(scores: Tensor, ends: Sequence[int], factor: float, beyond: int) -> Tensor:
    """Favour end-of-sequence tokens ``beyond`` tokens after the start: a score gains its absolute
    value times factor**beyond - 1."""
    if beyond <= 0:
        return scores
    try:
        growth = factor**beyond - 1
    except OverflowError:
        growth = torch.finfo(scores.dtype).max
    out, columns = scores.clone(), list(ends)
    gain = (scores[:, columns].abs() * growth).clamp(max=torch.finfo(scores.dtype).max)
    out[:, columns] += gain.masked_fill(~scores[:, columns].isfinite(), 0.0)
    return out

"""Sampling: temperature, truncation, and the draw, in one op.

The steps are some of ``exkv.sampling``'s; each is a function here, and the reference runs them in
order. The CPU kernel finds the same candidates without sorting the vocabulary
(``exkv_ext/cpu/sample.cpp``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .registry import define_op


@define_op(
    "sample(Tensor logits, Tensor? uniforms, float temperature, int top_k, float top_p, "
    "float min_p, float typical, bool temperature_last) -> Tensor",
    fake=lambda logits, *rest: logits.new_empty(logits.shape[:1], dtype=torch.int64),
)
def sample(
    logits: Tensor,
    uniforms: Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical: float,
    temperature_last: bool,
) -> Tensor:
    """Sample one token for each row: logits (B, V), uniforms (B,) -> int64 (B,).

    Uniforms are float64 in [0, 1), drawn by the caller: the op has no other source of randomness.
    They may be None for greedy decoding: temperature 0 or top_k 1 take the first of the largest
    logits. The other arguments are those of ``SamplingParams``. Arithmetic is float32, sums of
    probabilities float64, for any float dtype of the logits.

    A row with NaN or +inf, or with -inf only, yields the token -1.

    Everything runs on the logits' device, without synchronization.

    Raises:
        ValueError: a number out of range, or uniforms that don't fit the logits; their values are
            checked on the CPU only.
    """
    _check(logits, temperature, top_k, top_p, min_p, typical)
    scores = logits.float()
    choosable = scores.amax(-1).isfinite()  # NaN if any is, -inf if all are
    if temperature == 0 or top_k == 1:
        return scores.argmax(-1).where(choosable, -1)
    uniforms = _checked_uniforms(uniforms, logits)
    scores = scores.where(choosable[:, None], 0.0)
    scores, ids = candidates(scores, temperature, top_k, top_p, min_p, typical, temperature_last)
    return ids.gather(-1, draw(scores, uniforms)[:, None])[:, 0].where(choosable, -1)


def candidates(
    scores: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical: float,
    temperature_last: bool,
) -> tuple[Tensor, Tensor]:
    """All steps but the draw. (B, V) -> scores (B, K), -inf for dropped tokens, and ids (B, K)."""
    # Top-k first: temperature preserves the order, and dividing K numbers is cheaper than V.
    if top_k > 0 or top_p < 1:
        scores, ids = keep_top_k(scores, top_k)
    else:  # no step needs sorted scores, and sorting a vocabulary takes milliseconds
        ids = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if not temperature_last:
        scores = apply_temperature(scores, temperature)
    if top_p < 1:
        scores = keep_top_p(scores, top_p)
    if min_p > 0:
        scores = keep_min_p(scores, min_p)
    if 0 < typical < 1:
        scores = keep_typical(scores, typical)
    if temperature_last:
        scores = apply_temperature(scores, temperature)
    return scores, ids


def apply_temperature(scores: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature. (B, K) -> (B, K), shifted so that the largest is 0.

    The shift changes no probability, and keeps a tiny temperature from overflowing; temperatures
    below 1e-30 are raised to it.
    """
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, 1e-30)


def keep_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keep the k largest of each row, in descending order. (B, V) -> scores (B, k), ids (B, k).

    Of equal scores the lower id comes first, and is kept in case of a tie for the k-th place. k = 0
    or k > V keeps (and sorts) all.
    """
    vocab_size = scores.shape[-1]
    if k <= 0 or k >= vocab_size or scores.device.type != "cpu":
        # On an accelerator, sorting is faster than synchronizing to count ties.
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return (values[:, :k], ids[:, :k]) if k > 0 else (values, ids)
    ids = _unordered_top_k(scores, k).sort(-1).values
    values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Drop all but the smallest leading set with a mass of at least p. (B, K) sorted -> same."""
    mass = scores.double().softmax(-1).cumsum(-1)
    before = mass.roll(1, -1)
    before[:, 0] = -math.inf  # the likeliest token always stays, even with p = 0
    return scores.masked_fill(before >= p, -math.inf)


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Drop tokens with less than min_p times the largest probability. (B, K) -> (B, K)."""
    relative = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores.masked_fill(relative < min_p, -math.inf)


def keep_typical(scores: Tensor, mass: float) -> Tensor:
    """Keep the smallest set of this mass, of the tokens whose surprise is nearest to the entropy.

    Surprise is -log p, and the entropy is its expectation (Meister et al. 2022). (B, K) -> (B, K).
    """
    log_p = scores.double().log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).nan_to_num(nan=0.0).sum(-1, keepdim=True)  # 0 * -inf is 0 here
    order = (-log_p - entropy).abs().sort(dim=-1, stable=True).indices
    before = p.gather(-1, order).cumsum(-1).roll(1, -1)
    before[:, 0] = -math.inf
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= mass)
    return scores.masked_fill(dropped, -math.inf)


def draw(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one column for each row, by inverting the cumulative distribution. (B, K), (B,) -> (B,).

    Uniforms are float64 in [0, 1). A column of probability 0 is never drawn: the cumulative sum
    does not grow there, and the search takes the first column that exceeds the number.
    """
    cdf = scores.double().softmax(-1).cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0]


def _check(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical: float
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"sample: logits {logits.dtype} {tuple(logits.shape)} must be floats (B, V), with a "
            "token to choose"
        )
    if not 0 <= temperature < math.inf or top_k < 0:
        raise ValueError(
            f"sample: temperature {temperature} and top_k {top_k} must be finite, and 0 or more"
        )
    for name, value in (("top_p", top_p), ("min_p", min_p), ("typical", typical)):
        if not 0 <= value <= 1:
            raise ValueError(f"sample: {name} is {value}; it must be from 0 to 1")


def _checked_uniforms(uniforms: Tensor | None, logits: Tensor) -> Tensor:
    if uniforms is None:
        raise ValueError("sample: temperature and top_k draw; give uniforms, or temperature 0")
    if uniforms.dtype != torch.float64 or uniforms.shape != logits.shape[:1]:
        raise ValueError(
            f"sample: uniforms are {uniforms.dtype} {tuple(uniforms.shape)}; they must be float64, "
            f"one number for each row of logits {tuple(logits.shape)}"
        )
    if uniforms.device.type != "cpu":
        return uniforms
    wrong = uniforms[~((uniforms >= 0) & (uniforms < 1))].tolist()
    if wrong:
        raise ValueError(f"sample: uniforms hold {wrong[0]}; they must be in [0, 1)")
    return uniforms


def _unordered_top_k(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, the lowest ids in case of a tie for the k-th place."""
    values, ids = scores.topk(k)
    last = values[:, -1:]
    if int((scores >= last).sum()) == ids.numel():
        return ids
    # topk leaves the order of ties undefined, and half precision makes ties common.
    above, equal = scores > last, scores == last
    room = k - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= room))
    return keep.nonzero()[:, 1].view(-1, k)

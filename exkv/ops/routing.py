"""Routers of mixtures of experts: from logits to chosen experts and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import define_op


def _fake(logits: Tensor, correction: Tensor | None, top_k: int, *rest: Any) -> tuple:
    shape = (len(logits), top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


@define_op(
    "route_experts(Tensor logits, Tensor? correction, int top_k, bool sigmoid, bool normalize, "
    "float min_sum, int groups, int top_k_groups, int best_of_group, float scale) "
    "-> (Tensor, Tensor)",
    fake=_fake,
)
def route_experts(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    min_sum: float,
    groups: int,
    top_k_groups: int,
    best_of_group: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token -> int64 and float32 (N, top_k), the best first.

    Kernels break ties as ``torch.topk`` does.

    Args:
        logits: (N, experts).
        correction: float32 (experts,), added to the scores for the choice only.
        sigmoid, normalize, min_sum, groups, top_k_groups, best_of_group, scale: see
            ``exkv.layers.routing.Router``.

    Raises:
        ValueError: contradictory numbers.
    """
    experts = logits.shape[-1]
    if logits.dim() != 2 or not 0 < top_k <= experts:
        raise ValueError(
            f"route_experts: logits {tuple(logits.shape)} must be (N, experts), of which top_k "
            f"{top_k} are taken"
        )
    if groups < 1 or experts % groups or not 0 < top_k_groups <= groups:
        raise ValueError(
            f"route_experts: {top_k_groups} of {groups} groups of equal size, of {experts} experts"
        )
    if correction is not None and correction.shape != (experts,):
        raise ValueError(
            f"route_experts: correction {tuple(correction.shape)} must have {experts} values"
        )
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    if correction is None and top_k_groups == groups:
        weights, chosen = scores.topk(top_k, dim=-1)
    else:
        preferred = scores if correction is None else scores + correction
        if top_k_groups < groups:
            preferred = _in_groups(preferred, groups, top_k_groups, best_of_group)
        chosen = preferred.topk(top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=min_sum)
    return chosen, weights if scale == 1 else weights * scale


def _in_groups(scores: Tensor, groups: int, top_k_groups: int, best_of_group: int) -> Tensor:
    """The scores (N, experts), minus infinity outside of each token's groups."""
    grouped = scores.unflatten(-1, (groups, -1))
    if not 0 < best_of_group <= grouped.shape[-1]:
        raise ValueError(
            f"route_experts: groups of {grouped.shape[-1]} experts are judged by {best_of_group}"
        )
    best = grouped.topk(best_of_group, dim=-1).values.sum(-1)  # (N, groups)
    left_out = (-best).topk(groups - top_k_groups, dim=-1).indices
    barred = torch.zeros_like(best).scatter_(-1, left_out, -torch.inf)
    return (grouped + barred.unsqueeze(-1)).flatten(-2)

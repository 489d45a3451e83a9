"""Routers of mixtures of experts: which experts a token takes, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exkv.checkpoint import ExpertsConfig, RoutedExpertsConfig
from exkv.ops.experts import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The rule by which experts are chosen and weighed.

    Attributes:
        taken: experts of each token.
        sigmoid: whether an expert's score is the sigmoid of its rating, and not the softmax of all.
        normed: whether the weights are divided by their sum.
        least: the least sum to divide by.
        groups: parts of equal size that the experts form, one behind the other.
        groups_taken: parts that a token's experts may be in: those whose two best experts have the
            highest sum of scores.
        scale: of the weights.
    """

    taken: int
    sigmoid: bool = False
    normed: bool = True
    least: float = 0.0
    groups: int = 1
    groups_taken: int = 1
    scale: float = 1.0

    @classmethod
    def of(cls, settings: ExpertsConfig, *, sigmoid: bool) -> Router:
        """The router of a config's settings."""
        taken, normed = settings.num_experts_per_tok, settings.norm_topk_prob
        if not isinstance(settings, RoutedExpertsConfig):
            return cls(taken=taken, sigmoid=sigmoid, normed=normed)
        return cls(
            taken=taken,
            sigmoid=sigmoid,
            normed=normed,
            least=settings.moe_norm_min,
            groups=settings.n_group,
            groups_taken=settings.topk_group,
            scale=settings.routed_scaling_factor,
        )

    def route(self, ratings: Tensor, correction: Tensor | None) -> Routing:
        """Choose the experts of each token.

        Args:
            ratings: floats (N, experts).
            correction: float32 (experts,), added to the scores for the choice, not for the weights.
        """
        scores = ratings.float().sigmoid() if self.sigmoid else ratings.float().softmax(-1)
        if correction is None and self.groups_taken == self.groups:
            weights, chosen = scores.topk(self.taken, dim=-1)
        else:
            preferred = scores if correction is None else scores + correction
            chosen = self._in_groups(preferred).topk(self.taken, dim=-1).indices
            weights = scores.gather(-1, chosen)
        return Routing(chosen=chosen, weights=self._weighed(weights))

    def _in_groups(self, scores: Tensor) -> Tensor:
        """The scores (N, experts), minus infinity outside of each token's groups."""
        if self.groups_taken == self.groups:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)  # (N, groups)
        left_out = (-best).topk(self.groups - self.groups_taken, dim=-1).indices
        barred = torch.zeros_like(best).scatter_(-1, left_out, -torch.inf)
        return (grouped + barred.unsqueeze(-1)).flatten(-2)

    def _weighed(self, weights: Tensor) -> Tensor:
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.least)
        return weights if self.scale == 1 else weights * self.scale

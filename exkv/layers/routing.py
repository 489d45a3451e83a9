"""Routers of mixtures of experts: which experts a token takes, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv.checkpoint import ExpertsConfig, RoutedExpertsConfig
from exkv.ops.experts import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How router logits become chosen experts and their weights.

    Attributes:
        top_k: experts per token.
        sigmoid: whether an expert's score is the sigmoid of its logit; if not, the softmax of all.
        normalize: whether the weights are divided by their sum.
        min_sum: the smallest divisor for that.
        groups: number of equal groups that consecutive experts form.
        top_k_groups: number of groups that a token's experts may come from: those whose best
            experts have the highest summed score.
        best_of_group: how many of a group's experts are summed for that.
        scale: factor of the weights.
        tolerance: of SparseMixer, see :meth:`_one_by_one`, which ignores all other attributes but
            ``top_k``; None for the usual routing.
    """

    top_k: int
    sigmoid: bool = False
    normalize: bool = True
    min_sum: float = 0.0
    groups: int = 1
    top_k_groups: int = 1
    best_of_group: int = 2
    scale: float = 1.0
    tolerance: float | None = None

    @classmethod
    def of(cls, settings: ExpertsConfig, **options: Any) -> Router:
        """The router for a config's settings; ``options`` are attributes that these don't have."""
        top_k, normalize = settings.num_experts_per_tok, settings.norm_topk_prob
        if not isinstance(settings, RoutedExpertsConfig):
            return cls(top_k=top_k, normalize=normalize, **options)
        return cls(
            top_k=top_k,
            normalize=normalize,
            min_sum=settings.moe_norm_min,
            groups=settings.n_group,
            top_k_groups=settings.topk_group,
            best_of_group=settings.best_of_group,
            scale=settings.routed_scaling_factor,
            **options,
        )

    def route(self, logits: Tensor, correction: Tensor | None) -> Routing:
        """Choose the experts of each token.

        Args:
            logits: floats (N, experts).
            correction: float32 (experts,), added to the scores for the choice only.
        """
        if self.tolerance is not None:
            return self._one_by_one(logits.float(), 2 * self.tolerance)
        exact = logits.float() if logits.dtype == torch.float64 else logits
        chosen, weights = torch.ops.exkv.route_experts(exact, correction, *self.numbers)
        return Routing(chosen=chosen, weights=weights)

    @property
    def numbers(self) -> tuple[int | bool | float, ...]:
        """Everything except the logits and their correction, as ``route_experts`` takes it."""
        return (
            *(self.top_k, self.sigmoid, self.normalize, self.min_sum),
            *(self.groups, self.top_k_groups, self.best_of_group, self.scale),
        )

    def _one_by_one(self, logits: Tensor, bound: float) -> Routing:
        """Choose the best remaining expert, ``top_k`` times. Its weight is its softmax among the
        remaining experts whose logits are below its own by at most ``bound`` times the larger of
        the two magnitudes (SparseMixer without its noise: Liu et al., 2024, arXiv 2409.12136)."""
        left, chosen, weights = logits, [], []
        for _ in range(self.top_k):
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > bound
            near = left.masked_fill(far, -torch.inf)
            weights.append(near.softmax(-1).gather(-1, index))
            chosen.append(index)
            left = left.scatter(-1, index, -torch.inf)
        return Routing(chosen=torch.cat(chosen, -1), weights=torch.cat(weights, -1))

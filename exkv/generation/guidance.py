"""Classifier-free guidance: away from what the model would say after a negative prompt.

For ``generate`` a second cache holds the negative prompts and the same new tokens; jobs have a row
more (``exkv.engine.guiding``). With log-probabilities p of the
call's own rows and n of these, the scores are n + guidance_scale * (p - n): above 1 they go away
from n, between 0 and 1 towards it (Sanchez et al., 2023, "Stay on topic with Classifier-Free
Guidance"; transformers' formula).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .runner import Runner

if TYPE_CHECKING:
    from .processors import SoFar


class Guidance:
    """The processor of one call.

    Args:
        runner: of a cache with a row for each sequence.
        negative: tokens of each row's negative prompt.
    """

    def __init__(self, runner: Runner, negative: Sequence[Sequence[int]], scale: float) -> None:
        self._runner = runner
        self._negative = negative
        self._scale = scale
        self._step = -1  # the last one, whose logits of the negative rows these are
        self._known: Tensor | None = None

    def __call__(self, scores: Tensor, at: SoFar) -> Tensor:
        """Scores (N, V) -> guided ones; a step may be asked for twice."""
        if self._step != at.new:
            self._known = None  # not to be there beside the next ones
            self._known, self._step = self._run(at), at.new
        assert self._known is not None
        return guided(scores, self._known.to(scores.device), self._scale)

    def _run(self, at: SoFar) -> Tensor:
        if at.new == 0:
            return self._runner.prefill(self._negative)
        newest = at.tokens[:, -1].clamp(max=at.vocab_size - 1).tolist()
        return self._runner.step(newest, [True] * len(newest))


def guided(logits: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Scores (N, V), float32, from logits after the prompts and after the negative ones."""
    away = negative.float().log_softmax(-1)
    return away + scale * (logits.float().log_softmax(-1) - away)

"""What a decoding loop is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from .config import GenerationConfig
from .processors import needs_history, process
from .prompts import Prompts
from .runner import Runner

#: (ids (N, tokens), the step's scores (N, V) or None) -> whether to stop: one bool, or one a row.
StoppingCriterion: TypeAlias = Callable[[Tensor, Tensor | None], bool | Tensor]


class Streamer(Protocol):
    """What transformers' streamers are: ``TextIteratorStreamer`` and the like."""

    def put(self, value: Tensor) -> None:
        """Take the prompts' ids (B, T), and then each step's tokens (B,)."""

    def end(self) -> None:
        """There is no more to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns; N rows, those of a prompt
    beside each other.

    Attributes:
        sequences: int64 (N, tokens), prompts and new tokens.
        sequences_scores: float32 (N,), the beams' log-probability over the length's power; None
            without beams.
        texts: the sequences as texts, where there is a tokenizer.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The new tokens of N sequences: int64 (N, n) filled up with padding, how many of each are
    its own, and the beams' scores (N,)."""

    tokens: Tensor
    lengths: tuple[int, ...]
    scores: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of ``generate``. The config's ``eos_token_id`` and ``pad_token_id`` are resolved."""

    runner: Runner
    prompts: Prompts
    config: GenerationConfig
    criteria: Sequence[StoppingCriterion] = ()
    streamer: Streamer | None = None
    rng: torch.Generator | None = None

    def process(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """The config's chain over scores (N, V) of what follows prompts and tokens (N, n)."""
        history: Sequence[Tensor] = ()
        if needs_history(self.config):
            # Only padding, after a sequence's end, may lie outside of the vocabulary.
            history = self.prompts.histories(tokens.clamp(max=scores.shape[1] - 1))
        return process(scores, history, self.config)

    def draw(self, probabilities: Tensor, count: int) -> Tensor:
        """``count`` columns of each row, without one twice: (N, K) -> int64 (N, count)."""
        return torch.multinomial(probabilities, count, generator=self.rng)

    def met(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences a stopping criterion ends: new tokens (N, n) -> bool (N,)."""
        stop = torch.zeros(len(tokens), dtype=torch.bool)
        if self.criteria:
            ids = self.prompts.followed_by(tokens)
            for criterion in self.criteria:
                stop = stop | torch.as_tensor(criterion(ids, scores), device="cpu").bool()
        return stop

    def ended(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences are at their end, by token, criterion or number: bool (N,)."""
        if tokens.shape[1] >= self.config.max_new_tokens:
            self.met(tokens, scores)  # a criterion may count its calls
            return torch.ones(len(tokens), dtype=torch.bool)
        ends = torch.tensor(self.config.eos_token_id, dtype=torch.int64)
        return torch.isin(tokens[:, -1], ends) | self.met(tokens, scores)

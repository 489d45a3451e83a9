"""What a decoding loop is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import GenerationConfig
from .fallback import Fallback
from .hooks import Hooks
from .processors import process
from .prompts import Prompts
from .runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns; N rows, those of a prompt
    beside each other.

    Attributes:
        sequences: int64 (N, tokens), prompts and new tokens.
        sequences_scores: float32 (N,), the beams' log-probability over the length's power; None
            without beams.
        texts: the sequences as texts, where there is a tokenizer.
        scores, logits: float32 (N, V) of each step, or (B * num_beams, V) with beams: what the
            tokens were chosen by (with beams log-probabilities), and what the model said. None
            unless ``output_scores``, ``output_logits``. A row that has ended, or whose prompt's
            search is over, runs no more: its logits are 0.
        beam_indices: int64 (N, new tokens), which row of ``scores`` each new token was chosen
            from, -1 after a sequence's end; None without beams, and with groups of them.
        fallbacks: what was done where memory ran out, in order; () where it didn't.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    texts: tuple[str, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The new tokens of N sequences: int64 (N, n) filled up with padding, how many of each are
    its own, the beams' scores (N,), and the rows that their tokens were chosen from (N, n)."""

    tokens: Tensor
    lengths: tuple[int, ...]
    scores: Tensor | None = None
    beam_indices: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Steps:
    """The scores and logits of the steps so far, where a call asks for them."""

    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of ``generate``. The config's ids and numbers of tokens are resolved."""

    runner: Runner
    prompts: Prompts
    config: GenerationConfig
    hooks: Hooks
    rng: torch.Generator | None = None
    steps: Steps = field(default_factory=Steps)

    def process(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """The chain over scores (N, V) of what follows prompts and new tokens (N, n)."""
        return process(scores, tokens, self.prompts, self.config, self.hooks)

    def process_step(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The scores of a step whose logits are (N, V), with beams as log-probabilities, kept
        where the call asks for them."""
        if self.config.output_logits:
            self.steps.logits.append(logits.clone())  # a processor may write over them
        scores = logits.log_softmax(-1) if self.config.num_beams > 1 else logits
        scores = self.process(scores, tokens)
        if self.config.output_scores:
            self.steps.scores.append(scores)
        return scores

    def draw(self, probabilities: Tensor, count: int) -> Tensor:
        """``count`` columns of each row, without one twice: (N, K) -> int64 (N, count)."""
        return torch.multinomial(probabilities, count, generator=self.rng)

    def met(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences a stopping criterion ends: new tokens (N, n) -> bool (N,)."""
        if not self.hooks.stopping_criteria:
            return torch.zeros(len(tokens), dtype=torch.bool)
        return self.hooks.met(self.prompts.followed_by(tokens), scores)

    def ended(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences are at their end, by token, criterion or number: bool (N,)."""
        if tokens.shape[1] >= self.config.max_new_tokens:
            self.met(tokens, scores)  # a criterion may count its calls
            return torch.ones(len(tokens), dtype=torch.bool)
        ends = torch.tensor(self.config.eos_token_id, dtype=torch.int64)
        return torch.isin(tokens[:, -1], ends) | self.met(tokens, scores)

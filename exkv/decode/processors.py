"""The logits processors of a call of ``generate``: the steps that its config asks for
(``exkv.sampling.huggingface``), with guidance and the caller's functions in between. A call that
needs none chooses by the unprocessed logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exkv.generation.config import ResolvedConfig
from exkv.sampling import huggingface
from exkv.sampling.huggingface import Processor

if TYPE_CHECKING:
    from .guidance import Guidance
    from .hooks import Hooks
    from .prompts import Prompts

__all__ = ["Processor", "SoFar", "processors"]


@dataclass(frozen=True, kw_only=True)  # no slots, for cached_property: several processors use it
class SoFar:
    """Prompts and new tokens (N, n), N / B for each prompt.

    Attributes:
        tokens: on the host.
        vocab_size: ids from here on are padding, after a sequence's end.
        device: of the scores.
    """

    prompts: Prompts
    tokens: Tensor
    vocab_size: int
    device: torch.device

    @property
    def new(self) -> int:
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        return self.prompts.width

    @cached_property
    def histories(self) -> list[Tensor]:
        """The tokens of each sequence without padding, on the scores' device."""
        return self.prompts.histories(self._tokens, self.device)

    @cached_property
    def histories_on_host(self) -> list[Tensor]:
        """:attr:`histories` on the host."""
        return self.prompts.histories(self._tokens, self.tokens.device)

    @cached_property
    def prompt_histories(self) -> list[Tensor]:
        """The tokens of each sequence's prompt, on the scores' device."""
        return self.prompts.histories(self.tokens[:, :0], self.device)

    @property
    def _tokens(self) -> Tensor:
        return self.tokens.clamp(max=self.vocab_size - 1)

    @cached_property
    def whole(self) -> Tensor:
        """Prompts, padded on the left, and tokens: (N, W + n)."""
        return self.prompts.followed_by(self.tokens)


def processors(
    config: ResolvedConfig, hooks: Hooks, guidance: Guidance | None = None
) -> tuple[Processor, ...]:
    """The processors that a call needs, in order."""
    given: dict[str, Processor] = {}
    rows = config.num_return_sequences  # of a prompt
    if config.num_beams > 1:
        rows = config.num_beams // config.num_beam_groups
    if guidance is not None:
        given["guidance"] = guidance
    if hooks.prefix_allowed_tokens_fn is not None:
        given["prefix_allowed_tokens_fn"] = lambda x, at: hooks.keep_allowed(x, at.whole, rows)
    if hooks.logits_processor:
        given["logits_processor"] = lambda x, at: hooks.process(x, at.whole)
    return tuple(huggingface.processors(config, given))

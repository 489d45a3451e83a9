"""Log-probabilities of tokens, as OpenAI's and vLLM's servers return them: from the softmax of the
model's logits (after guidance, if a job has it), before biases, penalties, temperature, truncation
and grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .scores import where_there_is_room

#: Upper bound on alternatives a token.
MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token: the chosen token.
        logprob: its log-probability.
        top: the likeliest tokens with theirs, in descending order, possibly including the chosen
            one.
        logits: (vocabulary,) float32 on the host, if asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    logits: Tensor | None = field(default=None, compare=False, repr=False)


def token_logprobs(logits: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
    """Log-probabilities of each row's token and of the ``most`` likeliest ones, from logits
    (B, V)."""
    chosen = torch.tensor(tokens)[:, None]

    def read(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = x.float().log_softmax(-1)
        values, ids = scores.topk(min(most, scores.shape[1]))
        return scores.gather(1, chosen.to(x.device))[:, 0], values, ids

    own, values, ids = (x.tolist() for x in where_there_is_room(read, logits))
    return [
        TokenLogprobs(token=token, logprob=logprob, top=tuple(zip(row_ids, row, strict=True)))
        for token, logprob, row_ids, row in zip(tokens, own, ids, values, strict=True)
    ]

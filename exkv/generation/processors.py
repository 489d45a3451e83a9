"""What is done to the scores of the next token, in transformers' order.

Guidance; biases, penalties, forbidden n-grams and words; ends of sequences that come too early;
what the caller's function allows; tokens that are forced or suppressed; the caller's own
processors; and where tokens are drawn, what ``truncation`` does. :func:`processors` picks those
that a call needs; a call that needs none chooses by the logits as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor

from .config import ResolvedConfig
from .guidance import Guidance
from .hooks import Hooks
from .prompts import Prompts
from .sampler import penalize_repetition
from .truncation import truncate


@dataclass(frozen=True, kw_only=True)  # no slots: several processors ask for what is kept here
class SoFar:
    """Prompts and new tokens (N, n), N / B for each prompt.

    Attributes:
        tokens: on the host.
        vocab_size: ids from here on are padding, after a sequence's end.
        device: where the scores lie.
    """

    prompts: Prompts
    tokens: Tensor
    vocab_size: int
    device: torch.device

    @property
    def new(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def histories(self) -> list[Tensor]:
        """The tokens of each sequence, padding left out, beside the scores."""
        return self.prompts.histories(self._tokens, self.device)

    @cached_property
    def histories_on_host(self) -> list[Tensor]:
        """The same on the host."""
        return self.prompts.histories(self._tokens, self.tokens.device)

    @cached_property
    def prompt_histories(self) -> list[Tensor]:
        """The tokens of each sequence's prompt, beside the scores."""
        return self.prompts.histories(self.tokens[:, :0], self.device)

    @property
    def _tokens(self) -> Tensor:
        return self.tokens.clamp(max=self.vocab_size - 1)

    @cached_property
    def whole(self) -> Tensor:
        """Prompts, padded on the left, and tokens: (N, W + n)."""
        return self.prompts.followed_by(self.tokens)


#: Scores (N, V) of what follows -> scores (N, V).
Processor: TypeAlias = Callable[[Tensor, SoFar], Tensor]


def processors(
    config: ResolvedConfig, hooks: Hooks, width: int, guidance: Guidance | None = None
) -> tuple[Processor, ...]:
    """Those that a call needs, in order, for prompts of ``width`` tokens with their padding."""
    steps: list[Processor] = [
        *(() if guidance is None else (guidance,)),
        *_of_histories(config),
        *_of_ends_and_prefixes(config, hooks),
        *_of_forced(config, width),
    ]
    if config.remove_invalid_values:
        steps.append(lambda scores, _: remove_invalid(scores))
    if config.exponential_decay_length_penalty is not None:
        start, factor = config.exponential_decay_length_penalty
        ends = config.eos_token_id
        steps.append(lambda x, at: favour_ends(x, ends, factor, at.new - int(start)))
    steps += _of_suppressed(config, width)
    if hooks.logits_processor:
        steps.append(lambda scores, at: hooks.process(scores, at.whole))
    if config.do_sample:
        steps.append(lambda scores, _: truncate(scores, config))
    if config.renormalize_logits:
        steps.append(lambda scores, _: scores.log_softmax(-1))
    return tuple(steps)


def _of_histories(config: ResolvedConfig) -> list[Processor]:
    """What depends on the tokens so far, padding left out."""
    steps: list[Processor] = []
    if (biases := config.sequence_bias) is not None:
        steps.append(lambda x, at: bias_sequences(x, at.histories_on_host, biases))
    if (reward := config.encoder_repetition_penalty) != 1:
        steps.append(lambda x, at: penalize_repetition(x, at.prompt_histories, 1 / reward))
    if (penalty := config.repetition_penalty) != 1:
        steps.append(lambda x, at: penalize_repetition(x, at.histories, penalty))
    if n := config.no_repeat_ngram_size:
        steps.append(lambda x, at: forbid_ngrams(x, at.histories, at.histories, n))
    if m := config.encoder_no_repeat_ngram_size:
        steps.append(lambda x, at: forbid_ngrams(x, at.histories, at.prompt_histories, m))
    if config.bad_words_ids is not None:
        ends = {(token,) for token in config.eos_token_id}
        words = [word for word in config.bad_words_ids if word not in ends]
        steps.append(lambda x, at: forbid_words(x, at.histories_on_host, words))
    return steps


def _of_ends_and_prefixes(config: ResolvedConfig, hooks: Hooks) -> list[Processor]:
    steps: list[Processor] = []
    least, rows = config.min_new_tokens, config.num_return_sequences  # of a prompt
    if config.num_beams > 1:
        rows = config.num_beams // config.num_beam_groups
    if least:
        ends = config.eos_token_id
        steps.append(lambda x, at: forbid(x, ends) if at.new < least else x)
    if hooks.prefix_allowed_tokens_fn is not None:
        steps.append(lambda x, at: hooks.keep_allowed(x, at.whole, rows))
    return steps


def _of_forced(config: ResolvedConfig, width: int) -> list[Processor]:
    first, last = config.forced_bos_token_id, config.forced_eos_token_id
    steps: list[Processor] = []
    if first is not None and width == 1:
        steps.append(partial(_force_at, 0, (first,)))
    if last is not None:
        steps.append(partial(_force_at, config.max_new_tokens - 1, last))
    return steps


def _of_suppressed(config: ResolvedConfig, width: int) -> list[Processor]:
    steps: list[Processor] = []
    if (never := config.suppress_tokens) is not None:
        steps.append(lambda x, _: forbid(x, never))
    if (not_first := config.begin_suppress_tokens) is not None:
        # After the token that was forced.
        begin = 1 if width == 1 and config.forced_bos_token_id is not None else 0
        steps.append(lambda x, at: forbid(x, not_first) if at.new == begin else x)
    return steps


def _force_at(new: int, ids: Sequence[int], scores: Tensor, at: SoFar) -> Tensor:
    return force(scores, ids) if at.new == new else scores


def bias_sequences(
    scores: Tensor,
    history: Sequence[Tensor],
    biases: Sequence[tuple[tuple[int, ...], float]],
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


def forbid_ngrams(
    scores: Tensor, history: Sequence[Tensor], among: Sequence[Tensor], n: int
) -> Tensor:
    """Drop each token that would complete n tokens that are in a row's ``among``."""
    out = scores.clone()
    for row, ids, known in zip(out, history, among, strict=True):
        if len(ids) >= n - 1 and len(known) >= n:
            ngrams = known.unfold(0, n, 1)  # (len - n + 1, n)
            begun = (ngrams[:, :-1] == ids[len(ids) - n + 1 :]).all(-1)
            row[ngrams[begun, -1]] = -math.inf
    return out


def forbid_words(
    scores: Tensor, history: Sequence[Tensor], words: Sequence[tuple[int, ...]]
) -> Tensor:
    """Drop each token that would complete a word, which is one token or several in a row."""
    out = scores.clone()
    longest = max(map(len, words), default=0)
    for row, ids in zip(out, history, strict=True):
        recent = tuple(ids[max(0, len(ids) - longest) :].tolist())
        last = [w[-1] for w in words if recent[len(recent) - len(w) + 1 :] == w[:-1]]
        row[last] = -math.inf
    return out


def forbid(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Drop these tokens; those outside of the vocabulary don't come up anyway."""
    columns = torch.isin(torch.arange(scores.shape[1]), torch.tensor(ids, dtype=torch.int64))
    return scores.masked_fill(columns.to(scores.device), -math.inf)


def force(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Leave only these tokens, all of them certain."""
    forced = torch.full_like(scores, -math.inf)
    forced[:, list(ids)] = 0.0
    return forced


def favour_ends(scores: Tensor, ends: Sequence[int], factor: float, beyond: int) -> Tensor:
    """Make the tokens that end a sequence likelier, ``beyond`` tokens after the start: a score
    gains its size times factor**beyond - 1."""
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


def remove_invalid(scores: Tensor) -> Tensor:
    """NaN becomes 0, and infinities the largest numbers."""
    limits = torch.finfo(scores.dtype)
    return scores.nan_to_num(nan=0.0, posinf=limits.max, neginf=limits.min)

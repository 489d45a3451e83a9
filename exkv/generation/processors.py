"""What is done to the scores of the next token, in transformers' order.

Repetition penalty, forbidden n-grams and words; ends of sequences that come too early; what the
caller's function allows; tokens that are forced or suppressed; the caller's own processors; and
where tokens are drawn, what ``truncation`` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .config import GenerationConfig
from .hooks import Hooks
from .prompts import Prompts
from .sampler import penalize_repetition
from .truncation import truncate


def process(
    scores: Tensor, tokens: Tensor, prompts: Prompts, config: GenerationConfig, hooks: Hooks
) -> Tensor:
    """The whole chain: float32 (N, V) of what follows the prompts and new tokens (N, n), N / B
    for each prompt -> (N, V). The config's lengths are resolved."""
    new, width = tokens.shape[1], prompts.width
    scores = mind_history(scores, tokens, prompts, config)
    if new < (config.min_new_tokens or 0):
        scores = forbid(scores, config.eos_token_id)
    if hooks.prefix_allowed_tokens_fn is not None:
        beams = config.num_beams // config.num_beam_groups
        scores = hooks.keep_allowed(scores, prompts.followed_by(tokens), beams)
    scores = force_and_suppress(scores, new, width, config)
    if hooks.logits_processor:
        scores = hooks.process(scores, prompts.followed_by(tokens))
    if config.do_sample:
        scores = truncate(scores, config)
    return scores.log_softmax(-1) if config.renormalize_logits else scores


def mind_history(
    scores: Tensor, tokens: Tensor, prompts: Prompts, config: GenerationConfig
) -> Tensor:
    """What depends on the tokens so far, padding left out."""
    penalty, n, words = (
        config.repetition_penalty,
        config.no_repeat_ngram_size,
        config.bad_words_ids,
    )
    if penalty == 1 and not n and words is None:
        return scores
    # Only padding, after a sequence's end, may lie outside of the vocabulary.
    history = prompts.histories(tokens.clamp(max=scores.shape[1] - 1))
    if penalty != 1:
        scores = penalize_repetition(scores, history, penalty)
    if n:
        scores = forbid_repeated_ngrams(scores, history, n)
    if words is not None:
        ends = {(token,) for token in config.eos_token_id}
        scores = forbid_words(scores, history, [word for word in words if word not in ends])
    return scores


def force_and_suppress(scores: Tensor, new: int, width: int, config: GenerationConfig) -> Tensor:
    """Tokens that are forced or suppressed after ``width`` tokens of prompt and ``new`` others."""
    first = config.forced_bos_token_id
    if first is not None and width + new == 1:
        scores = force(scores, [first])
    if config.forced_eos_token_id is not None and new == config.max_new_tokens - 1:
        scores = force(scores, config.forced_eos_token_id)
    if config.suppress_tokens is not None:
        scores = forbid(scores, config.suppress_tokens)
    begin = 1 if width == 1 and first is not None else 0  # after the token that was forced
    if config.begin_suppress_tokens is not None and new == begin:
        scores = forbid(scores, config.begin_suppress_tokens)
    return scores


def forbid_repeated_ngrams(scores: Tensor, history: Sequence[Tensor], n: int) -> Tensor:
    """Drop each token that would complete n tokens which the row has had already."""
    out = scores.clone()
    for row, ids in zip(out, history, strict=True):
        if len(ids) >= n:
            ngrams = ids.unfold(0, n, 1)  # (len - n + 1, n)
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
    return scores.masked_fill(columns, -math.inf)


def force(scores: Tensor, ids: Sequence[int]) -> Tensor:
    """Leave only these tokens, all of them certain."""
    forced = torch.full_like(scores, -math.inf)
    forced[:, list(ids)] = 0.0
    return forced

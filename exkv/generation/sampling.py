"""Greedy decoding and sampling: one token a step for every sequence that goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exkv.sampling.chain import greedy
from exkv.sampling.scores import check_choosable, check_largest, to_host, where_there_is_room

from .task import Completions, Task


def sample_sequences(task: Task) -> Completions:
    """Decode each prompt ``num_return_sequences`` times.

    A sequence that has ended brings no more tokens to the model. Random numbers are drawn for it
    all the same, as transformers does: the others' would be different ones.
    """
    config, streamer = task.config, task.hooks.streamer
    logits = task.prefill(config.num_return_sequences)
    if streamer is not None:
        none = torch.empty((len(logits), 0), dtype=torch.int64)
        streamer.put(task.prompts.followed_by(none))
    tokens = torch.empty((len(logits), 0), dtype=torch.int64)
    lengths = torch.zeros(len(logits), dtype=torch.int64)
    going = torch.ones(len(logits), dtype=torch.bool)
    while True:
        drawn, scores, placed = next_tokens(task, logits, tokens, going)
        del logits  # not to be there beside those of the next step
        chosen = torch.where(going, drawn, config.pad_token_id)
        tokens = torch.cat((tokens, chosen[:, None]), -1)
        lengths += going
        going &= ~task.ended(tokens, scores)
        if streamer is not None:
            streamer.put(chosen)
        if not going.any():
            break
        logits = task.step(chosen, going, placed)
    if streamer is not None:
        streamer.end()
    return Completions(tokens=tokens, lengths=tuple(lengths.tolist()))


def next_tokens(
    task: Task, logits: Tensor, tokens: Tensor, going: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A token for each sequence (N,), the scores that it was chosen by where others may look at
    them, and the tokens on the device where they were chosen there; logits (N, V), tokens so far
    (N, n), which go on (N,).

    Raises:
        ValueError: a sequence that goes on has no token to choose.
    """
    if task.takes_likeliest:
        placed = where_there_is_room(greedy, logits)
        found = placed.cpu()
        if bool((found[going] < 0).any()):
            check_choosable(logits, "the logits", going=going)
        # A row that has ended may have no token; it brings none, but must not have one below 0.
        return found, None, None if placed.is_cpu else placed.clamp(min=0)
    chosen = where_there_is_room(lambda x: choose(task, x, tokens, going), logits)
    found, largest, best = to_host(chosen.tokens, chosen.largest_logit, chosen.scores.amax(-1))
    task.check_logits(largest)
    drawn = task.config.do_sample
    check_largest(best, "the processed scores", going=going, infinite=not drawn)
    # Nobody looks at others, and the next step may need their memory.
    scores = chosen.scores if task.is_watched else None
    return found, scores, None if chosen.tokens.is_cpu else chosen.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a step chose, where its logits lie: tokens int64 (N,), the scores (N, V) that they were
    chosen by, and the largest logit of each row (N,)."""

    tokens: Tensor
    scores: Tensor
    largest_logit: Tensor


def choose(task: Task, logits: Tensor, tokens: Tensor, going: Tensor) -> Chosen:
    """A token for each sequence, whatever its scores are."""
    scores, largest = task.process_step(logits, tokens, going)
    chosen = task.draw(scores, 1)[:, 0] if task.config.do_sample else scores.argmax(-1)
    return Chosen(tokens=chosen, scores=scores, largest_logit=largest)

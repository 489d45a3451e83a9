"""Greedy decoding and sampling: one token a step for every sequence that goes on."""

from __future__ import annotations

import torch

from .task import Completions, Task


def sample_sequences(task: Task) -> Completions:
    """Decode each prompt ``num_return_sequences`` times.

    A sequence that has ended brings no more tokens to the model. Random numbers are drawn for it
    all the same, as transformers does: the others' would be different ones.
    """
    config, streamer = task.config, task.hooks.streamer
    logits = task.runner.prefill(task.prompts.rows, config.num_return_sequences)
    if streamer is not None:
        streamer.put(task.prompts.followed_by(logits.new_empty((len(logits), 0)).long()))
    tokens = torch.empty((len(logits), 0), dtype=torch.int64)
    lengths = torch.zeros(len(logits), dtype=torch.int64)
    going = torch.ones(len(logits), dtype=torch.bool)
    while True:
        scores = task.process_step(logits, tokens)
        drawn = task.draw(scores.softmax(-1), 1)[:, 0] if config.do_sample else scores.argmax(-1)
        chosen = torch.where(going, drawn, config.pad_token_id)
        tokens = torch.cat((tokens, chosen[:, None]), -1)
        lengths += going
        going &= ~task.ended(tokens, scores)
        if streamer is not None:
            streamer.put(chosen)
        if not going.any():
            break
        logits = task.runner.step(chosen, going)
    if streamer is not None:
        streamer.end()
    return Completions(tokens=tokens, lengths=tuple(lengths.tolist()))

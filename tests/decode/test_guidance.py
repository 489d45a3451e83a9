"""Classifier-free guidance gives transformers' scores and tokens."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from generated import check_equal

ROWS = [[5, 6, 7, 8, 9, 4], [3, 11, 12, 5, 6, 7]]
NEGATIVE = torch.tensor([[9, 8, 7], [4, 5, 5]])


@contextmanager
def forward_calls(model):
    """Record each call's number of tokens a row."""
    calls, forward = [], model.forward

    def spy(ids, cache=None, **options):
        calls.append(list(options["new_lens"]))
        return forward(ids, cache, **options)

    model.forward = spy
    try:
        yield calls
    finally:
        del model.forward


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.7},
        {"guidance_scale": 3.0, "negative_prompt_ids": NEGATIVE},
        {"guidance_scale": 0.4, "negative_prompt_ids": NEGATIVE, "repetition_penalty": 1.3},
        {"guidance_scale": 2.0, "negative_prompt_ids": NEGATIVE, "do_sample": True, "top_k": 5},
    ],
    ids=["last token", "negative prompt", "towards it", "sampled"],
)
def test_scores_and_tokens_are_transformers(pair, options):
    count = len(pair[1].caches)
    check_equal(pair, ROWS, max_new_tokens=12, output_scores=True, **options)
    assert len(pair[1].caches) == count  # the second cache is gone


def test_ended_row_does_not_run(pair):
    """Nor does its negative prompt; the other row still gives transformers' tokens."""
    options = {"guidance_scale": 2.0, "negative_prompt_ids": NEGATIVE, "max_new_tokens": 12}
    _, model = pair
    free = model.generate(torch.tensor(ROWS), **options)[:, len(ROWS[0]) :].tolist()
    end = next(token for token in free[0][:-1] if token not in free[1])
    with forward_calls(model) as calls:
        found = check_equal(pair, ROWS, eos_token_id=end, pad_token_id=0, **options)
    assert found.sequences[0, -1] == 0 and found.sequences.shape[1] == len(ROWS[0]) + 12
    assert calls.count([0, 1]) in range(2, 23, 2)  # its own and the negative prompt's

"""Classifier-free guidance gives transformers' scores and tokens."""

from __future__ import annotations

import pytest
import torch
from generated import check_equal

ROWS = [[5, 6, 7, 8, 9, 4], [3, 11, 12, 5, 6, 7]]
NEGATIVE = torch.tensor([[9, 8, 7], [4, 5, 5]])


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

"""transformers' generate and ours on the same tiny model, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from on_cpu import on_cpu
from references import diverse_beams
from tiny import llama, reference, save
from transformers import PreTrainedModel

from exkv import GenerateOutput, KVCache, Model

ROWS = list(diverse_beams.ROWS)
PAD = diverse_beams.CHANGES["pad_token_id"]
WIDTH = max(map(len, ROWS))


def pair_of(seed: int, folder: Path) -> tuple[PreTrainedModel, Model]:
    """transformers' model and ours with the same weights, on few tokens, so that sequences end."""
    theirs = reference(llama(**diverse_beams.CHANGES), seed=seed)
    ours = on_cpu(save(theirs, folder))
    return theirs, ours


def generate_both(
    pair: tuple[PreTrainedModel, Model],
    rows: list[list[int]],
    cache: KVCache | None = None,
    **options: Any,
) -> tuple[Any, GenerateOutput]:
    """What both give for the same rows, padded on the left, and the same random numbers; ours on
    this cache."""
    theirs, ours = pair
    call = {**diverse_beams.padded(rows), "return_dict_in_generate": True, **options}
    torch.manual_seed(5)
    expected = theirs.generate(**{**call, "output_scores": True})
    torch.manual_seed(5)
    return expected, ours.generate(**call, cache=cache)


def check_equal(
    pair: tuple[PreTrainedModel, Model], rows: list[list[int]], **options: Any
) -> GenerateOutput:
    """Both give the same tokens, and beams the same scores; ours."""
    expected, found = generate_both(pair, rows, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    if options.get("num_beams", 1) > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    return found

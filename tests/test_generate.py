"""``Model.generate`` gives transformers' own tokens, and refuses what makes no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from references import diverse_beams
from tiny import llama, reference, save, save_tokenizer

from exkv import Model

ROWS = list(diverse_beams.ROWS)
ENDS = diverse_beams.CHANGES["eos_token_id"]
PAD = diverse_beams.CHANGES["pad_token_id"]
WIDTH = max(map(len, ROWS))


@pytest.fixture(scope="module", params=diverse_beams.SEEDS, ids=lambda seed: f"weights{seed}")
def pair(request, tmp_path_factory):
    """transformers' model and ours with the same weights."""
    theirs = reference(llama(**diverse_beams.CHANGES), seed=request.param)
    ours = Model(save(theirs, tmp_path_factory.mktemp("model")))
    ours.load(devices=["cpu"])
    return theirs, ours


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One that never ends by itself, with a tokenizer."""
    folder = save(reference(llama(eos_token_id=None)), tmp_path_factory.mktemp("model"))
    model = Model(save_tokenizer(folder), max_input_len=16)
    model.load(devices=["cpu"])
    return model


def check_equal(pair: tuple[Any, Model], rows: list[list[int]], **options: Any) -> Any:
    """Both give the same tokens, and beams the same scores; ours."""
    theirs, ours = pair
    call = {**diverse_beams.padded(rows), "return_dict_in_generate": True, **options}
    torch.manual_seed(5)
    expected = theirs.generate(**call, output_scores=True)
    torch.manual_seed(5)
    found = ours.generate(**call)
    assert found.sequences.tolist() == expected.sequences.tolist()
    if options.get("num_beams", 1) > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    return found


# transformers' tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 0.7},
        {"eos_token_id": 17},
    ],
    ids=str,
)
def test_greedy(pair, rows, options):
    check_equal(pair, rows, **{"max_new_tokens": 20, "do_sample": False, **options})


def test_no_token_twice(pair):
    # Of one row only: transformers counts the padding of the others as a token that was there.
    check_equal(pair, ROWS[:1], no_repeat_ngram_size=1, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0},
        {"temperature": 0.3, "top_k": 5},
        {"temperature": 1.7, "top_p": 0.7},
        {"top_k": 0, "min_p": 0.2},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "top_p": 0.8},
        {"num_return_sequences": 3},
    ],
    ids=str,
)
def test_sampling(pair, rows, options):
    check_equal(pair, rows, do_sample=True, max_new_tokens=20, **options)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_beams(pair, num_beams, length_penalty, early_stopping):
    check_equal(
        pair,
        ROWS,
        num_beams=num_beams,
        num_return_sequences=num_beams - 1,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=16,
        do_sample=False,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_id": 17},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"max_new_tokens": 1, "num_return_sequences": 4},
        {"do_sample": True},
        {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.5, "min_p": 0.1},
        {"do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_beams_with_other_settings(pair, options):
    check_equal(pair, ROWS, **{"num_beams": 4, "max_new_tokens": 12, "do_sample": False, **options})


# Groups of beams ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(diverse_beams.CALLS)))
def test_groups_of_beams(pair, request, index):
    theirs, ours = pair
    cases = json.loads(diverse_beams.FILE.read_text())
    options = diverse_beams.CALLS[index]
    seed = request.node.callspec.params["pair"]
    (case,) = (c for c in cases if (c["seed"], c["options"]) == (seed, options))
    assert case["weights"] == diverse_beams.checksum(theirs), "other weights than the references'"
    prompts = diverse_beams.padded(diverse_beams.rows_of(options))
    found = ours.generate(**prompts, **diverse_beams.call_of(options))
    # transformers 4.48 writes its first end-of-sequence token for whichever it was.
    found.sequences[:, WIDTH:][found.sequences[:, WIDTH:] == ENDS[1]] = ENDS[0]
    assert found.sequences.tolist() == case["sequences"]
    torch.testing.assert_close(found.sequences_scores, torch.tensor(case["scores"]))

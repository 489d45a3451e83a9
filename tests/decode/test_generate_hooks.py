"""The caller's functions in each step of ``Model.generate`` see and do the same as in
transformers."""

from __future__ import annotations

import json

import pytest
import torch
from generated import PAD, ROWS, WIDTH, check_equal
from references import diverse_beams
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "beam-sampling": {"do_sample": True, "num_beams": 3, "temperature": 1.3, "top_k": 20},
}


@pytest.fixture(scope="module")
def ours(pairs):
    return pairs[0][1]


# logits_processor -----------------------------------------------------------------------------


def lean(ids, scores):
    """Depends on the newest token and, by -inf, on earlier processors."""
    favoured = (ids[:, -1:] * 7 + torch.arange(5)) % scores.shape[1]
    out = scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))
    return torch.where(scores == -torch.inf, -torch.inf, out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [5, 18]}])
def test_custom_processor(pair, mode, options):
    call = {"max_new_tokens": 14, **MODES[mode], **options}
    found = check_equal(pair, ROWS, logits_processor=[lean], **call)
    without = check_equal(pair, ROWS, **call)
    assert found.sequences.tolist() != without.sequences.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_several_processors_run_one_after_the_other(pair, mode):
    def halve(ids, scores):
        return scores / 2

    for several in ([lean, halve], [halve, lean]):
        check_equal(pair, ROWS, logits_processor=several, max_new_tokens=14, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_transformers_own_processors_take_the_place_of_fields(pair, mode):
    call = {"max_new_tokens": 14, **MODES[mode]}
    ends = diverse_beams.CHANGES["eos_token_id"]
    theirs = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), MinNewTokensLengthLogitsProcessor(WIDTH, 6, ends)]
    )
    given = check_equal(pair, ROWS[:1], logits_processor=theirs, **call)
    fields = check_equal(pair, ROWS[:1], repetition_penalty=1.3, min_new_tokens=6, **call)
    assert given.sequences.tolist() == fields.sequences.tolist()


def test_custom_processor_gets_the_same_arguments_as_in_transformers(pair):
    seen = []

    def watch(ids, scores):
        seen.append((ids.tolist(), scores.shape, scores.dtype))
        return scores

    check_equal(pair, ROWS, logits_processor=[watch], max_new_tokens=10, do_sample=False)
    half = len(seen) // 2
    assert seen[:half] == seen[half:] and half > 1
    assert seen[0] == (diverse_beams.padded(ROWS)["input_ids"].tolist(), (3, 32), torch.float32)


def test_custom_processor_runs_before_sampling_steps(pair):
    """The nucleus of flattened scores is wider."""

    def flatten(ids, scores):
        return scores / 10

    call = {"do_sample": True, "top_p": 0.5, "top_k": 0, "max_new_tokens": 14}
    check_equal(pair, ROWS, logits_processor=[flatten], **call)
    check_equal(pair, ROWS, logits_processor=[flatten, TopPLogitsWarper(0.9)], **call)


@pytest.mark.parametrize(
    ("index", "processor"),
    [(5, RepetitionPenaltyLogitsProcessor(1.3)), (6, NoRepeatNGramLogitsProcessor(2))],
    ids=["repetition_penalty", "no_repeat_ngram_size"],
)
def test_groups_of_beams_run_processors_too(pair, seed, index, processor):
    """transformers' processors, in place of the fields of transformers 4.48's recorded call."""
    options = diverse_beams.CALLS[index]
    cases = json.loads(diverse_beams.FILE.read_text())
    (case,) = (c for c in cases if (c["seed"], c["options"]) == (seed, options))
    call = diverse_beams.call_of(options)
    call.pop("repetition_penalty", None)
    call.pop("no_repeat_ngram_size", None)
    prompts = diverse_beams.padded(diverse_beams.rows_of(options))
    found = pair[1].generate(**prompts, **call, logits_processor=[processor])
    new = found.sequences[:, WIDTH:]
    first, second = diverse_beams.CHANGES["eos_token_id"]
    new[new == second] = first  # 4.48 writes its first end-of-sequence token in place of any
    assert found.sequences.tolist() == case["sequences"]


def test_logits_are_kept_as_the_model_gave_them_whatever_a_processor_writes(ours):
    def overwrite(ids, scores):
        return scores.zero_()

    call = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    plain = ours.generate(ROWS, **call)
    found = ours.generate(ROWS, logits_processor=[overwrite], **call)
    assert found.logits[0].tolist() == plain.logits[0].tolist()
    assert found.sequences[0, WIDTH:].tolist() == [0, 0]


# prefix_allowed_tokens_fn ---------------------------------------------------------------------


def allow(prompt, ids):
    """Allow a third of the vocabulary, a different one for each prompt and newest token."""
    return [*range((prompt + int(ids[-1])) % 3, 32, 3), 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 7}, {"repetition_penalty": 1.4}])
def test_only_what_is_allowed_comes_up(pair, mode, options):
    call = {"max_new_tokens": 14, **MODES[mode], **options}
    found = check_equal(pair, ROWS, prefix_allowed_tokens_fn=allow, **call)
    per_prompt = len(found.sequences) // len(ROWS)
    for row, ids in enumerate(found.sequences):
        prompt = row // per_prompt
        for end in range(WIDTH, len(ids)):
            if int(ids[end]) == PAD and int(ids[end - 1]) in (2, 9, PAD):
                break
            assert int(ids[end]) in allow(prompt, ids[:end])


@pytest.mark.parametrize("mode", MODES)
def test_prefix_allowed_tokens_override_forbidding_fields(pair, mode):
    def only(prompt, ids):
        return [5, 6] if len(ids) % 2 else torch.tensor([7, 8, 9])

    call = {"max_new_tokens": 8, "bad_words_ids": [[5], [6]], **MODES[mode]}
    found = check_equal(pair, ROWS, prefix_allowed_tokens_fn=only, **call)
    assert set(found.sequences[:, WIDTH].tolist()) <= {5, 6}


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize("allowed", [[5], [9], [5, 9], [5, 6, 9]])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_more_beams_than_allowed_sequences(pair, allowed, new, early_stopping):
    check_equal(
        pair,
        ROWS,
        prefix_allowed_tokens_fn=lambda prompt, ids: allowed,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=new,
        early_stopping=early_stopping,
        do_sample=False,
    )


def test_groups_of_beams_have_what_is_allowed(ours):
    call = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_new_tokens": 9}
    call |= {"num_return_sequences": 4, "eos_token_id": []}
    found = ours.generate(ROWS, prefix_allowed_tokens_fn=allow, **call)
    for index, row in enumerate(ROWS):
        for ids in found[4 * index : 4 * index + 4]:
            for end in range(len(row), len(row) + 9):
                assert int(ids[end]) in allow(index, ids[:end])


# What users get wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logits_processor": lean}, "logits_processor is .* must be a list"),
        ({"logits_processor": [lean, 3]}, "logits_processor is .*3.* must be a list"),
        ({"logits_processor": [lambda ids, scores: None]}, "returned None: it must return"),
        (
            {"logits_processor": [lambda ids, scores: scores[:1]]},
            r"returned scores of \(1, 32\) for scores of \(3, 32\)",
        ),
        ({"stopping_criteria": "end"}, "stopping_criteria is 'end'"),
        ({"logits_processors": [lean]}, "'logits_processors': did you mean logits_processor?"),
        ({"stopping_criterion": []}, "did you mean stopping_criteria?"),
        ({"prefix_allowed_tokens_fn": [1]}, r"prefix_allowed_tokens_fn is \[1\]"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: []}, "gave no token for row 0"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [3, 32]}, r"gave \[32\] .* from 0 to 31"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_bad_hook_is_named(ours, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        ours.generate(ROWS, **options)


def test_none_is_no_hook(ours):
    nothing = {"logits_processor": None, "stopping_criteria": None, "streamer": None}
    found = ours.generate(ROWS, prefix_allowed_tokens_fn=None, **nothing)
    assert found.tolist() == ours.generate(ROWS).tolist()

"""Fields of GenerationConfig that change scores or lengths, and returned scores, give transformers'
results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from generated import PAD, ROWS, WIDTH, check_equal, generate_both, pair_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native import ROOT
from references import diverse_beams
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from exkv import GenerationConfig
from exkv.sampling import huggingface

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints"),
    pytest.mark.filterwarnings("ignore:Using the model-agnostic default"),
]

#: Every loop, and beams with enough prompts for some to end before others.
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "beam-sampling": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def one_pair(pairs):
    return pairs[0]


def truncate(scores: Tensor, config: GenerationConfig) -> Tensor:
    """Apply the sampling steps to scores (N, V)."""
    for processor in huggingface.processors(config, {}):
        scores = processor(scores, None)
    return scores


# Fields ---------------------------------------------------------------------------------------

FIELDS = [
    {"min_new_tokens": 9},
    {"min_length": 15},
    {"min_length": 4},
    {"min_length": 17, "min_new_tokens": 2},
    {"max_length": 11},
    {"max_length": 9, "max_new_tokens": 12},
    {"min_new_tokens": 30},
    {"suppress_tokens": list(range(4, 18))},
    {"suppress_tokens": [9, 20, 31, 4000]},
    {"begin_suppress_tokens": list(range(16))},
    {"forced_eos_token_id": 17},
    {"forced_eos_token_id": [9, 2]},
    {"forced_eos_token_id": 2, "min_new_tokens": 30},
    {"bad_words_ids": [[token] for token in range(16)]},
    {"bad_words_ids": [[a, b] for a in range(32) for b in range(0, 32, 2)]},
    {"bad_words_ids": [[a, b, c] for a in range(32) for b in range(9) for c in range(9)]},
    {"bad_words_ids": [[2], [9], [5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]},
    {"renormalize_logits": True, "suppress_tokens": [5, 6, 7], "repetition_penalty": 1.5},
]
#: Lengths below those of the prompts, and words that don't occur.
NEUTRAL = [FIELDS[2], FIELDS[-2]]


@pytest.mark.sweep(44)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", FIELDS, ids=lambda options: str(options)[:60])
def test_a_field(pair, options, mode):
    # Up to max_length where only that counts.
    length = {} if "max_length" in options else {"max_new_tokens": 14}
    check_equal(pair, ROWS, **length, **MODES[mode], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.3},
        {"typical_p": 0.9, "top_k": 0},
        {"epsilon_cutoff": 0.05},
        {"eta_cutoff": 0.05, "temperature": 1.5},
        {"eta_cutoff": 0.3, "top_p": 0.9, "typical_p": 0.8, "epsilon_cutoff": 0.01},
        {"epsilon_cutoff": 0.02, "renormalize_logits": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["sampling", "beam-sampling"])
def test_a_field_of_sampling(pair, options, mode):
    check_equal(pair, ROWS, max_new_tokens=14, **MODES[mode], **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"forced_bos_token_id": 12}, {"forced_bos_token_id": 12, "num_beams": 4}],
    ids=str,
)
def test_the_first_token_after_a_prompt_of_one(pair, options, mode):
    options = {**MODES[mode], **options, "begin_suppress_tokens": list(range(13, 28))}
    found = check_equal(pair, [[1], [30]], max_new_tokens=6, **options)
    if "forced_bos_token_id" in options:
        assert found.sequences[:, 1].tolist() == [12] * len(found.sequences)


def test_a_longer_prompt_is_not_given_a_first_token(pair):
    check_equal(pair, ROWS, max_new_tokens=6, do_sample=False, forced_bos_token_id=12)


@pytest.mark.parametrize("options", FIELDS, ids=lambda options: str(options)[:60])
def test_every_field_changes_the_result(one_pair, options):
    """Else the comparisons would also hold for fields that are ignored."""
    ours = one_pair[1]
    prompts = diverse_beams.padded(ROWS)
    length = {} if "max_length" in options else {"max_new_tokens": 14}

    def changes(mode: dict[str, Any]) -> bool:
        without = ours.generate(**prompts, **mode, max_new_tokens=14, seed=1)
        found = ours.generate(**prompts, **mode, **{**length, **options}, seed=1)
        return found.tolist() != without.tolist()

    assert any(map(changes, MODES.values())) == (options not in NEUTRAL)


def test_default_is_20_new_tokens(one_pair):
    found = check_equal(one_pair, ROWS[:1], do_sample=False, eos_token_id=31)
    assert found.sequences.shape == (1, WIDTH + 20)


def test_checkpoint_lengths_apply_as_in_transformers(tmp_path):
    theirs, ours = pair_of(0, tmp_path)
    for stated in ({"max_length": 13}, {"max_length": 13, "max_new_tokens": 4}, {"min_length": 14}):
        (tmp_path / "generation_config.json").write_text(json.dumps(stated))
        theirs.generation_config = type(theirs.generation_config)(
            **stated, eos_token_id=diverse_beams.CHANGES["eos_token_id"], pad_token_id=PAD
        )
        for options in ({}, {"max_new_tokens": 6}, {"max_length": 12}, {"min_new_tokens": 5}):
            check_equal((theirs, ours), ROWS, do_sample=False, **options)


@given(
    seed=st.integers(0, 2**31),
    mass=st.floats(0.01, 0.99),
    epsilon=st.floats(0.0001, 0.9),
    ties=st.booleans(),
    num_beams=st.sampled_from([1, 3]),
)
@example(seed=0, mass=0.999, epsilon=0.999, ties=True, num_beams=3)
def test_truncation_gives_transformers_scores_bit_for_bit(seed, mass, epsilon, ties, num_beams):
    scores = torch.randn(4, 19, generator=torch.Generator().manual_seed(seed)) * 3
    scores = scores.round() if ties else scores
    least = 1 if num_beams == 1 else 3
    options = {"num_beams": num_beams, "eos_token_id": [2, 9], "do_sample": True, "top_k": 12}
    steps = {
        "typical_p": (mass, TypicalLogitsWarper(mass, min_tokens_to_keep=least)),
        "epsilon_cutoff": (epsilon, EpsilonLogitsWarper(epsilon, min_tokens_to_keep=least)),
        "eta_cutoff": (epsilon, EtaLogitsWarper(epsilon, min_tokens_to_keep=least)),
    }
    for name, (value, theirs) in steps.items():
        expected = LogitsProcessorList([TopKLogitsWarper(12), theirs])(None, scores)
        found = truncate(scores, GenerationConfig(**options, **{name: value}))
        assert torch.equal(found, expected), name


@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 200) | st.integers(1000, 4000),
    top_k=st.integers(1, 90),
    top_p=st.floats(0.01, 0.999),
    levels=st.sampled_from([1, 8, 1000]),
    num_beams=st.sampled_from([1, 3]),
)
@settings(max_examples=300)
def test_top_p_gives_transformers_scores_bit_for_bit_without_sorting_what_top_k_dropped(
    seed, vocab_size, top_k, top_p, levels, num_beams
):
    scores = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    scores = (scores * levels).round() / levels
    least = 1 if num_beams == 1 else 3
    theirs = [
        TopKLogitsWarper(top_k, min_tokens_to_keep=least),
        TopPLogitsWarper(top_p, min_tokens_to_keep=least),
    ]
    options = {"num_beams": num_beams, "eos_token_id": [2, 9], "do_sample": True}
    found = truncate(scores, GenerationConfig(**options, top_k=top_k, top_p=top_p))
    assert torch.equal(found, LogitsProcessorList(theirs)(None, scores))


AMONG_WHAT_IS_POSSIBLE = """
import torch
from exkv.sampling.truncation import possible
for vocab_size in (70, 1003, 32000):
    for top_k in (1, 50, 64):
        scores = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(top_k)) * 3
        scores[scores < scores.topk(top_k).values[:, -1:]] = -torch.inf
        width = possible(scores)
        assert top_k <= width <= top_k + 127
        few = scores.topk(width).values.flip(-1).softmax(-1)
        assert torch.equal(few, scores.sort().values.softmax(-1)[:, -width:])
"""


@pytest.mark.parametrize("env", [{}, {"ATEN_CPU_CAPABILITY": "default"}])
def test_probabilities_among_possible_tokens_match_the_full_softmax_bitwise(env):
    """Whether a sum depends on the number of columns depends on torch's kernels."""
    if env:  # torch reads it on import
        command = [sys.executable, "-c", AMONG_WHAT_IS_POSSIBLE]
        env = {**os.environ, **env}
        result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    else:
        exec(AMONG_WHAT_IS_POSSIBLE, {})


def test_top_p_reached_exactly_is_enough():
    scores = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    expected = TypicalLogitsWarper(0.25)(None, scores)
    assert torch.equal(
        truncate(scores, GenerationConfig(typical_p=0.25, top_k=0, do_sample=True)), expected
    )
    assert expected.isfinite().tolist() == [[False, True, False, False]]


# Returned scores ------------------------------------------------------------------------------


def going(found: Any, ends: list[int], new: int) -> Tensor:
    """Which rows still ran at each step: bool (new, N)."""
    ended = torch.isin(found.sequences[:, -new:], torch.tensor(ends)).long().cumsum(1) > 0
    return torch.cat((torch.ones(len(ended), 1, dtype=torch.bool), ~ended[:, :-1]), 1).T


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [5, 9]}])
def test_scores_and_logits_of_each_step(pair, mode, options):
    call = {**MODES[mode], **options, "output_scores": True, "output_logits": True}
    expected, found = generate_both(pair, ROWS, max_new_tokens=14, **call)
    assert found.beam_indices is None
    new = found.sequences.shape[1] - WIDTH
    assert len(found.scores) == len(found.logits) == len(expected.scores) == new
    runs = going(found, diverse_beams.CHANGES["eos_token_id"], new)
    for step in range(new):
        for ours, its in ((found.scores, expected.scores), (found.logits, expected.logits)):
            close(ours[step][runs[step]], its[step][runs[step]])
        assert not found.logits[step][~runs[step]].any()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["beams", "beam-sampling"])
@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.3, "repetition_penalty": 1.4}])
def test_scores_and_logits_of_each_step_of_beams(pair, mode, options):
    call = {**MODES[mode], **options, "output_scores": True, "output_logits": True}
    for row in ROWS:
        expected, found = generate_both(pair, [row], max_new_tokens=14, **call)
        assert found.beam_indices.tolist() == expected.beam_indices.tolist()
        assert len(found.scores) == len(expected.scores) == len(found.logits)
        for name in ("scores", "logits"):
            pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
            for ours, its in pairs:
                close(ours, its)


@pytest.mark.parametrize("mode", ["beams", "beam-sampling"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_transformers_formula_finds_the_beams_scores_in_ours(pair, mode, length_penalty):
    call = {**MODES[mode], "length_penalty": length_penalty, "output_scores": True}
    expected, found = generate_both(pair, ROWS, max_new_tokens=14, **call)
    assert found.beam_indices.tolist() == expected.beam_indices.tolist()
    assert found.logits is None
    formula = pair[0].compute_transition_scores
    steps = formula(found.sequences, found.scores, found.beam_indices)
    close(steps, formula(expected.sequences, expected.scores, expected.beam_indices))
    lengths = (found.beam_indices >= 0).sum(1)
    close(steps.sum(1) / lengths**length_penalty, found.sequences_scores)


def test_greedy_steps_by_transformers_formula(pair):
    call = {"do_sample": False, "output_scores": True, "max_new_tokens": 10, "eos_token_id": 31}
    expected, found = generate_both(pair, ROWS, **call)
    formula = pair[0].compute_transition_scores
    steps = [formula(each.sequences, each.scores, None, True) for each in (found, expected)]
    torch.testing.assert_close(*steps, atol=1e-4, rtol=1e-4)


def test_unrequested_scores_are_not_kept(one_pair):
    found = one_pair[1].generate(ROWS, max_new_tokens=3, return_dict_in_generate=True)
    assert (found.scores, found.logits, found.beam_indices) == (None, None, None)


# User errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 7}, "max_length is 7, and the longest prompt has 7 tokens"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_length": "4"}, "min_length is '4'"),
        ({"typical_p": 0.0}, "typical_p is 0.0"),
        ({"epsilon_cutoff": 1.0}, "epsilon_cutoff is 1.0"),
        ({"eta_cutoff": -0.1}, "eta_cutoff is -0.1"),
        ({"suppress_tokens": "17"}, "suppress_tokens is '17'"),
        ({"suppress_tokens": [-1]}, "suppress_tokens is -1"),
        ({"begin_suppress_tokens": [1.5]}, "begin_suppress_tokens is 1.5"),
        ({"bad_words_ids": [5]}, r"bad_words_ids is \[5\]"),
        ({"bad_words_ids": [[5], []]}, "empty word"),
        ({"bad_words_ids": [[5, 32]]}, "bad_words_ids has the token id 32, .* of 32"),
        ({"forced_bos_token_id": 40}, "forced_bos_token_id has the token id 40"),
        ({"forced_eos_token_id": [2, 40]}, "forced_eos_token_id has the token id 40"),
        ({"forced_eos_token_id": 2, "suppress_tokens": [2, 3]}, "forced_eos_token_id is"),
        ({"forced_bos_token_id": 2, "suppress_tokens": [2, 3]}, "forced_bos_token_id is 2"),
        ({"output_scores": True}, "output_scores is True: set return_dict_in_generate"),
        ({"output_logits": 1}, "output_logits is 1"),
        (
            {
                "output_logits": True,
                "return_dict_in_generate": True,
                "num_beams": 2,
                "num_beam_groups": 2,
                "diversity_penalty": 1.0,
            },
            "output_logits is True with num_beam_groups = 2",
        ),
    ],
    ids=str,
)
def test_a_bad_field_is_named(one_pair, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        one_pair[1].generate(ROWS, **options)


@pytest.mark.parametrize(
    "stated",
    [
        {"watermarking_config": {"bias": 2.0}},
        {"prompt_lookup_num_tokens": 0},
        {"stop_strings": [""]},
        {"max_time": -1.0},
    ],
    ids=str,
)
def test_unsupported_checkpoint_settings_are_refused(tmp_path, stated):
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match=f"generation_config.json: {next(iter(stated))} "):
        GenerationConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "stated",
    [
        {"temperature": 0.0, "do_sample": False},
        {"top_k": -1, "do_sample": False},
        {"top_p": 0.0, "temperature": 0},
        {"pad_token_id": -1, "bos_token_id": -1},
        {"num_beam_groups": 1, "diversity_penalty": 0.5},
        {"transformers_version": "5.0", "guidance_scale": 1.0, "output_attentions": False},
    ],
    ids=str,
)
def test_checkpoint_settings_that_transformers_ignores_are_ignored(tmp_path, stated):
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert GenerationConfig.from_pretrained(tmp_path) == GenerationConfig()

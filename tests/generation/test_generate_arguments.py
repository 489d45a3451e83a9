"""``generate`` accepts transformers' arguments with the same results; errors for those it lacks
name the alternative."""

from __future__ import annotations

import math
import pickle
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from generated import PAD, ROWS, WIDTH, check_equal, pair_of
from on_cpu import on_cpu
from references import diverse_beams
from tiny import llama, reference, save

from exkv import Cache, GenerationConfig, Generator, SamplingParams, Tokenizer
from exkv.decode.stopping import StopStrings

ENDS = diverse_beams.CHANGES["eos_token_id"]
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pair_of(0, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A model that never emits an end token and its tokenizer, in exkv and in transformers."""
    folder = tmp_path_factory.mktemp("model")
    theirs = reference(llama(eos_token_id=None))
    file = save(theirs, folder) / "tokenizer.json"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    said = ["the key is in the kitchen", "anna put the red ball in the garden", "where is it"]
    tokenizer.train_from_iterator(said * 20, vocab_size=320)
    tokenizer.save(str(file))
    ours = on_cpu(folder)
    return theirs, ours, transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))


# Fields ---------------------------------------------------------------------------------------

FIELDS = [
    {"sequence_bias": [[[9], 3.0], [[12, 13], 4.0], [[20], -math.inf]]},
    {"sequence_bias": {(5,): -2.5, (18, 18, 9): 6.0}},
    {"encoder_repetition_penalty": 3.0},
    {"encoder_repetition_penalty": 0.6, "repetition_penalty": 1.2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2},
    {"exponential_decay_length_penalty": (3, 1.8)},
    {"exponential_decay_length_penalty": (0, 1.3), "min_new_tokens": 4},
    {"remove_invalid_values": True, "suppress_tokens": [4, 9]},
    {"eos_token_id": torch.tensor([9, 17])},
    {"eos_token_id": torch.tensor(9), "suppress_tokens": [5]},
    {"top_k": None, "temperature": None, "repetition_penalty": None, "min_length": None},
    {"use_cache": True},
    {"use_cache": False},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", FIELDS, ids=lambda options: str(options)[:60])
def test_field(pair, options, mode):
    # One row: transformers counts the padding of the others as tokens of the prompt.
    check_equal(pair, ROWS[:1], max_new_tokens=14, **MODES[mode], **options)


@pytest.mark.parametrize("options", FIELDS[:7], ids=lambda options: str(options)[:60])
def test_field_has_an_effect(pair, options):
    call = {"max_new_tokens": 14}
    prompt = [*ROWS, [*ROWS[0], 18, 18]]  # which one of them goes on with
    without = pair[1].generate(prompt, **call).tolist()
    assert pair[1].generate(prompt, **call, **options).tolist() != without


def test_a_time_ends_a_call(pair, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    found = pair[1].generate(ROWS[:1], max_time=3.5, max_new_tokens=30, eos_token_id=())
    assert found.shape == (1, WIDTH + 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_texts_end_sequences(texts, mode, length):
    theirs, ours, tokenizer = texts
    prompts = ["the key is", "where", "anna put the red ball in"]
    for text in prompts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        # Without an id that ends sequences, transformers goes on with those that have ended.
        call = {"max_new_tokens": 16, **MODES[mode], "pad_token_id": 0, "eos_token_id": 319}
        torch.manual_seed(1)
        whole = theirs.generate(ids, **call)[0]
        said = max(tokenizer.decode(whole[ids.shape[1] :]).split("\ufffd"), key=len)
        stop = [said[len(said) // 2 :][:length], "never said so"]
        torch.manual_seed(1)
        expected = theirs.generate(ids, **call, stop_strings=stop, tokenizer=tokenizer)
        torch.manual_seed(1)
        assert ours.generate(ids, **call, stop_strings=stop).tolist() == expected.tolist()


def test_a_text_counts_what_the_prompt_holds_of_it(texts):
    tokenizer = Tokenizer(texts[1].config)
    ids = tokenizer.encode("where is it")
    stop = StopStrings(["re is"], tokenizer)
    found = [bool(stop(torch.tensor([ids[:n]]), None)[0]) for n in range(1, len(ids) + 1)]
    assert found.count(True) == 1 and not found[0]


# Names ----------------------------------------------------------------------------------------


def test_other_names_and_configs(pair):
    theirs, ours = pair
    prompts = diverse_beams.padded(ROWS)
    expected = theirs.generate(**prompts, max_new_tokens=9, do_sample=False).tolist()
    cache = Cache(ours, max_seq_len=32, batch_size=3)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    config = transformers.GenerationConfig(max_new_tokens=9, do_sample=False)
    for call in (
        {"inputs": ids, "max_new_tokens": np.int64(9)},
        {"input_ids": ids, "past_key_values": cache, "max_new_tokens": 9},
        {"input_ids": ids, "generation_config": config},
        {"input_ids": ids, "generation_config": {"max_new_tokens": 9, "temperature": None}},
        {"input_ids": ids, "generation_config": SimpleNamespace(to_dict=config.to_dict)},
        {"input_ids": ids, "generation_config": config, "bos_token_id": 1, "synced_gpus": False},
    ):
        assert ours.generate(**call, attention_mask=mask).tolist() == expected
    assert cache.current_seq_len == WIDTH + 8


def test_a_config_of_transformers_leaves_the_rest_to_the_checkpoint(tmp_path):
    theirs, ours = pair_of(1, tmp_path)
    stated = {"repetition_penalty": 1.4, "eos_token_id": 17, "pad_token_id": PAD}
    theirs.generation_config = transformers.GenerationConfig(**stated)
    theirs.generation_config.save_pretrained(tmp_path)
    config = transformers.GenerationConfig(max_new_tokens=12, do_sample=True, top_k=9)
    check_equal((theirs, ours), ROWS[:1], generation_config=config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guidance_scale": 1.5, "num_beams": 2}, "guidance_scale is 1.5 with num_beams = 2"),
        ({"guidance_scale": 2, "prompt_lookup_num_tokens": 3}, "guidance_scale is .*proposed"),
        ({"negative_prompt_ids": [5, 6]}, "negative_prompt_ids are given, and guidance_scale is 1"),
        ({"negative_prompt_ids": [[5]] * 5, "guidance_scale": 2.0}, "has 5 rows for"),
        ({"assistant_model": object()}, "assistant_model is a object"),
        ({"assistant_tokenizer": object()}, "assistant_tokenizer = .*same vocabulary"),
        ({"assistant_ensemble_weight": 0.7}, "assistant_ensemble_weight = 0.7 .*never changes"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0"),
        ({"inputs_embeds": torch.ones(1, 2)}, "inputs_embeds = .*input_ids"),
        ({"output_attentions": True}, "output_attentions = True"),
        ({"position_ids": [0]}, "position_ids .*attention_mask"),
        ({"prefill_chunk_size": 8}, "max_input_len"),
        ({"generation_config": 5}, "generation_config is a int"),
        ({"inputs": [[1]]}, "input_ids and inputs are both given"),
        ({"past_key_values": transformers.DynamicCache()}, "cache is a DynamicCache.*make_cache"),
        ({"cache": 3}, "cache is a int"),
        ({"tokenizer": "x"}, "tokenizer is a str"),
        ({"streamer": 3}, "streamer is 3"),
        ({"stop_strings": 3}, "stop_strings is 3"),
        ({"stop_strings": ["a", ""]}, "empty text"),
        ({"max_time": -1}, "max_time is -1"),
        ({"max_time": "1"}, "max_time is '1'"),
        ({"sequence_bias": {(5,): "x"}}, "sequence_bias is 'x'"),
        ({"sequence_bias": {(99,): 1.0}}, "sequence_bias has the token id 99"),
        ({"sequence_bias": {}}, "sequence_bias is {}"),
        ({"exponential_decay_length_penalty": 3}, "exponential_decay_length_penalty is 3"),
        ({"exponential_decay_length_penalty": (1, 0)}, "exponential_decay_length_penalty is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_unsupported_arguments_name_an_alternative(pair, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        pair[1].generate(ROWS, **options)


# Pad tokens without a mask --------------------------------------------------------------------


@pytest.mark.parametrize("ends", [ENDS, [PAD, 2], PAD, None], ids=str)
@pytest.mark.parametrize("pad", [PAD, None], ids=str)
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_mask_is_inferred_by_transformers_rule(pair, ends, pad, mode):
    theirs, ours = pair
    ids = diverse_beams.padded(ROWS)["input_ids"]
    call = {"max_new_tokens": 10, "eos_token_id": ends, "pad_token_id": pad, **MODES[mode]}
    found = ours.generate(ids, **call)
    assert found.tolist() == theirs.generate(ids, **call).tolist()


def test_a_pad_token_within_a_prompt_is_refused_and_a_mask_allows_it(pair):
    ids = torch.tensor([[5, PAD, 7]])
    with pytest.raises(ValueError, match=f"row 0 of input_ids has the pad token {PAD} after"):
        pair[1].generate(ids, max_new_tokens=2)
    mask = torch.ones_like(ids)
    check = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    assert torch.equal(pair[1].generate(ids, **check), pair[0].generate(ids, **check))


# Logits that no token can be chosen by --------------------------------------------------------


def spoiled(value: float) -> Any:
    def processor(ids, scores):
        scores = scores.clone()
        scores[0] = value
        return scores

    return processor


@pytest.mark.parametrize("mode", [*MODES, "groups"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_invalid_scores_are_refused(pair, mode, value):
    groups = {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 1.0}
    options = {**MODES, "groups": groups}[mode]
    processor = spoiled(value)
    every = (lambda ids, scores: scores * 0 + value) if mode == "beams" else processor
    with pytest.raises(ValueError, match="row 0 of the processed scores"):
        pair[1].generate(ROWS, **options, logits_processor=[every], max_new_tokens=3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_overflowed_are_refused(pair, monkeypatch, mode, value):
    ours = pair[1]
    forward = ours.forward

    def broken(*args, **kwargs):
        logits = forward(*args, **kwargs)
        logits[-1, :, 7] = value
        return logits

    monkeypatch.setattr(ours, "forward", broken)
    with pytest.raises(ValueError, match=f"of the logits holds {value}.*overflowed"):
        ours.generate(ROWS, **MODES[mode], max_new_tokens=3)
    call = {**MODES[mode], "max_new_tokens": 3, "remove_invalid_values": True}
    assert ours.generate(ROWS, **call).shape[1] <= WIDTH + 3


def test_suppressing_every_token_is_refused(pair):
    with pytest.raises(ValueError, match="no token is left to choose"):
        pair[1].generate(ROWS, suppress_tokens=list(range(32)), max_new_tokens=2)


# Numbers and types ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 10**10},
        {"top_k": 2**63},
        {"temperature": 1e-320},
        {"num_beams": 10**9},
        {"num_return_sequences": 10**9, "do_sample": True},
        {"length_penalty": 1e9},
        {"repetition_penalty": 1e-320},
        {"seed": 2**64},
        {"pad_token_id": 2**64},
        {"eos_token_id": [2**64]},
        {"no_repeat_ngram_size": 2**64},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused_before_allocation(pair, monkeypatch, field):
    monkeypatch.setattr(Cache, "of", lambda *args: pytest.fail("asked for a cache"))
    with pytest.raises(ValueError, match=f"^{next(iter(field))} is "):
        pair[1].generate(ROWS, **field)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, [[1.5]], [["x", 1]], [None], 1j], ids=repr)
def test_a_prompt_of_a_wrong_type_is_named(pair, prompts):
    with pytest.raises((TypeError, ValueError), match="input_ids is|prompt 0 is|prompts are text"):
        pair[1].generate(prompts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-320),
        ("temperature", math.inf),
        ("top_k", 2**63),
        ("token_repetition_penalty", 1e-320),
        ("token_repetition_range", 2**63),
        ("token_bias", [1]),
        ("token_bias", {1: math.inf}),
        ("top_p", "0.5"),
    ],
)
def test_a_number_of_sampling_out_of_range_is_named(field, value):
    with pytest.raises((ValueError, TypeError), match=rf"SamplingParams\.{field}.* is "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_tokens": 10**10}, "num_tokens is 10000000000"),
        ({"num_tokens": 1.5}, "num_tokens is 1.5"),
        ({"seed": 2**64}, "seed is "),
        ({"seed": "1"}, "seed is '1'"),
        ({"stop": [1.5]}, "stop has 1.5"),
        ({"settings": GenerationConfig()}, "settings is a GenerationConfig"),
        ({"prompt": 5}, "a prompt is 5"),
        ({"prompt": [[5.5]]}, "a prompt is "),
        ({"prompt": [1, "a"]}, "a prompt is "),
    ],
    ids=str,
)
def test_a_generators_bad_argument_is_named(texts, options, said):
    ours = texts[1]
    generator = Generator(ours, Cache(ours, 32), Tokenizer(ours.config))
    with pytest.raises((ValueError, TypeError), match=said):
        generator.generate_simple(**{"prompt": "where", **options})


def test_more_tokens_than_capacity_are_refused_without_allocation(texts):
    ours = texts[1]
    generator = Generator(ours, Cache(ours, 16), Tokenizer(ours.config))
    generator.generate_simple("where", num_tokens=2**31 - 1)
    assert generator.stats.stop_reasons == ("cache_full",)


def test_a_stop_may_be_one_text(texts):
    ours = texts[1]
    tokenizer = Tokenizer(ours.config)
    whole = Generator(ours, Cache(ours, 64), tokenizer).generate_simple(
        "where", SamplingParams.greedy(), 12, completion_only=True
    )
    found = Generator(ours, Cache(ours, 64), tokenizer).generate_simple(
        "where", SamplingParams.greedy(), 12, completion_only=True, stop=whole[3:5]
    )
    assert found == whole[: whole.index(whole[3:5])]


def test_pickling_error_names_an_alternative(texts):
    ours = texts[1]
    cache = Cache(ours, 16)
    generator = Generator(ours, cache, Tokenizer(ours.config))
    for value, remedy in ((ours, "load"), (cache, "save"), (generator, "build another")):
        with pytest.raises(TypeError, match=f"can't be pickled.*{remedy}"):
            pickle.dumps(value)


def test_no_warning_comes_without_a_reason(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair[1].generate(ROWS, max_new_tokens=3)


# A loop of one's own --------------------------------------------------------------------------


def test_a_loop_written_for_transformers_runs_here(pair):
    """The same loop for both models, whose cache, mask and positions grow."""
    theirs, ours = pair
    prompt = torch.tensor([ROWS[0], ROWS[0][::-1]])

    def logits_of(model, cache, name="cache"):
        seen, ids, mask = [], prompt, torch.ones_like(prompt)
        for _ in range(5):
            past = mask.shape[1] - ids.shape[1]
            places = torch.arange(past, mask.shape[1])[None].expand(2, -1)
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                **{name: cache},
                use_cache=True,
                return_dict=True,
            )
            seen.append(out.logits)
            assert getattr(out, name) is cache
            ids = out.logits[:, -1:].argmax(-1)
            mask = torch.cat((mask, torch.ones_like(ids)), -1)
        return seen

    expected = logits_of(theirs, transformers.DynamicCache())
    for name in ("cache", "past_key_values"):  # the latter before transformers 5.24
        for step, found in enumerate(logits_of(ours, Cache(ours, 32, 2), name)):
            torch.testing.assert_close(found, expected[step], atol=1e-4, rtol=1e-4)
    last = ours(prompt, cache_position=torch.arange(prompt.shape[1]), logits_to_keep=1)
    torch.testing.assert_close(last.logits, expected[0][:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention_mask hides .*new_lens"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask is \(1, 5\)"),
        ({"position_ids": torch.tensor([[1, 2, 3]])}, "position_ids doesn.t match"),
        ({"cache_position": torch.tensor([1, 2, 3])}, "cache_position doesn.t match"),
        ({"logits_to_keep": 2}, "logits_to_keep is 2"),
        ({"output_hidden_states": True}, "output_hidden_states = True"),
        ({"labels": torch.ones(1, 3)}, "labels"),
        ({"cache": transformers.DynamicCache()}, r"cache is a DynamicCache; .*exkv\.DynamicCache"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_contradicting_arguments_of_a_loop_are_refused(pair, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        pair[1].forward(torch.tensor([[5, 6, 7]]), **options)
